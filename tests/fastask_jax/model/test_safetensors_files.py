"""Safetensors files whose headers don't fit their data, refused as the `safetensors` package
refuses them."""

import json
import struct

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fastask_jax.model.safetensors_files import INDEX_FILE, WEIGHTS_FILE, SafetensorsFiles

DATA = np.arange(12, dtype=np.float32).tobytes()


def entry(start, stop, shape=None, dtype="F32"):
    """The tensor of the bytes `start` to `stop`."""
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


WHOLE = {"a": entry(0, 16, [2, 2]), "empty": entry(16, 16), "b": entry(16, 48)}


def write(directory, header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / WEIGHTS_FILE
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("names", [list(WHOLE), list(WHOLE)[::-1]])
def test_tensors_that_cover_the_data(tmp_path, names):
    theirs = load_file(write(tmp_path, {name: WHOLE[name] for name in names}))
    files = SafetensorsFiles(tmp_path)
    assert files.names == theirs.keys()
    for name in theirs.keys() - {"empty"}:
        np.testing.assert_array_equal(files.read(name), theirs[name])


@pytest.mark.parametrize(
    "header, surplus, message",
    [
        (WHOLE | {"b": entry(0, 48)}, 0, "corrupt: data_offsets of b are 0 to 48, .* at 16"),
        (WHOLE | {"b": entry(12, 48)}, 0, "corrupt: data_offsets of b are 12 to 48, .* at 16"),
        (WHOLE | {"b": entry(0, 16)}, 0, "corrupt: data_offsets of b are 0 to 16"),
        (WHOLE | {"b": entry(20, 48)}, 0, "corrupt: data_offsets of b are 20 to 48, .* at 16"),
        (WHOLE | {"a": entry(4, 16)}, 0, "corrupt: data_offsets of a are 4 to 16, .* at 0"),
        (WHOLE, 1, "corrupt: it has .* bytes and its tensors end at"),
        (WHOLE | {"b": entry(16, 44)}, 0, "corrupt: it has .* bytes and its tensors end at"),
        ({}, 0, "corrupt: it has .* bytes and its tensors end at"),
        (WHOLE, -1, "is cut short"),
        (WHOLE | {"c": entry(64, 48, [0], "I64")}, 16, "data_offsets of c are 64 to 48"),
        (WHOLE | {"a": entry(0, 16, [True, 4])}, 0, "can't be read .* isn't one"),
        (WHOLE | {"a": entry(0, 16) | {"shape": 4}}, 0, "can't be read"),
        (b"[" * 100_000, 0, "can't be read .* nested too deeply"),
        (b'{"a":' * 100_000, 0, "can't be read .* nested too deeply"),
        (json.dumps(WHOLE).encode("utf-16"), 0, "can't be read as safetensors"),
    ],
    ids=str.split("contained overlap same hole late_start trailing_byte trailing_bytes no_tensors "
                  "cut_short backwards bool_shape no_list array_depth object_depth utf_16"),
)  # fmt: skip
def test_headers_that_the_package_refuses(tmp_path, header, surplus, message):
    path = write(tmp_path, header, (DATA + bytes(16))[: len(DATA) + surplus])
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(ValueError, match=f"{WEIGHTS_FILE} .*{message}"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize(
    "more, key",
    [
        (f'"b": {json.dumps(entry(0, 16))}', "b"),
        ('"c": {"dtype": "F32", "dtype": "F16"}', "dtype"),
    ],
)
def test_a_key_that_comes_twice(tmp_path, more, key):
    write(tmp_path, f"{{{more}, {json.dumps(WHOLE)[1:]}".encode())
    with pytest.raises(ValueError, match=f"can't be read as safetensors: it has {key} twice"):
        SafetensorsFiles(tmp_path)


def test_an_index_that_is_ambiguous_or_too_deep(tmp_path):
    for text, message in (
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a twice"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (tmp_path / INDEX_FILE).write_text(text)
        with pytest.raises(ValueError, match=f"isn't an index of safetensors files: .*{message}"):
            SafetensorsFiles(tmp_path)
