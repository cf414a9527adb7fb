"""Fields of config dataclasses: their types, their values as text, and as JSON.

The lower half of `experiments/config.py`, which turns them into a command line.  Types known:
bool, int, float, str, Path, Literal, Optional of these, tuples, nested dataclasses.  Leaves out
checks of values: those belong to the configs' own `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

C = TypeVar("C")
TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


def option(default: Any = MISSING, help: str = "", *, factory: Any = MISSING) -> Any:
    """A dataclass field with its line of documentation; without a default it is required."""
    metadata = {"help": help}
    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Leaf:
    """One option: its dotted name, its type and its documentation."""

    name: str
    type: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def is_config(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """`X | None` gives (X, True); anything else (kind, False)."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(kind) if a is not types.NoneType]
        if len(inner) == 1 and len(inner) < len(typing.get_args(kind)):
            return inner[0], True
        raise TypeError(f"config fields can't be a union of several types: {kind}")
    return kind, False


def fields_of(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield field, hints[field.name]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; MISSING where it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def documented(cls: type) -> dict[str, str]:
    """First sentences about fields in the class's docstring, where `name: text` or
    `name, other: text` stand; a text ends at the next names or at an empty line."""
    names = {field.name for field in dataclasses.fields(cls)}
    one = f"(?:{'|'.join(sorted(names, key=len, reverse=True))})"
    found: dict[str, str] = {}
    for block in (cls.__doc__ or "").split("\n\n"):
        starts = list(re.finditer(rf"(?:^|(?<=\s))({one}(?:,\s+{one})*):\s+", block))
        ends = [match.start() for match in starts[1:]] + [len(block)]
        for match, end in zip(starts, ends, strict=False):  # no names, one end
            text = " ".join(block[match.end() : end].split())
            first = re.split(r'(?:(?<=[^.]\w)|(?<=[)\]"`]))\.(?:\s|$)', text)[0].rstrip(".")
            for name in re.split(r",\s+", match[1]):
                found.setdefault(name, first)
    return found


def leaves_of(cls: type, prefix: str = "") -> Iterator[Leaf]:
    about = documented(cls)
    for field, kind in fields_of(cls):
        inner, _ = strip_optional(kind)
        name = prefix + field.name
        if is_config(inner):
            yield from leaves_of(inner, name + ".")
        else:
            describe(kind)  # a type that no option can spell is the programmer's error
            help = field.metadata.get("help") or about.get(field.name, "")
            yield Leaf(name, kind, help)


def describe(kind: Any) -> str:
    """The type as a person reads it in --help and in messages."""
    inner, optional = strip_optional(kind)
    if optional:
        return f"{describe(inner)} or none"
    names = {bool: "true/false", int: "integer", float: "number", str: "text", Path: "path"}
    if inner in names:
        return names[inner]
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        return "|".join(str(a) for a in args)
    if origin is tuple and args:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"{describe(args[0])},..."
        return ",".join(describe(a) for a in args)
    raise TypeError(f"no command-line form for a config field of type {kind}")


def read_value(kind: Any, text: str) -> Any:
    """Text to a value of `kind`.  Raises ValueError with what was expected."""
    inner, optional = strip_optional(kind)
    if optional and text.strip().lower() in ("none", "null"):
        return None
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        for choice in args:
            if text == str(choice):
                return choice
        raise ValueError(f"expected one of {', '.join(str(a) for a in args)}, got {text!r}")
    if origin is tuple:
        parts = [p.strip() for p in text.strip("()[] ").split(",")]
        parts = [p for p in parts if p]
        kinds = list(args)
        if len(args) == 2 and args[1] is Ellipsis:
            kinds = [args[0]] * len(parts)
        if len(parts) != len(kinds):
            raise ValueError(f"expected {len(kinds)} values with commas between, got {text!r}")
        return tuple(read_value(k, p) for k, p in zip(kinds, parts, strict=True))
    if inner is bool:
        if text.lower() in TRUE + FALSE:
            return text.lower() in TRUE
        raise ValueError(f"expected true or false, got {text!r}")
    if inner is int:
        return _read_int(text)
    if inner is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {text!r}") from None
    if inner is Path:
        if not text.strip():
            raise ValueError("expected a path, got nothing")
        return Path(text)
    return text


def _read_int(text: str) -> int:
    """Accepts 50_000 and 5e4 too, as long as the value is whole."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
        if value.is_integer() and abs(value) < 2**53:
            return int(value)
    except ValueError:
        pass
    raise ValueError(f"expected an integer, got {text!r}")


def show_value(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(show_value(v) for v in value)
    return str(value)


def to_dict(config: Any) -> dict[str, Any]:
    """The config as JSON values; `from_dict` gives the equal config back."""
    return {f.name: _plain(getattr(config, f.name)) for f, _ in fields_of(type(config))}


def to_json(config: Any) -> str:
    """`to_dict` as text, floats in full precision, one field a line."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(cls: type[C], text: str) -> C:
    """Inverse of `to_json`.  Raises ValueError that names a field which isn't known or doesn't
    fit.  A field that the text lacks takes its default: configs of older runs stay readable."""
    return from_dict(cls, json.loads(text))


def from_dict(cls: type[C], data: Mapping[str, Any], prefix: str = "") -> C:
    """Inverse of `to_dict`; see `from_json`."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{prefix.rstrip('.') or 'the config'} should be a JSON object")
    kinds = {field.name: kind for field, kind in fields_of(cls)}
    kwargs: dict[str, Any] = {}
    for name, value in data.items():
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, n=1)
            hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
            raise ValueError(f"unknown field {prefix}{name}{hint}")
        kwargs[name] = _unplain(kinds[name], value, prefix + name)
    try:
        return cls(**kwargs)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _unplain(kind: Any, value: Any, name: str) -> Any:
    inner, optional = strip_optional(kind)
    if value is None and optional:
        return None
    if is_config(inner):
        return from_dict(inner, value, name + ".")
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    fits = False
    if origin is Literal:
        fits = value in args
    elif origin is tuple:
        variable = len(args) == 2 and args[1] is Ellipsis
        fits = isinstance(value, list) and (variable or len(value) == len(args))
        if fits:
            kinds = [args[0]] * len(value) if variable else args
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(_unplain(k, v, f"{name}[{i}]") for i, (k, v) in pairs)
    elif inner is Path:
        fits = isinstance(value, str)
        value = Path(value) if fits else value
    elif inner is bool or isinstance(value, bool):
        fits = inner is bool and isinstance(value, bool)
    elif inner is float:
        fits = isinstance(value, int | float)
        value = float(value) if fits else value
    else:
        fits = isinstance(value, inner)
    if not fits:
        raise ValueError(f"{name}: expected {describe(kind)}, got {value!r}")
    return value
