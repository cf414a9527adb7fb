"""The benchmark of the train step, untimed: that both sides do W1's work."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments.bench import w1
from experiments.bench.train_step import check, main, write_model
from experiments.config import UsageError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("w1")
    write_model(path)
    return path


def test_the_workload_is_the_one_described():
    sequences = w1.batch()
    assert len(sequences) == w1.SEQUENCES and max(map(len, sequences)) == 762
    assert sum(map(len, sequences)) == w1.TOKENS
    assert sum(int(s.mask.sum()) for s in sequences) == w1.MODEL_TOKENS
    assert not any(s.mask[: s.prompt].any() for s in sequences)
    assert sum(x.size for x in w1.weights().values()) == 6_819_072


def test_other_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(w1, "_TOKENS_DIGEST", "0" * 16)
    with pytest.raises(ValueError, match="the tokens of W1 came out as"):
        w1.batch()


@pytest.mark.slow
def test_our_first_step_is_that_of_w1(directory):
    # As large as it is, it is quicker compiled with care: in a process without the tests' flags.
    code = f"""
from experiments.bench.train_step import Config, OurStep, check
step = OurStep({str(directory)!r}, Config(devices=1, row_length=2048, scan_unroll=1))
check("ours", *step())
print(step.packed.fill, step()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    fill, second = map(float, done.stdout.split())
    assert fill > 0.8 and second != pytest.approx(w1.LOSS, abs=2e-6)


def test_other_work_gets_no_figure():
    with pytest.raises(RuntimeError, match="ours: the first step has the loss -0.055000"):
        check("ours", -0.055, w1.GRADIENT_NORM)
    with pytest.raises(RuntimeError, match="no figure"):
        check("ours", w1.LOSS, 0.5)


@pytest.mark.slow
@pytest.mark.parity
def test_arrangements_of_torch_hold_the_same_tokens():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from experiments.bench import w1_torch

    sequences = w1.batch()
    wanted = np.sort(np.concatenate([s.ids[s.mask] for s in sequences]))
    for name, arrangement in w1_torch.ARRANGEMENTS.items():
        micros = w1_torch.micro_batches(sequences, arrangement)
        targets = np.concatenate([m.targets[m.mask].numpy() for m in micros])
        np.testing.assert_array_equal(np.sort(targets), wanted, err_msg=name)
        assert {m.ids.shape[0] for m in micros} == {arrangement.rows}


@pytest.mark.parametrize(
    "argument, message",
    [("--peer tunix", "peer must be one of transformers"), ("--runs 0", "runs must be at least 1")],
)
def test_options_are_checked(argument, message):
    with pytest.raises(UsageError, match=message):
        main(argument.split())


def test_a_peer_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--peer transformers needs torch"):
        main(["--peer", "transformers"])
    assert not multiprocessing.active_children()
