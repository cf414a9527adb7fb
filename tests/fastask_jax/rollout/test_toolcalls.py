import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.core import ToolCall, ToolSpec
from fastask_jax.rollout.toolcalls import MAX_CALLS, parse_reply_text

TOOLS = (
    ToolSpec("get_workbook_metadata", "", {"type": "object", "properties": {}}),
    ToolSpec(
        "read_ranges",
        "",
        {
            "type": "object",
            "properties": {
                "ranges": {"type": "array", "items": {"type": "string"}},
                "show": {"type": "integer"},
                "loose": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            },
        },
    ),
    ToolSpec("run_python", "", {"type": "object", "properties": {"code": {"type": "string"}}}),
)


# Python reads it, and can't pickle it for a worker.
DEEP = "[" * 500 + "]" * 500


def xml(name, **parameters):
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (xml("get_workbook_metadata"), ToolCall("get_workbook_metadata")),
        (
            xml("read_ranges", ranges='["A!A:B", "B!C1"]', show="5"),
            ToolCall("read_ranges", {"ranges": ["A!A:B", "B!C1"], "show": 5}),
        ),
        # not JSON: the environment gets to say what it wants
        (xml("read_ranges", ranges="A!A:B"), ToolCall("read_ranges", {"ranges": "A!A:B"})),
        # a string parameter is never turned into JSON
        (xml("run_python", code="12"), ToolCall("run_python", {"code": "12"})),
        (xml("run_python", code=" a\n  b "), ToolCall("run_python", {"code": " a\n  b "})),
        (xml("run_python", code="\nx\n"), ToolCall("run_python", {"code": "\nx\n"})),
        (
            xml("run_python", code="print('</tool_call><tool_call>')"),
            ToolCall("run_python", {"code": "print('</tool_call><tool_call>')"}),
        ),
        (xml("read_ranges", loose='["A"]'), ToolCall("read_ranges", {"loose": ["A"]})),
        (xml("read_ranges", loose="7"), ToolCall("read_ranges", {"loose": "7"})),
        (xml("unknown", value="[1]"), ToolCall("unknown", {"value": "[1]"})),
        (
            '<tool_call>\n{"name": "read_ranges", "arguments": {"ranges": ["A!A"]}}\n</tool_call>',
            ToolCall("read_ranges", {"ranges": ["A!A"]}),
        ),
        (
            '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
            ToolCall("x", {"a": 1}),
        ),
        ('<tool_call>{"name": "x"}</tool_call>', ToolCall("x")),
        (
            '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>"}}</tool_call>',
            ToolCall("x", {"a": "</tool_call>"}),
        ),
    ],
)
def test_well_formed_calls(text, call):
    assert parse_reply_text(text, TOOLS) == ("", (call,))


def test_content_and_several_calls():
    text = "First.\n" + xml("get_workbook_metadata") + "\n" + xml("run_python", code="1") + " end"
    content, calls = parse_reply_text(text, TOOLS)
    assert content == "First.\n\n end"
    assert [c.name for c in calls] == ["get_workbook_metadata", "run_python"]
    assert all(c.error is None for c in calls)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "expected <function=NAME>"),
        ("<tool_call>\nread_ranges(1)\n</tool_call>", "expected <function=NAME>"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "no proper name"),
        ("<tool_call>\n<function=" + "x" * 500 + ">", "no proper name"),
        ("<tool_call>\n<function=f\n<parameter=a>1</parameter>", "no proper name"),
        ("<tool_call><function=f>", "expected <parameter=NAME>"),
        ("<tool_call><function=f></function>", "missing </tool_call>"),
        ("<tool_call><function=f><parameter=a>1", "missing </parameter> of a"),
        (
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>",
            "given twice",
        ),
        ("<function=f>\n</function>", "missing <tool_call>"),
        ("<tool_call>{", "bad JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}', "no number"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}', "no number"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "no number"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "bad JSON"),
        ('<tool_call>{"name": 3}</tool_call>', '"name"'),
        ('<tool_call>{"a": ' + "[" * 100_000, "nested too deeply"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {DEEP}}}}}</tool_call>', "too deeply"),
        (f'<tool_call>{{"name": "f", "arguments": "[{DEEP}]"}}</tool_call>', "too deeply"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
    ],
)
def test_malformed_calls_say_what_is_wrong(text, reason):
    _, calls = parse_reply_text(text, TOOLS)
    assert len(calls) == 1
    assert calls[0].error is not None
    assert calls[0].error.startswith("malformed tool call: ")
    assert reason in calls[0].error
    assert len(calls[0].error) < 120


def test_a_malformed_call_does_not_hide_the_next():
    text = "<tool_call>\nnonsense\n</tool_call>" + xml("get_workbook_metadata")
    _, calls = parse_reply_text(text, TOOLS)
    assert calls[0].error is not None
    assert calls[1] == ToolCall("get_workbook_metadata")
    nested = "<tool_call>\n<tool_call>\n" + xml("run_python", code="1")
    _, calls = parse_reply_text(nested, TOOLS)
    assert [c.error is None for c in calls] == [False, False, True]


def test_thoughts_are_left_out():
    thought = "<think>maybe <tool_call> later</think>\n\nANSWER: 3"
    assert parse_reply_text(thought) == ("ANSWER: 3", ())
    assert parse_reply_text("rest of a thought</think>ANSWER: 3") == ("ANSWER: 3", ())
    assert parse_reply_text("<think>never ends <tool_call>") == ("", ())
    code = xml("run_python", code="print('</think>')")
    assert parse_reply_text(code, TOOLS)[1][0].arguments == {"code": "print('</think>')"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 10_000,
        ("<tool_call><function=f>" + "<parameter=a></parameter>" * 3) * 3_000,
        "<tool_call><function=f>" + "".join(f"<parameter=p{i}>" for i in range(5_000)),
        "<tool_call>" + "{" * 10_000,
        "</tool_call>" * 10_000,
        "\x00\ufffd" * 10_000,
        "<tool_call>" + " " * 200_000,
    ],
)
def test_junk_is_bounded_in_time_and_calls(text):
    start = time.perf_counter()
    _, calls = parse_reply_text(text, TOOLS)
    assert time.perf_counter() - start < 1.0
    assert len(calls) <= MAX_CALLS + 1
    assert all(c.error for c in calls)


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "<think>",
        "</think>",
        "read_ranges",
        "ranges>",
        ">",
        "\n",
        '{"name": "',
        '", "arguments": {',
        "}}",
        '["A!A"]',
        "<|im_end|>",
        "\ud800",
        "\x00",
        " x ",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join))
def test_never_raises(text):
    content, calls = parse_reply_text(text, TOOLS)
    assert isinstance(content, str)
    for call in calls:
        assert call.error is None or call.error.startswith("malformed tool call: ")
        assert call.error or call.name


def test_values_that_are_read_can_be_sent_to_a_worker():
    for depth in range(1, 1200):
        text = "[" * depth + "]" * depth
        content, calls = parse_reply_text(xml("read_ranges", ranges=text), TOOLS)
        pickle.dumps((content, calls))
    assert calls[0].arguments == {"ranges": text}  # as text, for the environment to refuse


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5}, {"type": None}, {"type": [["x"]]}, {"type": {"a": 1}}, {"anyOf": 5},
        {"anyOf": {"a": 1}}, {"oneOf": None}, {"oneOf": [{"type": [None, 1]}]}, 7, None, "string",
    ],
)  # fmt: skip
def test_a_schema_that_makes_no_sense_says_nothing(schema):
    tools = (ToolSpec("f", "", {"properties": {"a": schema}}),)
    _, [call] = parse_reply_text(xml("f", a="1"), tools)
    assert call == ToolCall("f", {"a": "1"})


def test_a_schema_may_be_nested_as_deeply_as_it_likes():
    schema: dict = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    tools = (ToolSpec("f", "", {"properties": {"a": schema}}),)
    _, [call] = parse_reply_text(xml("f", a="1"), tools)
    assert call.arguments == {"a": 1}
