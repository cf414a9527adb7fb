"""What tests of the learner share: a bigram policy that can be worked out in numpy, and the
smallest model that has every kind of layer."""

from types import SimpleNamespace

import numpy as np
import pytest

VOCAB = 7


def params(seed=0):
    import jax.numpy as jnp

    table = np.random.default_rng(seed).normal(size=(VOCAB + 1, VOCAB)).astype(np.float32)
    return {"table": jnp.asarray(table[:-1]), "bias": jnp.asarray(table[-1])}


def scores(params, tokens, positions, segment_ids, mask, temperature):
    """A ScoreFn: the logits of token t are table[token t-1] + bias."""
    import jax
    import jax.numpy as jnp

    from fastask_jax.learn.score import Scores

    logits = params["table"][tokens[:, :-1]] + params["bias"]
    log_probs = jax.nn.log_softmax(logits / temperature)
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    shift = ((0, 0), (1, 0))
    return Scores(jnp.pad(chosen, shift), jnp.pad(entropy, shift), {})


def log_softmax(params, previous, temperature=1.0):
    """The same distribution in float64 after the tokens `previous`, [tokens, vocab]."""
    logits = np.float64(params["table"])[previous] + np.float64(params["bias"])
    logits = logits / temperature
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def trajectory(n, seed, vocab=VOCAB, advantage=None, version=0):
    from fastask_jax.learn.packing import TrainableTokens

    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.6
    mask[0] = False
    return TrainableTokens(
        ids=rng.integers(0, vocab, n).astype(np.int32),
        mask=mask,
        logprobs=(-rng.random(n) * 4).astype(np.float32),
        advantage=float(rng.normal()) if advantage is None else advantage,
        versions=np.full(n, version, np.int32),
    )


@pytest.fixture(scope="session")
def toy():
    """`toy.scores` (a ScoreFn), `toy.params()`, `toy.log_softmax`, `toy.trajectory`."""
    return SimpleNamespace(
        VOCAB=VOCAB, params=params, scores=scores, log_softmax=log_softmax, trajectory=trajectory
    )


def small_config():
    from fastask_jax.model import ModelConfig

    return ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        initializer_range=0.3,
        delta_chunk=8,
    )


@pytest.fixture(scope="session")
def small_model():
    return small_config()


@pytest.fixture(scope="session")
def small_params(small_model):
    import jax

    from fastask_jax.model import init_params

    return init_params(small_model, jax.random.key(0))
