"""Weights in and out, as safetensors with the tensor names of `transformers` (Qwen3.5-MoE).

A directory holds `config.json` and `model.safetensors`; `transformers` loads the same directory
with `AutoModelForCausalLM.from_pretrained`.  Tensors are read one by one.  Sharded checkpoints,
other families and reading straight into a sharding are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import Params, init_params
from fastask_jax.model.families import from_hf_config, to_hf_config
from fastask_jax.model.tensors import tensor_table

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def to_hf_tensors(cfg: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """`(name, float32 array)` of every tensor, named and laid out as in `transformers`."""
    for path, block, name, out, _ in tensor_table(cfg):
        value = np.asarray(_get(params, path), np.float32)
        yield name, np.ascontiguousarray(out(value if block is None else value[block]))


def save_params(
    directory: str | Path, cfg: ModelConfig, params: Params, dtype: str = "float32"
) -> None:
    """Writes `config.json` and `model.safetensors`, so that `transformers` can load them.

    `dtype` is "float32" or "bfloat16"; norms, decay rates and biases stay float32.

    Raises:
      ValueError: another `dtype`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.astype(kind) if value.ndim > 1 else value
        for name, value in to_hf_tensors(cfg, params)
    }
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = to_hf_config(cfg) | {"dtype": dtype}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def load_params(directory: str | Path, **overrides: Any) -> tuple[ModelConfig, Params]:
    """Reads a directory written by `save_params` or `transformers`; parameters are float32.

    `overrides` set config fields that a Hugging Face config doesn't have.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unsupported config, an unreadable file, or a tensor that is missing,
        surplus or of the wrong shape (named).
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory / name} is missing; a model directory holds {CONFIG_FILE} and "
                f"{WEIGHTS_FILE}"
            )
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG_FILE} isn't valid JSON: {error}") from None
    cfg = from_hf_config(config, **overrides)
    try:
        with safe_open(str(directory / WEIGHTS_FILE), framework="np") as file:
            return cfg, from_hf_tensors(cfg, set(file.keys()), file.get_tensor)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} can't be read: {error}") from None


def from_hf_tensors(
    cfg: ModelConfig, names: set[str], get: Callable[[str], np.ndarray]
) -> Params:
    """Parameters from Hugging Face tensors, asked for one by one.

    Raises:
      ValueError: missing, surplus or wrongly shaped tensors, by name.
    """
    table = list(tensor_table(cfg))
    wanted = {name for _, _, name, _, _ in table}
    if wanted - names:
        raise ValueError(f"missing tensors: {_listed(wanted - names)}")
    # A tied head may be stored all the same; it must then be the embedding.
    surplus = names - wanted - ({"lm_head.weight"} if cfg.tie_word_embeddings else set())
    if surplus:
        raise ValueError(f"surplus tensors: {_listed(surplus)}")
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), abstract)
    for path, block, name, out, into in table:
        target = _get(params, path)
        target = target if block is None else target[block]
        value = np.asarray(get(name), np.float32)
        expected = out(target).shape
        if value.shape != expected:
            raise ValueError(f"tensor {name} has shape {value.shape}, expected {expected}")
        target[...] = into(value)
    if cfg.tie_word_embeddings and "lm_head.weight" in names:
        if not np.array_equal(np.asarray(get("lm_head.weight"), np.float32), params["embedding"]):
            raise ValueError("lm_head.weight differs from the embedding that it is tied to")
    return jax.tree.map(jax.numpy.asarray, params)


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
