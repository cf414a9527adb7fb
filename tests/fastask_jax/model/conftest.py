"""What the model's tests share: the reference module, and forward and gradients from it."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import ModelConfig, forward, unembedding
from kernels.linear_logprob import linear_logprob

# Most of a test's time is compilation; these programs run once or twice.
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` that compiles fast and runs slowly."""
    return functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(scope="session")
def references():
    """The module that makes (and describes) the stored references."""
    path = Path(__file__).with_name("make_references.py")
    spec = importlib.util.spec_from_file_location("model_references", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small():
    """One delta and one attention layer per block, two blocks, everything uneven."""
    return ModelConfig(
        vocab_size=53,
        hidden_size=24,
        head_dim=8,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=8,
        rms_norm_eps=1e-3,
        delta_chunk=16,
    )


def _run(cfg, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(cfg, params, tokens, positions, jnp.ones(tokens.shape, jnp.int32))
    return hidden @ unembedding(params), hidden


def _loss(cfg, params, tokens):
    logits, hidden = _run(cfg, params, tokens)
    logprob, _, _ = linear_logprob(hidden[:, :-1], unembedding(params), tokens[:, 1:])
    return -jnp.mean(logprob), logits


@pytest.fixture(scope="session")
def logits_of(quick_jit):
    """`(cfg, params, tokens) -> logits` of unpacked rows."""
    compiled = quick_jit(lambda *a: _run(*a)[0], static_argnums=0)
    return lambda cfg, params, tokens: np.asarray(compiled(cfg, params, jnp.asarray(tokens)))


@pytest.fixture(scope="session")
def logits_and_gradients(quick_jit):
    """`(cfg, params, tokens) -> (logits, gradients of the mean next-token loss)`."""
    compiled = quick_jit(
        lambda *a: jax.value_and_grad(_loss, 1, has_aux=True)(*a), static_argnums=0
    )

    def run(cfg, params, tokens):
        (_, logits), grads = compiled(cfg, params, jnp.asarray(tokens))
        return np.asarray(logits), grads

    return run
