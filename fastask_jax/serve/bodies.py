"""Bodies of requests: read within limits, checked field by field, turned into orders.

Whatever is wrong with a request is a `Refused` with the status to answer and one line that says
what to do.

Left out: routes and answers (`app.py`), and what chat messages mean.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from starlette.requests import Request

from fastask_jax.rollout.sampling import episode_key
from fastask_jax.serve.service import Order

# Highest number of a version, of a key's halves, and of a seed's characters.
_VERSIONS, _WORD, _SEED = 2**31 - 1, 2**32 - 1, 200


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, field: str | None = None, **headers: str) -> None:
        super().__init__(text)
        self.status, self.field = status, field
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    body: bytes.  prompt, max_tokens: tokens; None leaves them to the size of a slot.  requests:
    that are open at a time, those that wait included.  seconds: from its first byte to its last.
    """

    body: int = 8 << 20
    prompt: int | None = None
    max_tokens: int | None = None
    requests: int = 512
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("body", "prompt", "max_tokens", "requests", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"the limit of {name} must be above 0, not {value}")


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The object in a request's body.  Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "send JSON, with the header Content-Type: application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            text = f"the body is larger than {limit:,} bytes: send less"
            raise Refused(413, text, Connection="close")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise Refused(400, f"the body isn't JSON in UTF-8 ({text})") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object: {...}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


class Fields:
    """The fields of an object, each taken once; `done` refuses those that nobody took."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._left = dict(value)
        self._taken: list[str] = []

    def take(self, name: str, what: str, check: Callable[[Any], bool], default: Any = ...) -> Any:
        """The field's value; `default` where it is missing or null, unless it is required."""
        self._taken.append(name)
        value = self._left.pop(name, None)
        if value is None:
            if default is ...:
                raise Refused(400, f"{name} is missing: give {what}", name)
            return default
        if not check(value):
            raise Refused(400, f"{name} must be {what}", name)
        return value

    def done(self) -> None:
        if self._left:
            name = repr(min(self._left))[:80]
            raise Refused(400, f"unknown field {name}: there are {', '.join(self._taken)}")


def is_whole(value: Any, least: int = 0, most: int | None = None) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)


def is_number(value: Any) -> bool:
    """A finite one, also as a float32."""
    return type(value) in (int, float) and abs(value) < 3e38


def generate_order(value: Mapping[str, Any], limits: Limits) -> tuple[Order, bool]:
    """What a body of /inference/v1/generate asks for, and whether as a stream."""
    fields = Fields(value)
    ids = fields.take("ids", "a list of token ids, whole numbers from 0", _is_ids)
    max_tokens = fields.take("max_tokens", "a whole number from 1", lambda v: is_whole(v, 1))
    temperature = take_temperature(fields)
    seed, key = take_seed(fields), fields.take("key", "two whole numbers of 32 bits", _is_key, None)
    if seed is not None and key is not None:
        raise Refused(400, "give seed or key, not both", "key")
    stop = fields.take("stop", "a list of token ids, whole numbers from 0", _is_ids, [])
    version = fields.take(
        "min_version", "the version of weights, a whole number from 0",
        lambda v: is_whole(v, 0, _VERSIONS), None,
    )  # fmt: skip
    stream = fields.take("stream", "true or false", lambda v: type(v) is bool, False)
    fields.done()
    check_lengths(len(ids), max_tokens, limits)
    chosen = make_key(seed) if key is None else np.asarray(key, np.uint32)
    return Order(ids, max_tokens, temperature, chosen, frozenset(stop), version), stream


def take_temperature(fields: Fields) -> float:
    what = "a number from 0 to 100"
    return float(
        fields.take("temperature", what, lambda v: is_number(v) and 0 <= v <= 100, 1.0)
    )


def take_seed(fields: Fields) -> int | str | None:
    what = f"a whole number or a text of at most {_SEED} characters"
    return fields.take(
        "seed", what, lambda v: type(v) in (int, str) and len(str(v)) <= _SEED, None
    )


def make_key(seed: int | str | None) -> np.ndarray:
    """The sampling key of a request; a new one without a seed."""
    if seed is None:
        return np.frombuffer(os.urandom(8), np.uint32)
    return episode_key(seed, "request", 0, 0)


def check_lengths(prompt: int, max_tokens: int, limits: Limits) -> None:
    if limits.prompt is not None and prompt > limits.prompt:
        raise Refused(400, f"the prompt has {prompt} tokens; at most {limits.prompt} are taken")
    if limits.max_tokens is not None and max_tokens > limits.max_tokens:
        raise Refused(400, f"max_tokens may be at most {limits.max_tokens}", "max_tokens")


def weights_order(value: Mapping[str, Any]) -> tuple[int, str]:
    """The version and the folder in a body of /inference/v1/weights."""
    fields = Fields(value)
    version = fields.take("version", "a whole number from 0", lambda v: is_whole(v, 0, _VERSIONS))
    path = fields.take("path", "the folder of the weights", _is_path)
    fields.done()
    return version, path


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _is_key(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_whole(v, 0, _WORD) for v in value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value
