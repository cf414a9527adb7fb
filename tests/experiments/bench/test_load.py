"""The benchmark of loading, small."""

import json

import numpy as np
import pytest

from experiments.bench.load import expected, main
from experiments.config import UsageError


@pytest.mark.slow
def test_the_last_line_is_the_result(capsys, tmp_path):
    arguments = "--gigabytes 0.02 --width 256 --dtype bfloat16 --max-shard-bytes 5000000"
    main([*arguments.split(), "--directory", str(tmp_path)])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "load" and line["runs"] == 1
    # Loaded as float32, from bfloat16.
    assert 0.03e9 < line["weights_bytes"] < 0.05e9
    assert line["largest_tensor_bytes"] == 4 * 16 * 256 * 256
    assert line["value"] <= line["resident"]
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_checkpoint():
    leaf = expected(5, (130, 3))
    assert leaf.shape == (130, 3) and leaf.strides[1] == 0
    np.testing.assert_array_equal(leaf[:, 2], [(5 + i) % 128 for i in range(130)])


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--gigabytes 0", "gigabytes, runs and max_shard_bytes must be above 0"),
        ("--width 100", "width must be a multiple of 128"),
        ("--dtype int8", "dtype and param_dtype are one of"),
    ],
)
def test_numbers_are_checked(argument, message):
    with pytest.raises(UsageError, match=message):
        main(argument.split())
