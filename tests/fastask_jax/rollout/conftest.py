"""An engine over the tiny random model."""

import pytest


@pytest.fixture(scope="session")
def engine(model, chat):
    """Shared by tests: slots are zeroed on admission, so leftovers don't matter."""
    from fastask_jax.rollout.engine import Engine, EngineConfig

    config = EngineConfig(
        slots=6,
        max_len=384,
        append_rows=4,
        append_buckets=(8, 32),
        attend_buckets=(128,),
        decode_rows=2,
        decode_steps=8,
    )
    return Engine(model, config, chat.stop_id)


@pytest.fixture(scope="session")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="session")
def params(tiny_params):
    return tiny_params
