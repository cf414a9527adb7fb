"""Finished trajectories as JSON, for checkpoints: exact, and a few bytes a token."""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from envs.core import Score
from fastask_jax.rollout.transcript import OBSERVATION, PROMPT, Trajectory

_FIELDS = ("task_id", "group", "sample", "stop_reason", "error", "advantage", "seconds")


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its task."""
    mask = trajectory.mask
    score = trajectory.score
    return {
        **{name: getattr(trajectory, name) for name in _FIELDS},
        "score": None if score is None else asdict(score),
        "spans": [[span.kind, span.start, span.end] for span in trajectory.spans],
        "ids": _text(trajectory.ids),
        "logprobs": _text(trajectory.logprobs[mask]),
        "versions": _text(trajectory.versions[mask]),
    }


def from_json(value: dict[str, Any]) -> Trajectory:
    """The trajectory that `to_json` was given, but for its task."""
    score = value["score"]
    trajectory = Trajectory(
        **{name: value[name] for name in _FIELDS},
        score=None if score is None else Score(**score),
    )
    ids = _array(value["ids"], np.int32)
    logprobs = _array(value["logprobs"], np.float32)
    versions = _array(value["versions"], np.int32)
    used = 0
    for kind, start, end in value["spans"]:
        text = ids[start:end].tolist()
        if kind == PROMPT:
            trajectory.add_prompt(text)
        elif kind == OBSERVATION:
            trajectory.add_observation(text)
        else:
            own = slice(used, used + end - start)
            tokens = zip(text, logprobs[own].tolist(), versions[own].tolist(), strict=True)
            for version, part in groupby(tokens, itemgetter(2)):
                pieces = list(part)
                trajectory.add_sampled([t for t, *_ in pieces], [p for _, p, _ in pieces], version)
            used += end - start
    return trajectory


def _text(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")


def _array(text: str, kind: Any) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)
