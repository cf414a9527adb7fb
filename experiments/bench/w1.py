"""Workload W1: one optimizer step of reinforcement learning on a small Llama, fixed by seeds.

A decoder of 6.8 million parameters and 32 sequences of 256 to 768 tokens, of which 60 % are the
model's; a clipped loss, global-norm clipping, AdamW.  NumPy alone, so that ours and any peer take
the same numbers; `LOSS` and `GRADIENT_NORM` say whether they did the same work.  Left out: how
sequences share rows or micro-batches, which is free.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 8192, 256, 6, 8, 4, 32, 768
ROPE_THETA, NORM_EPS = 1_000_000.0, 1e-5

CLIP = 0.2  # ratios between 0.8 and 1.2
MAX_GRAD_NORM, LEARNING_RATE, WEIGHT_DECAY = 1.0, 1e-5, 0.01
BETAS, EPS = (0.9, 0.999), 1e-8

SEQUENCES = 32
TOKENS, MODEL_TOKENS = 17_904, 10_861
# Of the first step, before any update; the norm is before clipping.
LOSS, GRADIENT_NORM = -0.055557, 0.488374

_EMBEDDING_DIGEST, _TOKENS_DIGEST = "652db4198265ca90", "a4d4e116de127484"


@dataclass(frozen=True)
class Sequence:
    """ids: int32 [n].  mask: bool [n], tokens of the model.  logprobs: float32 [n], recorded by
    the sampler.  prompt: tokens before the first that the model wrote."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantage: float
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)


def hf_config() -> dict[str, object]:
    """The model as `config.json` of `transformers` says it."""
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FEED_FORWARD,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def weights() -> dict[str, NDArray[np.float32]]:
    """Every tensor, named and laid out as in `transformers`."""
    random = np.random.default_rng(4321)
    tensors = {}

    def draw(name: str, *shape: int) -> None:
        tensors[f"model.{name}.weight"] = (0.02 * random.standard_normal(shape)).astype(np.float32)

    draw("embed_tokens", VOCAB, WIDTH)
    _check(tensors["model.embed_tokens.weight"], _EMBEDDING_DIGEST, "the embedding")
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        draw(f"{name}.self_attn.q_proj", HEADS * HEAD_DIM, WIDTH)
        draw(f"{name}.self_attn.k_proj", KV_HEADS * HEAD_DIM, WIDTH)
        draw(f"{name}.self_attn.v_proj", KV_HEADS * HEAD_DIM, WIDTH)
        draw(f"{name}.self_attn.o_proj", WIDTH, HEADS * HEAD_DIM)
        draw(f"{name}.mlp.gate_proj", FEED_FORWARD, WIDTH)
        draw(f"{name}.mlp.up_proj", FEED_FORWARD, WIDTH)
        draw(f"{name}.mlp.down_proj", WIDTH, FEED_FORWARD)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.{name}.{norm}.weight"] = np.ones(WIDTH, np.float32)
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    return tensors


def batch() -> list[Sequence]:
    """The 32 sequences, in their drawn order."""
    random = np.random.default_rng(1234)
    lengths = random.integers(256, 769, size=SEQUENCES)
    drawn = [
        (random.integers(2, VOCAB, size=n).astype(np.int32), random.standard_normal(n))
        for n in lengths
    ]
    _check(np.concatenate([ids for ids, _ in drawn]), _TOKENS_DIGEST, "the tokens")
    advantages = random.standard_normal(SEQUENCES).astype(np.float32)
    return list(_sequences(drawn, advantages))


def _sequences(
    drawn: list[tuple[NDArray, NDArray]], advantages: NDArray[np.float32]
) -> Iterator[Sequence]:
    for (ids, noise), advantage in zip(drawn, advantages, strict=True):
        prompt = len(ids) // 5
        since = np.arange(len(ids)) - prompt
        # Turns of 24 tokens of the model, each followed by 8 of a tool.
        mask = (since >= 0) & (since % 32 < 24)
        logprobs = (-math.log(VOCAB) + 0.05 * noise).astype(np.float32)
        yield Sequence(ids, mask, logprobs, float(advantage), prompt)


def _check(array: NDArray, digest: str, what: str) -> None:
    found = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    if found != digest:
        raise ValueError(
            f"{what} of W1 came out as {found}, not {digest}: this NumPy draws other numbers"
        )
