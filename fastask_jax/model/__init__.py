"""The decoder: configs, parameters, packed forward pass, cached decoding, weights in and out."""

from fastask_jax.model.cache import Cache, copy_slots, reset_slots, unstacked
from fastask_jax.model.config import PRESETS, ModelConfig
from fastask_jax.model.decoder import (
    Params,
    init_params,
    load_balance_loss,
    unembedding,
)
from fastask_jax.model.hugging_face import check_finite, load_params, save_params
from fastask_jax.model.mesh import MeshConfig, make_mesh
from fastask_jax.model.sharding import extend, forward, init_cache, param_shardings
from fastask_jax.model.tokenizers import shipped_weights

__all__ = [
    "PRESETS",
    "Cache",
    "MeshConfig",
    "ModelConfig",
    "Params",
    "check_finite",
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
    "shipped_weights",
    "unembedding",
    "unstacked",
]
