"""The decoder: configs, parameters, packed forward pass, cached decoding, weights in and out."""

from fastask_jax.model.cache import Cache, copy_slots, extend, init_cache, reset_slots
from fastask_jax.model.config import PRESETS, ModelConfig
from fastask_jax.model.decoder import (
    Params,
    forward,
    init_params,
    load_balance_loss,
    unembedding,
)
from fastask_jax.model.hugging_face import load_params, save_params
from fastask_jax.model.sharding import make_mesh, param_shardings

__all__ = [
    "PRESETS",
    "Cache",
    "ModelConfig",
    "Params",
    "copy_slots",
    "extend",
    "forward",
    "init_cache",
    "init_params",
    "load_balance_loss",
    "load_params",
    "make_mesh",
    "param_shardings",
    "reset_slots",
    "save_params",
    "unembedding",
]
