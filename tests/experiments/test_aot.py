"""Ahead-of-time plans: a real compile for a TPU slice where the compiler is installed."""

import json
import os
import subprocess
import sys

import pytest

from experiments.aot import Config, out_of_memory

MESSAGE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (27.03G) exceeds available HBM (15.75G). HLO module: jit__update."
)


def test_the_compilers_complaint_is_read() -> None:
    assert out_of_memory(MESSAGE) == {"used_gib": 27.03, "usable_gib": 15.75}
    assert out_of_memory("another way to say it") == {"message": "another way to say it"}


@pytest.mark.parametrize(
    "fields, match",
    [({"topology": "v2:2x2"}, "generation of v5e"), ({"model": "llama"}, "model is one of")],
)
def test_unknown_names_are_refused(fields, match) -> None:
    with pytest.raises(ValueError, match=match):
        Config(**fields)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.aot", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_a_train_step_compiles_for_a_slice_and_a_large_one_does_not_fit(tmp_path) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler (extra aot) isn't installed")
    plan = tmp_path / "plan.json"
    common = ("--preset", "tiny", "--topology", "v5e:2x2", "--mesh.data", "4", "--sequence", "512")
    fits = run(*common, "--out", str(plan))
    assert fits.returncode == 0, fits.stderr[-2000:]
    values = json.loads(plan.read_text())
    assert values["fits"] and values["flops"] > 0
    parts = values["gib"]
    # Weights and two moments in float32: the arguments can't be smaller.
    assert 12 * 0.6e6 / 2**30 < parts["arguments"] < parts["total"] < 16
    too_large = run(*common, "--rows", "8192")
    assert too_large.returncode == 1, too_large.stderr[-2000:]
    assert "NO" in too_large.stdout and "usable, GiB" in too_large.stdout
