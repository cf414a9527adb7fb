"""Frames and typed values, and frames that are none."""

import datetime
import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox import wire
from envs.workbook import CellError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.timedeltas(),
    st.sampled_from(["#N/A", "#REF!", "#DIV/0!", "#SPILL!"]).map(CellError),
)


def through(message, limit=1 << 20):
    return wire.receive(io.BytesIO(wire.pack(message)).read, limit)


@given(st.lists(st.lists(VALUES, max_size=6), max_size=6))
def test_values_come_back_with_their_types(rows):
    back = wire.decode_rows(through({"rows": wire.encode_rows(rows)})["rows"])
    assert len(back) == len(rows)
    for sent, got in zip(rows, back, strict=True):
        for a, b in zip(sent, got, strict=True):
            if isinstance(a, CellError):
                assert type(b) is wire.CellError and str(b) == str(a)
            else:
                assert type(a) is type(b) and a == b


def test_error_cells_equal_no_text():
    error = wire.CellError("#N/A")
    assert error == wire.CellError("#N/A") and not error != wire.CellError("#N/A")
    assert error != "#N/A" and not error == "#N/A" and "#N/A" != error
    assert error != wire.CellError("#REF!")
    assert len({error, wire.CellError("#N/A"), "#N/A"}) == 2


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\0\0", "ended inside"),
        (b"\0\0\0\5ab", "ended inside"),
        (b"\xff\xff\xff\xff", "limit is 1000"),
        (b"\0\0\0\2[]", "not a JSON object"),
        (b"\0\0\0\0", "not JSON"),
        (b"\0\0\0\4\x80\x04N.", "not JSON"),
        (struct.pack(">I", 1000) + b"[" * 1000, "not JSON"),
        (struct.pack(">I", 900) + b'{"a":' * 180, "not JSON"),
    ],
)
def test_what_is_no_frame(data, words):
    with pytest.raises(wire.MalformedFrame, match=words):
        wire.receive(io.BytesIO(data).read, 1000)


def test_frames_follow_each_other_in_small_pieces():
    stream = io.BytesIO(wire.pack({"a": "é" * 50}) + wire.pack({"b": 2}))

    def read(size):
        return stream.read(min(size, 3))

    assert wire.receive(read, 1000) == {"a": "é" * 50}
    assert wire.receive(read, 1000) == {"b": 2}
    assert wire.receive(read, 1000) is None


def test_a_frame_is_length_and_json():
    data = wire.pack({"x": [1, "\ud800"]})
    assert struct.unpack(">I", data[:4]) == (len(data) - 4,)
    assert json.loads(data[4:]) == {"x": [1, "\ud800"]}
    assert datetime.date.fromisoformat(
        wire.encode_rows([[datetime.date(2024, 1, 2)]])[0][0]["date"]
    ) == datetime.date(2024, 1, 2)
