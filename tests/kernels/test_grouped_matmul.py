"""Grouped products against the definition, empty and lopsided groups included."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.grouped_matmul import grouped_matmul
from kernels.grouped_matmul.xla import _layout


@pytest.fixture(autouse=True)
def interpreted():
    """TPU kernels run here too; with race detection they do in `test_tpu_kernels`."""
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.parametrize("name", ["xla", "megablox"])
@pytest.mark.parametrize(
    "sizes",
    [
        [64, 64, 64],
        [0, 200, 0],
        [1, 0, 130, 3, 0, 66],
        [0, 0, 5],
        [7],
    ],
)
def test_values_and_gradients_equal_the_reference(sizes, name):
    rows, groups = sum(sizes), len(sizes)
    x = jax.random.normal(jax.random.key(0), (rows, 12))
    weights = jax.random.normal(jax.random.key(1), (groups, 12, 20))
    cotangent = jax.random.normal(jax.random.key(2), (rows, 20))
    counts = jnp.asarray(sizes, jnp.int32)

    def objective(x, weights, chosen):
        out = grouped_matmul(x, weights, counts, implementation=chosen)
        return jnp.vdot(out, cotangent), out

    grad = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), expected_grads = grad(x, weights, "reference")
    (_, got), got_grads = grad(x, weights, name)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(got_grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    empty = np.asarray(sizes) == 0
    assert not np.asarray(got_grads[1])[empty].any()


@pytest.mark.parametrize("name", ["xla", "megablox"])
@pytest.mark.parametrize("sizes", [[64, 3, 0], [0, 0], [70, 70, 59]])
def test_rows_beyond_the_groups_are_zero_and_touch_nothing(sizes, name):
    rows, groups, owned = 200, len(sizes), sum(sizes)
    x = jax.random.normal(jax.random.key(0), (rows, 12))
    weights = jax.random.normal(jax.random.key(1), (groups, 12, 20))
    cotangent = jax.random.normal(jax.random.key(2), (rows, 20))
    counts = jnp.asarray(sizes, jnp.int32)

    def objective(x, weights, chosen):
        out = grouped_matmul(x, weights, counts, implementation=chosen)
        return jnp.vdot(out, cotangent), out

    grad = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), expected_grads = grad(x, weights, "reference")
    # What lies beyond may be anything but NaN, which no product with zero removes.
    (_, got), got_grads = grad(x.at[owned:].set(1e30), weights, name)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(got_grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    for result in (expected, got, expected_grads[0], got_grads[0]):
        assert not np.asarray(result)[owned:].any()


def test_only_blocks_that_hold_rows_of_a_group_are_multiplied():
    for sizes, wanted in (([0, 0, 0], 0), ([1, 0, 0], 1), ([64, 65, 3], 4), ([9000, 0, 0], 141)):
        *_, used = _layout(9000, 3, jnp.asarray(sizes, jnp.int32))
        assert int(used) == wanted


def test_memory_doesn_t_grow_with_the_number_of_experts():
    def temporaries(experts):
        x = jnp.ones((1024, 64))
        sizes = jnp.full(experts, 1024 // experts, jnp.int32)
        compiled = jax.jit(grouped_matmul).lower(x, jnp.ones((experts, 64, 64)), sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A dense form would hold [rows, experts, F]: sixteen times as much at 64 experts as at 4.
    assert temporaries(64) < 4 * temporaries(4)


def test_bad_arguments_are_refused():
    x, weights = jnp.ones((8, 4)), jnp.ones((2, 4, 3))
    with pytest.raises(ValueError, match="grouped_matmul needs"):
        grouped_matmul(x[:, :3], weights, jnp.asarray([4, 4]))
    with pytest.raises(ValueError, match="sizes must be"):
        grouped_matmul(x, weights, jnp.asarray([8]))
    with pytest.raises(ValueError, match="unknown implementation 'dense'"):
        grouped_matmul(x, weights, jnp.asarray([4, 4]), implementation="dense")


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "uint32", "int64"])
def test_sizes_of_any_integer_type(implementation, kind):
    x, weights = jnp.ones((200, 1)), jnp.asarray([[[1.0]], [[2.0]]])
    got = grouped_matmul(x, weights, np.asarray([100, 100], kind), implementation=implementation)
    np.testing.assert_array_equal(got[::50, 0], [1, 1, 2, 2])
    assert grouped_matmul(
        x.astype("bfloat16"), weights, np.asarray([100, 100], kind), implementation=implementation
    ).dtype == jnp.bfloat16


def test_no_groups_and_sizes_that_aren_t_counts():
    with pytest.raises(ValueError, match="grouped_matmul needs"):
        grouped_matmul(jnp.ones((4, 2)), jnp.ones((0, 2, 3)), jnp.zeros(0, jnp.int32))
    with pytest.raises(ValueError, match="sizes must be integers"):
        grouped_matmul(jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.ones(1))
