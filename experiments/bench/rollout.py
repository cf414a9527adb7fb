"""Sampled tokens per second of multi-turn rollouts, workload W2, against `transformers.generate`.

`python -m experiments.bench.rollout --peer transformers`: 16 conversations with SmolLM2-135M in
float32, four turns of 48 tokens each with a tool's answer between them.  Our engine keeps every
slot's state; the peer is measured both ways, its cache kept between turns (`peer_value`) and the
conversation read again each turn (`ratio_again`).  `--peer llama.cpp`: against its batched slots.
Needs the extras of the `smollm2-135m` preset and, for the peer, torch or `llama-cpp-python`.
Leaves out environments: tools answer at once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.bench import w2
from experiments.bench.report import report
from experiments.config import UsageError, option, parse, run_main
from fastask_jax.model import load_params
from fastask_jax.model.tokenizers import load_tokenizer, shipped_weights
from fastask_jax.rollout.engine import Engine, EngineConfig, Turn

# A token of the vocabulary that no text has: turns end by their budget alone.
NEVER = 16

# What each peer is called in the report, and whether it can read the conversation again.
PEERS = {
    "transformers": "transformers.generate, cache kept",
    "llama.cpp": "llama.cpp, batched slots, float32",
}


@dataclass(frozen=True)
class Config:
    peer: str | None = option(None, f"{' or '.join(PEERS)}, or none")
    episodes: int = option(16, "conversations at a time")
    runs: int = option(3, "measured runs of each kind, in turn; the medians are reported")

    def __post_init__(self) -> None:
        if self.peer not in (None, *PEERS):
            raise ValueError(f"peer is {' or '.join(PEERS)}, or left out, not {self.peer!r}")
        if not (1 <= self.episodes <= 16 and self.runs >= 1):
            raise ValueError("episodes is 1 to 16, and runs at least 1")


class Ours:
    """The engine on the workload."""

    def __init__(self, path: str, prompts: list[list[int]], tools: list[list[list[int]]]) -> None:
        model, self.params = load_params(path, param_dtype="float32")
        model = replace(model, dtype="float32", scan_unroll=model.num_blocks)
        rows = len(prompts)
        # Half the rows in an append call: what they compute between products stays in the caches.
        ends = tuple(w2.PROMPT + turn * w2.TOOL + (turn + 1) * w2.SAMPLED for turn in range(3))
        shape = EngineConfig(
            rows, w2.CONTEXT, append_rows=min(rows, 8), append_buckets=(w2.TOOL, w2.PROMPT),
            decode_rows=rows, attend_buckets=ends, decode_steps=w2.SAMPLED,
        )  # fmt: skip
        self.engine = Engine(model, shape, NEVER)
        self.params = self.engine.place(self.params)
        self.prompts, self.tools = prompts, tools

    def run(self, seed: int) -> float:
        """Seconds of the whole workload."""
        keys = np.random.default_rng(seed).integers(0, 2**32, (len(self.prompts), 2), np.uint32)
        began = time.perf_counter()
        self.engine.append(self.params, dict(enumerate(self.prompts)), fresh=True)
        for turn in range(w2.TURNS):
            turns = {slot: Turn(key, w2.SAMPLED) for slot, key in enumerate(keys)}
            found = self.engine.decode(self.params, turns, 1.0)
            assert all(len(sampled.ids) == w2.SAMPLED for sampled in found.values())
            if turn < w2.TURNS - 1:
                texts = {slot: tools[turn] for slot, tools in enumerate(self.tools)}
                self.engine.append(self.params, texts)
        return time.perf_counter() - began


def main(argv: list[str]) -> None:
    config = parse(Config, argv, prog="python -m experiments.bench.rollout")
    try:
        path = shipped_weights("smollm2-135m")
    except FileNotFoundError as error:
        raise UsageError(str(error)) from None
    prompts, tools = w2.workload(load_tokenizer(path), config.episodes)
    ours = Ours(str(path), prompts, tools)
    ours.run(0)  # compiles
    peer = _peer(config.peer, str(path), prompts, tools) if config.peer else None
    again_too = config.peer == "transformers"
    tokens = config.episodes * w2.TURNS * w2.SAMPLED
    rates: dict[str, list[float]] = {"ours": [], "kept": [], "again": []}
    for number in range(config.runs):
        rates["ours"].append(tokens / ours.run(1 + number))
        print(f"run {number + 1}: ours {rates['ours'][-1]:.1f} tokens/s", flush=True)
        if peer is None:
            continue
        for name in ("kept", "again") if again_too else ("kept",):
            rates[name].append(tokens / peer.run(name == "kept", number))
            print(f"run {number + 1}: {name} {rates[name][-1]:.1f} tokens/s", flush=True)
    numbers: dict[str, Any] = {"episodes": config.episodes, "sampled_tokens": tokens}
    if peer is None:
        report("rollout", "tokens/s", rates["ours"], **numbers)
        return
    assert config.peer is not None
    if again_too:
        again = statistics.median(rates["again"])
        numbers |= {
            "again_value": again, "ratio_again": statistics.median(rates["ours"]) / again
        }  # fmt: skip
    report(
        "rollout", "tokens/s", rates["ours"],
        peer=PEERS[config.peer], peer_runs=rates["kept"], devices=jax.device_count(), **numbers,
    )  # fmt: skip


def _peer(name: str, path: str, prompts: list[list[int]], tools: list[list[list[int]]]) -> Any:
    """What runs the same workload; raises UsageError where its package isn't installed."""
    try:
        if name == "llama.cpp":
            from experiments.bench.w2_llama import Peer
        else:
            from experiments.bench.w2_torch import Peer  # type: ignore[assignment]
    except ModuleNotFoundError as error:
        packages = {"llama_cpp": "llama-cpp-python", "torch": "torch==2.13.0"}
        if error.name not in packages:
            raise
        raise UsageError(f"--peer {name} needs pip install {packages[error.name]}") from None
    return Peer(path, prompts, tools)


if __name__ == "__main__":
    run_main(main)
