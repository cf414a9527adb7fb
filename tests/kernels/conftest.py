"""What the kernels' tests share."""

import functools

import jax
import pytest


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` that compiles fast and runs slowly: these programs run once or twice."""
    return functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
