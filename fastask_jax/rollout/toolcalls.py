"""Tool calls in what a model wrote: the Qwen3.5 XML form and the Hermes JSON form (Qwen3).

    <tool_call>                                  <tool_call>
    <function=read_ranges>                       {"name": "read_ranges",
    <parameter=ranges>                            "arguments": {"ranges": ["Orders!A:D"]}}
    ["Orders!A:D"]                               </tool_call>
    </parameter>
    </function>
    </tool_call>

Total over all strings: whatever cannot be understood becomes a `ToolCall` whose `error` tells
the model what is wrong, in few words because the model reads it in its context.  A hand-written
scanner, because regular expressions with nested repeats go exponential on hostile text.
Whether a tool exists and its arguments make sense is for the environment to judge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs.core import ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# For models whose chat template has no words of its own about tools.
HOW_TO_CALL = f"""To call one, write its name and arguments like this; the result comes back:
{OPEN}
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
{CLOSE}"""
MAX_CALLS = 16
MAX_NAME = 128
# Of lists and objects in each other.  Python reads deeper ones than it can pickle.
MAX_DEPTH = 64

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class _Malformed(Exception):
    """What is wrong with one call; the text goes back to the model."""


def parse_reply_text(
    text: str, tools: Sequence[ToolSpec] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a model's turn into its content and its tool calls, in order.

    Text outside of calls is the content.  A leading thought (`<think>...</think>`) is left out
    of both.  In the XML form a parameter's text becomes JSON only where the tool's schema asks
    for something other than a string and the text parses; everything else stays a string.
    """
    text = _after_thought(text)
    schemas = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    content: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        if len(calls) == MAX_CALLS:
            calls.append(_failed(f"more than {MAX_CALLS} tool calls in one turn"))
            return _join(content), tuple(calls)
        call, position = _parse_call(text, start + len(OPEN), schemas)
        calls.append(call)
    content.append(text[position:])
    if not calls and FUNCTION in text:
        calls.append(_failed(f"missing {OPEN} before {FUNCTION}...>"))
    return _join(content), tuple(calls)


def _join(content: list[str]) -> str:
    return "".join(content).strip()


def _failed(reason: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, f"malformed tool call: {reason}")


def _after_thought(text: str) -> str:
    end = text.find("</think>")
    opened = text.lstrip().startswith("<think>")
    if end >= 0 and (opened or text.find(OPEN, 0, end) < 0):
        return text[end + len("</think>") :]
    return "" if opened else text


def _parse_call(
    text: str, start: int, schemas: dict[str, dict[str, Any]]
) -> tuple[ToolCall, int]:
    """The call whose body begins at `start`, and where to go on reading."""
    body = _skip_space(text, start)
    name = ""
    try:
        if text.startswith("{", body):
            name, arguments, end = _json_call(text, body)
        elif text.startswith(FUNCTION, body):
            name, end = _tag_name(text, body, FUNCTION)
            arguments, end = _xml_arguments(text, end, schemas.get(name, {}))
        else:
            raise _Malformed(f"expected {FUNCTION}NAME> after {OPEN}")
        end = _skip_space(text, end)
        if not text.startswith(CLOSE, end):
            raise _Malformed(f"missing {CLOSE}")
        return ToolCall(name, arguments), end + len(CLOSE)
    except _Malformed as problem:
        return _failed(str(problem), name), _resume(text, start)


def _resume(text: str, start: int) -> int:
    """After a malformed call: behind its closing tag, or at the next opening tag."""
    close, opening = text.find(CLOSE, start), text.find(OPEN, start)
    if close >= 0 and (opening < 0 or close < opening):
        return close + len(CLOSE)
    return opening if opening >= 0 else len(text)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _tag_name(text: str, start: int, tag: str) -> tuple[str, int]:
    """The NAME in `<tag=NAME>` at `start`, and the position behind the tag."""
    begin = start + len(tag)
    end = text.find(">", begin, begin + MAX_NAME + 1)
    name = text[begin:end].strip() if end >= 0 else ""
    if not name or any(c in name for c in "<\n"):
        raise _Malformed(f"{tag}NAME> has no proper name")
    return name, end + 1


def _xml_arguments(
    text: str, position: int, schema: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while True:
        position = _skip_space(text, position)
        if text.startswith(END_FUNCTION, position):
            return arguments, position + len(END_FUNCTION)
        if not text.startswith(PARAMETER, position):
            raise _Malformed(f"expected {PARAMETER}NAME> or {END_FUNCTION}")
        key, begin = _tag_name(text, position, PARAMETER)
        end = text.find(END_PARAMETER, begin)
        if end < 0:
            raise _Malformed(f"missing {END_PARAMETER} of {key}")
        if key in arguments:
            raise _Malformed(f"parameter {key} is given twice")
        value = text[begin:end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, schema.get(key, {}))
        position = end + len(END_PARAMETER)


def _typed(value: str, schema: Any) -> Any:
    wanted = _types(schema)
    if not wanted or wanted == {"string"}:
        return value
    try:
        parsed = _loads(value)
    except _Malformed:
        return value
    if "string" not in wanted:
        return parsed
    fits = any(isinstance(parsed, _PYTHON_TYPES.get(name, ())) for name in wanted)
    return parsed if fits else value


def _types(schema: Any) -> set[str]:
    """The types that a schema names.  It may be a stranger's: what makes no sense says nothing."""
    types: set[str] = set()
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        names = declared if isinstance(declared, list) else [declared]
        types.update(name for name in names if isinstance(name, str))
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            left.extend(options if isinstance(options, list) else ())
    return types


def _json_call(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    value, end = _decode(text, start)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _Malformed('the JSON needs a text "name"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise _Malformed('"arguments" must be a JSON object')
    return value["name"][:MAX_NAME], arguments, end


def _loads(text: str) -> Any:
    begin = _skip_space(text, 0)
    value, end = _decode(text, begin)
    if _skip_space(text, end) != len(text):
        raise _Malformed("text after the JSON value")
    return value


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _is_deep(value):
            raise _Malformed("the JSON is nested too deeply")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
        return value, end
    except UnicodeEncodeError:
        raise _Malformed("the JSON holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise _Malformed(f"bad JSON: {error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise _Malformed("the JSON is nested too deeply") from None
    except ValueError:
        raise _Malformed("the JSON holds a number that is no number or too long") from None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        if not inner:
            return False
        level = inner
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
