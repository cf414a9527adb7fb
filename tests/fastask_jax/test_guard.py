"""The guard against a foreign package named `kernels`, each case in a fresh process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(code: str, *path: Path, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `path` in front of everything else on sys.path, from outside the tree.

    bare: without site-packages, where this project itself may be installed."""
    setup = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}; "
    return subprocess.run(
        [sys.executable, *(["-S"] if bare else []), "-c", setup + code],
        capture_output=True,
        text=True,
        cwd=path[0],
    )


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A package as Hugging Face's: importing it is costly, here fatal."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('foreign kernels were imported')\n")
    return package.parent


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("module", ["fastask_jax", "experiments", "fastask_jax.cli"])
def test_a_foreign_package_is_named_and_never_imported(foreign, module) -> None:
    done = start(f"import {module}", foreign, ROOT)
    assert done.returncode == 1
    line = last_line(done)
    assert "ForeignKernelsError: another package named `kernels`" in line
    assert str(foreign / "kernels") in line
    assert "pip uninstall kernels" in line
    assert "foreign kernels were imported" not in done.stderr


def test_a_foreign_package_already_imported_is_found(foreign) -> None:
    (foreign / "kernels" / "__init__.py").write_text("get_kernel = print\n")
    done = start("import kernels, fastask_jax", foreign, ROOT)
    assert done.returncode == 1
    assert str(foreign / "kernels") in last_line(done)


def test_a_bare_folder_of_that_name_is_found(tmp_path) -> None:
    # Without an __init__.py a folder counts only where no real package is on the path.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "fastask_jax").symlink_to(ROOT / "fastask_jax")
    (alone / "kernels").mkdir()
    done = start("import fastask_jax", alone, bare=True)
    assert done.returncode == 1
    assert str(alone / "kernels") in last_line(done)
    assert "another package named `kernels`" in last_line(done)


def test_metadata_of_the_foreign_package_beside_ours_is_found(tmp_path) -> None:
    site = tmp_path / "site"
    (site / "kernels-0.18.2.dist-info").mkdir(parents=True)
    for path in ([site, ROOT], [ROOT, site]):
        done = start("import fastask_jax", *path)
        assert done.returncode == 1
        assert "kernels-0.18.2.dist-info" in last_line(done)
        assert "pip uninstall kernels" in last_line(done)


def test_ours_passes_loaded_or_not(tmp_path) -> None:
    for code in ("import fastask_jax", "import kernels, fastask_jax", "import experiments"):
        done = start(code + "; import kernels; print(kernels.__fastask__)", ROOT)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
