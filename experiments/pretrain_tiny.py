"""Makes the tiny base model: language modelling on the noisy explorer's transcripts.

    python -m experiments.pretrain_tiny --run-dir runs/tiny-base
    python -m experiments.pretrain_tiny --run-dir runs/tiny-base --export runs/tiny-base/policy

The base knows the chat format, the tools and how to copy values, and has all of the
explorer's bad habits; reinforcement learning has to find out which habits pay.  A tiny model
copies nothing for its first millions of tokens and the mean loss hides it, so the log shows the
loss on copied `values` (names, numbers, dates) apart.  Transcripts alone take that loss from 1.2
to 0.8 in six million tokens; then copying drills, from step `drill_from` on, take it to 0.2 in
four million more, and transcripts alone again bring the explorer's habits back (0.5, which is
nearly all noise of its own).  Drills from the start only slow it down.

Transcripts never repeat: number n is made from seed n, in a process of its own.  The learning
rate is constant after a warm-up, then falls to zero over the last part; a later call with more
tokens goes on from the last checkpoint.  Left out: validation by rollouts (see `evaluate`).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from queue import Full
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from envs.fast_ask import StreamConfig
from envs.fast_ask.env import FastAskConfig
from experiments.config import check_place, format_config, option, parse, run_main, save_config
from experiments.tiny_corpus import Piece, recital, train_tokenizer, transcripts
from fastask_jax.learn.checkpoint import Checkpointer
from fastask_jax.model import (
    PRESETS,
    check_finite,
    forward,
    init_params,
    load_balance_loss,
    save_params,
    unembedding,
)
from fastask_jax.model.tokenizers import TINY, TOKENIZERS
from kernels.linear_logprob import linear_logprob


@dataclass(frozen=True)
class Config:
    run_dir: Path = option(Path("runs/tiny-base"), "checkpoints and log; resumed when present")
    export: Path | None = option(None, "only write the last checkpoint as a policy folder, here")
    tokenizer: bool = option(False, "only train the tokenizer into the package, then stop")
    vocab_size: int = option(2560, "entries of the tokenizer")
    tokens: int = option(16_000_000, "tokens to train on in all")
    rows: int = option(8, "packed rows of one step")
    row_length: int = option(512, "tokens of a row; longer transcripts are left out")
    learning_rate: float = option(3e-3, "peak rate of AdamW")
    warmup_steps: int = option(100, "steps of linear warm-up")
    decay: float = option(0.25, "last share of the run, over which the rate falls to zero")
    weight_decay: float = option(0.02, "AdamW's, on matrices")
    transcripts: int = option(19, "transcripts of a step, on average 200 tokens each")
    drill_from: int = option(2000, "first step in which half of a batch are copying drills")
    drill_to: int = option(3000, "first step after the drills")
    save_every: int = option(500, "steps between checkpoints")
    seed: int = option(0, "seed of weights and transcripts")

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay is a share between 0 and 1, not {self.decay}")
        for name in (
            "vocab_size", "tokens", "rows", "row_length", "warmup_steps", "transcripts",
            "save_every",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be 0 or more and finite, not {getattr(self, name)}"
                )

    @property
    def steps(self) -> int:
        return self.tokens // (self.rows * self.row_length)


def encode(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, sampled): the pieces encoded one by one, as a rollout does."""
    encoded = tokenizer.encode_batch_fast([t for t, _ in pieces], add_special_tokens=False)
    ids = [np.asarray(e.ids, np.int32) for e in encoded]
    flags = [np.full(len(i), sampled) for i, (_, sampled) in zip(ids, pieces, strict=True)]
    return np.concatenate(ids), np.concatenate(flags)


def value_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that a policy copies: capitalised words, digit groups, date parts."""
    texts = tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())])
    return np.array([i for i, t in enumerate(texts) if re.fullmatch(r"-?\d+|[A-Z][A-Za-z]+", t)])


def batches(config: Config, start: int) -> Iterator[dict[str, np.ndarray]]:
    """Packed batches from batch number `start` on; batch b depends on config and b alone.

    tokens, positions, segments [rows, length]; predict [n]: flat places of the tokens whose
    successor was sampled; weights [n]: 1, or 0 for the filling.
    """
    tokenizer = Tokenizer.from_file(str(TOKENIZERS / TINY / "tokenizer.json"))
    env = FastAskConfig(prompt="short")
    shape = (config.rows, config.row_length)
    room = config.rows * config.row_length
    for number in count(start):
        rng = Random(f"batch/{config.seed}/{number}")
        source = transcripts(StreamConfig(seed=config.seed), env, number * config.transcripts)
        parts = [encode(tokenizer, pieces) for pieces in islice(source, config.transcripts)]
        if config.drill_from <= number < config.drill_to:
            parts = parts[: config.transcripts // 2]
            while sum(len(ids) for ids, _ in parts) < 0.9 * room:
                parts.append(encode(tokenizer, recital(rng, env)))
        batch: dict[str, np.ndarray] = {
            name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments")
        }
        sampled_at = np.zeros(shape, bool)
        used, segments = [0] * config.rows, [0] * config.rows
        # Longest first into the first row with room; what fits nowhere is left out.
        for ids, sampled in sorted(parts, key=lambda part: -len(part[0])):
            row = next((r for r, u in enumerate(used) if u + len(ids) <= config.row_length), None)
            if row is None:
                continue
            segments[row] += 1
            place = (row, slice(used[row], used[row] + len(ids)))
            batch["tokens"][place] = ids
            batch["positions"][place] = np.arange(len(ids))
            batch["segments"][place] = segments[row]
            sampled_at[place] = sampled
            used[row] += len(ids)
        places = np.flatnonzero(sampled_at)[: room // 2] - 1
        batch["predict"] = np.resize(places, (room // 2,)).astype(np.int32)
        batch["weights"] = (np.arange(room // 2) < len(places)).astype(np.float32)
        yield batch


def _produce(config: Config, start: int, queue: Any) -> None:
    parent = os.getppid()
    for batch in batches(config, start):
        while True:
            try:
                queue.put(batch, timeout=1.0)
                break
            except Full:
                if os.getppid() != parent:  # the trainer is gone, and with it who empties the pipe
                    queue.cancel_join_thread()
                    return


def loss_fn(model, params, batch):
    hidden, aux = forward(model, params, batch["tokens"], batch["positions"], batch["segments"])
    # Only what the policy sampled is learned, so only there logits are computed.
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch["predict"]]
    targets, weights = batch["tokens"].reshape(-1)[batch["predict"] + 1], batch["weights"]
    logprobs, _, _ = linear_logprob(hidden, unembedding(params), targets)
    loss = -(logprobs * weights).sum() / weights.sum()
    return loss + 0.01 * load_balance_loss(model, aux), (loss, logprobs, targets, weights)


def main(config: Config) -> int:
    if config.tokenizer:
        return write_tokenizer(config)
    if config.export is None:
        check_place(config, config.run_dir)
    model = replace(PRESETS["tiny"], vocab_size=config.vocab_size)
    checkpoints = Checkpointer(config.run_dir)
    # `tokens` may change between calls, so the rate is a function of the step, not of the config
    # that the optimizer state was made with.
    steps = config.steps

    def rate(step):
        warm = jnp.minimum(1.0, (step + 1) / config.warmup_steps)
        return config.learning_rate * warm * jnp.clip((steps - step) / (config.decay * steps), 0, 1)

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.98, weight_decay=config.weight_decay,
                    mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    )  # fmt: skip
    params = init_params(model, jax.random.key(config.seed))
    state = (params, optimizer.init(params))
    start = checkpoints.latest() or 0
    if start:
        state, _ = checkpoints.restore(jax.tree.map(jax.typeof, state), start)
    if config.export is not None:
        if not start:
            raise FileNotFoundError(f"no checkpoint in {config.run_dir} to export; train first")
        save_params(config.export, model, state[0], dtype="bfloat16")
        print(f"exported step {start} ({sum(x.size for x in jax.tree.leaves(state[0])):,} weights)")
        return 0

    values = np.zeros(config.vocab_size, bool)
    tokenizer = Tokenizer.from_file(str(TOKENIZERS / TINY / "tokenizer.json"))
    values[value_ids(tokenizer)] = True
    is_value = jnp.asarray(values)

    @partial(jax.jit, donate_argnums=0)
    def update(state, batch):
        params, opt_state = state
        grads, (loss, logprobs, targets, weights) = jax.grad(
            partial(loss_fn, model), has_aux=True
        )(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        copied = (weights > 0) & is_value[targets]
        copied = -(logprobs * copied).sum() / jnp.maximum(copied.sum(), 1)
        return (optax.apply_updates(params, updates), opt_state), (loss, copied)

    print(format_config(config), flush=True)
    save_config(config, config.run_dir)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(8)
    producer = context.Process(target=_produce, args=(config, start, queue), daemon=True)
    producer.start()
    begun, sums = time.monotonic(), []
    for step in range(start, steps):
        state, metrics = update(state, queue.get())
        sums.append(metrics)
        if (step + 1) % 50 == 0:
            loss, copied = (float(np.mean(column)) for column in zip(*sums, strict=True))
            done = (step + 1 - start) * config.rows * config.row_length
            line = {
                "step": step + 1,
                "tokens": (step + 1) * config.rows * config.row_length,
                "loss": round(loss, 4),
                "values": round(copied, 4),
                "tokens_per_second": round(done / (time.monotonic() - begun)),
            }
            print(json.dumps(line), flush=True)
            sums = []
        if (step + 1) % config.save_every == 0 or step + 1 == steps:
            check_finite(state[0], f"the weights of step {step + 1}")
            checkpoints.save(step + 1, state, {})
    checkpoints.close()
    producer.terminate()
    return 0


def write_tokenizer(config: Config) -> int:
    """Trains the tokenizer on 12,000 transcripts and saves it with the chat template."""
    source = transcripts(StreamConfig(seed=config.seed), FastAskConfig(prompt="short"))
    texts = ["".join(t for t, _ in pieces) for pieces in islice(source, 12_000)]
    backend = train_tokenizer(texts, config.vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=(TOKENIZERS / "chat_template.jinja").read_text(),
    )
    tokenizer.save_pretrained(TOKENIZERS / TINY)
    print(f"wrote {TOKENIZERS / TINY} ({len(tokenizer)} entries)")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(lambda argv: main(parse(Config, argv))))
