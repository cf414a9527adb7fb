"""The TPU kernels: interpreted with race detection against the definitions, and compiled for real
TPU generations by the TPU compiler, where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import attention
from kernels.gated_delta import gated_delta, tpu
from kernels.grouped_matmul import grouped_matmul

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def interpreted(cores):
    """TPU kernels run on this machine's CPU: memory starts as NaN, reads out of bounds raise, and
    accesses that nothing orders are printed as races."""
    parameters = pltpu.InterpretParams(
        detect_races=True,
        num_cores_or_threads=cores,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    with pltpu.force_tpu_interpret_mode(parameters):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def deltas(batch=2, length=20, key_heads=1, heads=2, width=8, value=16):
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (batch, length, key_heads, width)) for key in keys[:2])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = jax.random.normal(keys[2], (batch, length, heads, value))
    log_decay = -jnp.exp(jax.random.normal(keys[3], (batch, length, heads)) - 1.0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (batch, length, heads)))
    return q, k, v, log_decay, beta, jax.random.normal(keys[5], (batch, heads, width, value))


def runs(batch, length, chance=0.15):
    random = np.random.default_rng(1)
    return jnp.asarray(np.cumsum(random.random((batch, length)) < chance, axis=1), jnp.int32)


def delta_op(*arguments, name, ids):
    *tokens, state = arguments
    return gated_delta(*tokens, ids, state, chunk=8, implementation=name)


def compare(op, arguments, name, cores=1, tolerance=1e-5):
    """Raises AssertionError where values or gradients of an implementation aren't the
    definition's."""

    def objective(name, *arguments):
        outputs = op(*arguments, name=name)
        return sum(jnp.sum(jnp.sin(x + 1.0)) for x in jax.tree.leaves(outputs)), outputs

    numbers = tuple(range(1, 1 + len(arguments)))
    grad = jax.value_and_grad(objective, numbers, has_aux=True)
    (_, expected), expected_grads = jax.jit(partial(grad, "reference"))(*arguments)
    with interpreted(cores):
        result = jax.jit(partial(grad, name))(*arguments)
        (_, got), got_grads = jax.block_until_ready(result)
    for a, b in zip(
        jax.tree.leaves((got, got_grads)), jax.tree.leaves((expected, expected_grads)), strict=True
    ):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("length, key_heads", [(20, 1), (8, 2)])
def test_gated_delta_equals_its_definition_without_races(length, key_heads, capfd):
    op = partial(delta_op, ids=runs(2, length))
    compare(op, deltas(length=length, key_heads=key_heads), "pallas", cores=2)
    assert "RACE" not in capfd.readouterr().out


def test_gated_delta_of_every_token_its_own_segment_and_of_one_token(capfd):
    compare(partial(delta_op, ids=jnp.arange(9)[None]), deltas(1, 9), "pallas")
    compare(partial(delta_op, ids=None), deltas(1, 1), "pallas")
    assert "RACE" not in capfd.readouterr().out


def test_attention_equals_its_definition_without_races(capfd):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 130, 4, 16))
    k, v = (jax.random.normal(key, (1, 130, 2, 16)) for key in keys[1:])

    def op(q, k, v, name):
        return attention(q, k, v, runs(1, 130, 0.03), implementation=name)

    # JAX's kernel keeps scratch in outputs that nobody reads, which two cores would both write.
    compare(op, (q, k, v), "splash", tolerance=1e-4)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("sizes", [[64, 0, 70, 3], [0, 200], [0, 0, 0]])
def test_grouped_matmul_equals_its_definition_without_races(sizes, capfd):
    x = jax.random.normal(jax.random.key(0), (200, 12))
    weights = jax.random.normal(jax.random.key(1), (len(sizes), 12, 20))

    def op(x, weights, name):
        return grouped_matmul(x, weights, jnp.asarray(sizes, jnp.int32), implementation=name)

    compare(op, (x, weights), "megablox")
    assert "RACE" not in capfd.readouterr().out


def test_a_planted_race_is_caught(monkeypatch, capfd):
    """All rows write their final states to one place."""

    def state(self):
        return pl.BlockSpec((None, None, self.key, self.width), lambda b, h, c: (0, h, 0, 0))

    monkeypatch.setattr(tpu._Specs, "state", state)
    with interpreted(cores=2):
        jax.block_until_ready(delta_op(*deltas(), name="pallas", ids=None))
    assert "RACE DETECTED" in capfd.readouterr().out


def test_a_skipped_reset_is_caught(monkeypatch):
    monkeypatch.setattr(tpu, "relative_runs", lambda ids, pad, chunk: jnp.zeros((2, 3, 1, 8)))
    with pytest.raises(AssertionError):
        compare(partial(delta_op, ids=runs(2, 20)), deltas(), "pallas")


def test_a_state_that_isn_t_set_up_is_caught(monkeypatch):
    monkeypatch.setattr(tpu.pl, "when", lambda condition: lambda body: None)
    with pytest.raises(AssertionError):
        compare(partial(delta_op, ids=None), deltas(), "pallas")


COMPILE = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jax import numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from kernels.attention import attention
from kernels.gated_delta import gated_delta
from kernels.grouped_matmul import grouped_matmul
from kernels.linear_logprob import linear_logprob

def delta(q, k, v, log_decay, beta, ids):
    return gated_delta(q, k, v, log_decay, beta, ids, chunk=64, implementation="pallas")[0]

def packed(q, k, v, ids):
    return attention(q, k, v, ids, implementation="splash")

def experts(x, weights, sizes):
    return grouped_matmul(x, weights, sizes, implementation="megablox")

def scores(hidden, head, ids):
    return sum(linear_logprob(hidden, head, ids, implementation="xla"))

low, wide, whole = jnp.bfloat16, jnp.float32, jnp.int32
OPERATIONS = {
    "gated_delta": (delta, 5, [
        ((1, 512, 2, 128), low), ((1, 512, 2, 128), low), ((1, 512, 4, 128), low),
        ((1, 512, 4), wide), ((1, 512, 4), wide), ((1, 512), whole),
    ]),
    "attention": (packed, 3, [
        ((1, 1024, 4, 256), low), ((1, 1024, 2, 256), low), ((1, 1024, 2, 256), low),
        ((1, 1024), whole),
    ]),
    "grouped_matmul": (experts, 2, [
        ((1024, 256), low), ((8, 256, 512), low), ((8,), whole),
    ]),
    "linear_logprob": (scores, 2, [
        ((1024, 256), low), ((256, 20000), low), ((1024,), whole),
    ]),
}
for topology in sys.argv[1:]:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    place = SingleDeviceSharding(device)
    for name, (operation, count, shapes) in OPERATIONS.items():
        arguments = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
        def step(*arguments):
            out, pull = jax.vjp(lambda *x: operation(*x, *arguments[count:]), *arguments[:count])
            return out, pull(jnp.ones_like(out))
        lowered = jax.jit(step).lower(*arguments)
        lowered.compile()
        print(json.dumps([topology, name, lowered.as_text().count("@tpu_custom_call")]), flush=True)
"""
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs pip install '.[aot]'")
def test_every_operation_compiles_forward_and_backward_for_every_generation():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *TOPOLOGIES],
        cwd=ROOT,
        env=os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    kernels = {"gated_delta": 2, "attention": 3, "grouped_matmul": 3, "linear_logprob": 0}
    assert found == [[t, name, count] for t in TOPOLOGIES for name, count in kernels.items()]
