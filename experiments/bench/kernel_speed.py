"""Times of the kernels, forward and backward, over what people use for the same work on a CPU.

Both sides of an operation take turns in one process; a figure is their medians' ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from experiments.bench.report import report
from kernels.attention import attention
from kernels.gated_delta import gated_delta
from kernels.grouped_matmul import grouped_matmul
from kernels.linear_logprob import linear_logprob

Side = Callable[[], Any]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def _jitted(
    objective: Callable[..., Any], *arguments: jax.Array, has_aux: bool = False
) -> tuple[Side, float]:
    """A call of the gradient in all arguments, and its megabytes of temporaries."""
    step = jax.jit(jax.grad(objective, tuple(range(len(arguments))), has_aux=has_aux))
    compiled = step.lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    megabytes = analysis.temp_size_in_bytes / 1e6 if analysis else float("nan")
    return lambda: jax.block_until_ready(compiled(*arguments)), megabytes


def linear_logprob_sides() -> tuple[Side, Side, dict[str, Any]]:
    """SmolLM2's head, tied: logprobs, entropies and log-sum-exps of 2,048 tokens, with gradients
    of the first, against the same from whole logits."""
    tokens, width, vocab = 2048, 576, 49_152
    hidden, embedding = _normal(0, tokens, width), 0.05 * _normal(1, vocab, width)
    ids = jax.random.randint(jax.random.key(2), (tokens,), 0, vocab)
    weights = _normal(3, tokens)

    def ours(hidden, embedding):
        logprob, *others = linear_logprob(hidden, embedding.T, ids)
        return jnp.vdot(weights, logprob), others

    def plain(hidden, embedding):
        logits = hidden @ embedding.T
        lse = jax.nn.logsumexp(logits, axis=-1)
        logprobs = logits - lse[:, None]
        logprob = jnp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.vdot(weights, logprob), (entropy, lse)

    (mine, my_mb), (theirs, their_mb) = (
        _jitted(f, hidden, embedding, has_aux=True) for f in (ours, plain)
    )
    shape = {"tokens": tokens, "width": width, "vocab": vocab}
    return mine, theirs, shape | {"temporaries_mb": my_mb, "peer_temporaries_mb": their_mb}


def gated_delta_sides() -> tuple[Side, Side, dict[str, Any]]:
    """4,096 tokens, 8 heads of 64, against the chunked torch form in transformers."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    tokens, heads, width = 4096, 8, 64
    shape = (1, tokens, heads, width)
    q, k, v = (_normal(seed, *shape) for seed in range(3))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = -jnp.exp(_normal(3, *shape[:3]) - 1.0)
    beta = jax.nn.sigmoid(_normal(4, *shape[:3]))
    cotangent = _normal(5, *shape)

    segment = jnp.zeros((1, tokens), jnp.int32)

    def objective(q, k, v, log_decay, beta):
        return jnp.vdot(gated_delta(q, k, v, log_decay, beta, segment)[0], cotangent)

    arguments = (q, k, v, log_decay, beta)
    ours, megabytes = _jitted(objective, *arguments)
    tensors = [torch.tensor(np.asarray(x), requires_grad=True) for x in arguments]
    weights = torch.tensor(np.asarray(cotangent))

    def theirs() -> Any:
        out, _ = torch_chunk_gated_delta_rule(*tensors, chunk_size=64, output_final_state=False)
        return torch.autograd.grad((out * weights).sum(), tensors)

    # transformers scales queries by K^-1/2, in which the objective is linear.
    for mine, scaled in zip(ours(), theirs(), strict=True):
        other = scaled.numpy() * width**0.5
        if np.linalg.norm(mine - other) > 1e-3 * np.linalg.norm(other):
            raise RuntimeError("the peer's gradients are others, so it does other work")
    sizes = {"tokens": tokens, "heads": heads, "width": width}
    return ours, theirs, sizes | {"temporaries_mb": megabytes}


def grouped_matmul_sides() -> tuple[Side, Side, dict[str, Any]]:
    """64 experts, top 4 of each of 4,096 tokens, against all experts on all tokens."""
    tokens, experts, top, width, inner = 4096, 64, 4, 256, 128
    x, weights = _normal(0, tokens, width), _normal(1, experts, width, inner)
    chosen = jax.lax.top_k(_normal(2, tokens, experts), top)[1]
    cotangent = _normal(3, tokens, top, inner)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=experts)

    def ours(x, weights, order, sizes, chosen, cotangent):
        out = grouped_matmul(x[order // top], weights, sizes)
        out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        return jnp.vdot(out, cotangent.reshape(out.shape))

    def dense(x, weights, order, sizes, chosen, cotangent):
        every = jnp.einsum("nd,edf->nef", x, weights)
        return jnp.vdot(jnp.take_along_axis(every, chosen[..., None], axis=1), cotangent)

    def side(objective):
        step = jax.jit(jax.grad(objective, (0, 1)))
        arguments = (x, weights, order, sizes, chosen, cotangent)
        compiled = step.lower(*arguments).compile()
        return lambda: jax.block_until_ready(compiled(*arguments))

    shape = {"tokens": tokens, "experts": experts, "top": top, "width": width, "inner": inner}
    return side(ours), side(dense), shape


def attention_sides() -> tuple[Side, Side, dict[str, Any]]:
    """A packed row of 4,096 tokens in segments of 512, against `jax.nn.dot_product_attention`
    with the mask of its segments."""
    tokens, heads, groups, width, segment = 4096, 8, 4, 64, 512
    q = _normal(0, 1, tokens, heads, width)
    k, v = (_normal(seed, 1, tokens, groups, width) for seed in (1, 2))
    cotangent = _normal(3, *q.shape)
    ids = jnp.arange(tokens, dtype=jnp.int32)[None] // segment
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]

    def ours(q, k, v):
        return jnp.vdot(attention(q, k, v, ids), cotangent)

    def plain(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return jnp.vdot(out, cotangent)

    (mine, my_mb), (theirs, their_mb) = (_jitted(f, q, k, v) for f in (ours, plain))
    shape = {"tokens": tokens, "heads": heads, "groups": groups, "width": width, "segment": segment}
    return mine, theirs, shape | {"temporaries_mb": my_mb, "peer_temporaries_mb": their_mb}


PEERS = {
    "linear_logprob": ("the same from whole logits, jitted", linear_logprob_sides),
    "gated_delta": ("transformers torch_chunk_gated_delta_rule", gated_delta_sides),
    "grouped_matmul": ("all experts on all tokens", grouped_matmul_sides),
    "attention": ("jax.nn.dot_product_attention", attention_sides),
}


def _seconds(side: Side) -> float:
    started = time.perf_counter()
    side()
    return time.perf_counter() - started


def measure(name: str, runs: int) -> dict[str, Any]:
    """Prints the result line of an operation: seconds of forward and backward."""
    peer, make = PEERS[name]
    ours, theirs, shape = make()
    for side in (ours, theirs):
        side()
    pairs = [tuple(map(_seconds, (ours, theirs))) for _ in range(runs)]
    mine, other = zip(*pairs, strict=True)
    return report(
        f"kernels.{name}", "s", mine, peer=peer, peer_runs=other, higher_is_better=False,
        slowest=max(mine), fastest=min(mine), peer_slowest=max(other), peer_fastest=min(other),
        **shape,
    )  # fmt: skip


