"""What the model's tests share: the reference module, and forward and gradients from it."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import ModelConfig, forward, init_params, unembedding
from fastask_jax.model.tensors import tensor_table
from kernels.linear_logprob import linear_logprob


@pytest.fixture(scope="session")
def jitted_init():
    return jax.jit(init_params, static_argnums=0)


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


def _run(cfg, params, tokens, valid):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(cfg, params, tokens, positions, valid.astype(jnp.int32))
    return hidden @ unembedding(params), hidden


def _loss(cfg, params, tokens, valid):
    logits, hidden = _run(cfg, params, tokens, valid)
    logprob, _, _ = linear_logprob(hidden[:, :-1], unembedding(params), tokens[:, 1:])
    counted = valid[:, 1:].astype(jnp.float32)
    return -jnp.sum(logprob * counted) / jnp.maximum(jnp.sum(counted), 1.0), logits


def _padded(tokens, length):
    """Rows of `length` tokens, and which of those are real."""
    pad = (length or tokens.shape[1]) - tokens.shape[1]
    valid = np.ones_like(tokens, bool)
    return tuple(jnp.asarray(np.pad(x, ((0, 0), (0, pad)))) for x in (tokens, valid))


@pytest.fixture(scope="session")
def logits_of():
    """`(cfg, params, tokens) -> logits` of unpacked rows."""
    compiled = jax.jit(lambda *a: _run(*a)[0], static_argnums=0)
    return lambda cfg, params, tokens: np.asarray(compiled(cfg, params, *_padded(tokens, None)))


@pytest.fixture(scope="session")
def logits_and_gradients():
    """`(cfg, params, tokens, pad_to=None) -> (logits, gradients of the mean next-token loss)`.

    Calls that pad to the same length share one program.
    """
    compiled = jax.jit(
        lambda *a: jax.value_and_grad(_loss, 1, has_aux=True)(*a), static_argnums=0
    )

    def run(cfg, params, tokens, pad_to=None):
        (_, logits), grads = compiled(cfg, params, *_padded(tokens, pad_to))
        return np.asarray(logits)[:, : tokens.shape[1]], grads

    return run


def _leaf(tree, path):
    return functools.reduce(lambda node, name: node[name], path, tree)


@pytest.fixture(scope="session")
def module_tensors():
    """`(cfg, params) -> tensors` named as the parameters of the modules of `transformers`."""

    def get(cfg, params):
        tensors = {}
        for path, index, name, out, _ in tensor_table(cfg, separate_experts=False):
            leaf = np.asarray(_leaf(params, path))
            tensors[name] = out(leaf if index is None else leaf[index])
        return tensors

    return get


@pytest.fixture(scope="session")
def params_of():
    """`(cfg, tensors) -> params`, the opposite of `module_tensors`."""

    def get(cfg, tensors):
        abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), abstract)
        for path, index, name, _, into in tensor_table(cfg, separate_experts=False):
            _leaf(params, path)[... if index is None else index] = into(tensors[name])
        return jax.tree.map(jnp.asarray, params)

    return get
