"""A clear error when a foreign package named `kernels` stands in the place of ours.

Hugging Face publishes a package with that name, and any folder called `kernels` earlier on
`sys.path` shadows ours too.  Without this check the first symptom is an AttributeError deep in a
model.  Ours is recognised by `__fastask__ = True` in its source; the file is read, not imported,
because either package pulls in heavy libraries.  Leaves out repairing anything.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_REPAIR = (
    "run `pip uninstall kernels`, then `pip install --force-reinstall --no-deps .` in the "
    "checkout of fastask-jax"
)
_MARK = re.compile(r"^__fastask__\s*(?::\s*\w+\s*)?=\s*True\b", re.MULTILINE)


class ForeignKernelsError(ImportError):
    """The module `kernels` on this path isn't the one of fastask-jax."""


def check_kernels() -> None:
    """Raises ForeignKernelsError unless `import kernels` gives the package of this project."""
    loaded = sys.modules.get("kernels")
    if loaded is not None:
        if getattr(loaded, "__fastask__", False):
            _check_no_foreign_metadata()
            return
        raise ForeignKernelsError(_foreign_message(_place(loaded.__spec__, loaded)))
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        raise ForeignKernelsError(
            "the package `kernels` of fastask-jax is missing: run from the root of the checkout, "
            "or install the whole project with `pip install .`"
        )
    if not _is_ours(spec):
        raise ForeignKernelsError(_foreign_message(_place(spec, None)))
    _check_no_foreign_metadata()


def _is_ours(spec: ModuleSpec) -> bool:
    source = spec.origin
    if source is None or not source.endswith(".py"):
        return False  # a bare folder (namespace package), or a compiled stranger
    try:
        text = Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return _MARK.search(text) is not None


def _place(spec: ModuleSpec | None, module: object) -> str:
    """The folder a person has to look at."""
    if spec is not None and spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    origin = spec.origin if spec is not None else getattr(module, "__file__", None)
    return str(origin or "an unknown place")


def _foreign_message(place: str) -> str:
    return (
        f"another package named `kernels` stands in the place of fastask-jax's, at {place}. "
        f"If it is Hugging Face's: {_REPAIR}, or use an environment of its own. If it is a "
        "folder of yours, run from another directory or rename it"
    )


def _check_no_foreign_metadata() -> None:
    """Refuses Hugging Face's package installed beside ours: pip writes both into one folder,
    and transformers, which goes by the installed version, then imports its names from ours.

    Looks for the metadata folder itself: importlib.metadata costs 20 ms at every start.
    """
    for entry in sys.path:
        for found in Path(entry or ".").glob("kernels-*.dist-info"):
            raise ForeignKernelsError(
                f"Hugging Face's package `kernels` is installed in this environment ({found}), "
                "and transformers would take fastask-jax's package of that name for it: "
                f"{_REPAIR}, or use an environment of its own"
            )
