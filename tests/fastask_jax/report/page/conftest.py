"""Runs for the page: two small ones of real episodes, and lines that no honest run would write."""

import json

import pytest

SCRIPT = "</script><script>window.pwned = 1</script>"
IMAGE = "<img src=x onerror='window.pwned = 2'>"
LINES = "line\u2028separator\u2029paragraph\x00zero\\'quotes\"`${window.pwned = 3}`"
LONE = "half \ud800 of a pair"
HOSTILE = SCRIPT + IMAGE + LINES + LONE


def hostile_trace(text: str = HOSTILE) -> dict:
    """A trace whose every text is an attack."""
    return {
        "step": 99, "split": "train", "task": text, "group": 7, "sample": 0, "question": text,
        "valid": True, "error": text, "stop_reason": text, "reward": 0.5,
        "parts": {"correct": 0.0, "__proto__": 1.0, text: 1.0},
        "info": {
            "answer": text, "truth": text, "type": text, "family": text, "difficulty": text,
            "turns": 1, "cells": 4,
            "reads": [[1, 1, f"'{text.replace(chr(39), chr(39) * 2)}'!A1:B2", "nonsense", 7], "x"],
        },
        "sheets": [[text, "A1:B2", "red;}", text], ["Odd", 5, None, None], "x"],
        "turns": [
            {"role": "prompt", "text": f"<|im_start|>{text}"},
            {"role": "reply", "text": text, "tokens": 2, "versions": [0], "logprob": -1.0,
             "chars": [3, len(text) - 3], "logprobs": [-0.5, -0.5]},
            {"role": text, "text": "x" * 300_000},
        ],
    }  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two runs of 72 episodes with different seeds; the first ends with a hostile trace."""
    from experiments.bench.view_run import write_run

    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("first", "second")):
        write_run(folder / name, 72, distinct=16, seed=seed)
    with (folder / "first" / "traces.jsonl").open("a") as file:
        file.write(json.dumps(hostile_trace()) + "\n")
    return folder / "first", folder / "second"
