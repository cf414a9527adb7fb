"""Where the tests' tasksets, and our own package of one, are found without being installed."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLACES = [str(ROOT), str(ROOT / "envs/verifiers/package"), str(Path(__file__).parent / "tasksets")]


@pytest.fixture(scope="module")
def tasksets():
    """On this process's path, which pool workers take over, and on that of tool servers."""
    pytest.importorskip("verifiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", PLACES + sys.path)
        old = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(PLACES + ([old] if old else [])))
        yield
