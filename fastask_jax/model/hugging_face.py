"""Weights in and out, in the files that `transformers` reads and writes.

    cfg, params = load_params("Qwen3-0.6B", mesh=make_mesh(fsdp=8))     # or a .gguf file
    save_params("out", cfg, params, dtype="bfloat16")

A directory holds `config.json` and `model.safetensors`, or several such files and their index;
`AutoModelForCausalLM.from_pretrained` loads what is written here.  Weights are read tensor by
tensor into the sharding that is asked for, and written without a second copy of them.  Fetching
models over a network, and training states (`fastask_jax.learn.checkpoint`), are left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fastask_jax.model.config import ModelConfig
from fastask_jax.model.decoder import Params, init_params
from fastask_jax.model.directories import replaced_directory
from fastask_jax.model.families import from_hf_config, to_hf_config
from fastask_jax.model.gguf import GGUFFile
from fastask_jax.model.parameters import is_matrix
from fastask_jax.model.safetensors_files import (
    Planned,
    SafetensorsFiles,
    parse_json,
    write_safetensors,
)
from fastask_jax.model.sharding import param_shardings
from fastask_jax.model.streaming import Source, load_leaf
from fastask_jax.model.tensors import Tensor, find_tensors, tensor_table

CONFIG_FILE = "config.json"
# What `save_params` may leave in a directory, and so replaces there.
_OURS = (CONFIG_FILE, "model*.safetensors", "model.safetensors.index.json")
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Rows that are compared at a time.
_ROWS = 1024

_log = logging.getLogger(__name__)


def load_params(
    source: str | Path,
    mesh: Mesh | None = None,
    shardings: Any = None,
    param_dtype: str = "float32",
    **overrides: Any,
) -> tuple[ModelConfig, Params]:
    """Reads a model directory, or a GGUF file, straight into its sharding.

    Args:
      source: a directory written by `save_params` or `transformers`, or a path ending in .gguf.
      mesh: places each parameter by the rules of `fastask_jax.model.sharding`.
      shardings: the tree of parameters with a sharding in place of each array, instead of `mesh`;
        without either, everything lies on the default device.
      param_dtype: "float32", or "bfloat16" for matrices (norms, decay rates and biases stay
        float32).  Not to be mistaken for the override `dtype`, the activations' type.
      overrides: config fields that the files don't hold.

    Beyond the weights, memory holds about one megabyte on CPU, and a stage of 256 MiB elsewhere;
    a quantised tensor of a GGUF file is held unpacked, one at a time.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unsupported config or type, an unreadable file, or a tensor that is missing,
        surplus or of the wrong shape (named).
    """
    if mesh is not None and shardings is not None:
        raise ValueError("give a mesh or shardings, not both")
    dtype = _dtype("param_dtype", param_dtype)
    source = Path(source)
    files: Source
    if source.suffix == ".gguf":
        files = gguf = GGUFFile(source)
        cfg = from_hf_config(gguf.hf_config(), **overrides)
    else:
        cfg = from_hf_config(_read_config(source), **overrides)
        files = SafetensorsFiles(source)
    if mesh is not None:
        shardings = param_shardings(cfg, mesh)
    return cfg, _load(cfg, files, dtype, shardings)


def save_params(
    directory: str | Path,
    cfg: ModelConfig,
    params: Params,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    extras: Callable[[Path], Any] | None = None,
) -> None:
    """Writes `config.json` and safetensors files, so that `transformers` can load them.

    The directory appears whole, in place of an earlier one, or not at all; other files in the
    earlier one (a tokenizer) are kept.  Parameters may be spread over devices; if over those of
    several processes, all of them call this and process 0 writes.

    Args:
      dtype: "float32" or "bfloat16"; norms, decay rates and biases stay float32.
      max_shard_bytes: files are split so that none is larger.
      extras: writes further files into the directory that it is given, before it is in place
        (`tokenizer.save_pretrained`).

    Raises:
      ValueError: another `dtype`, a config that `transformers` has no architecture for, or a
        weight that isn't finite; nothing is written then.
    """
    kind = _dtype("dtype", dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    config = to_hf_config(cfg) | {"dtype": dtype}
    check_finite(params, f"the weights for {directory}")
    table = list(tensor_table(cfg))
    host = _Host(params)
    arrays = (tensor.out(host(tensor)) for tensor in table)
    if jax.process_index():
        for _ in arrays:  # fetching is something that all processes do together
            pass
        return
    plan = [_plan(tensor, _get(params, tensor.path).shape, kind) for tensor in table]
    try:
        with replaced_directory(directory, _OURS) as folder:
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
            write_safetensors(folder, plan, arrays, max_shard_bytes)
            if extras is not None:
                extras(folder)
    except Exception:
        if jax.process_count() > 1:
            for _ in arrays:  # the others are still fetching, and would wait for this process
                pass
        raise


def check_finite(params: Params, what: str) -> None:
    """Raises ValueError, which names `what` and the first array, where a weight isn't finite.

    The arrays stay where they are; with several processes all of them call this.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wrong = [path for path, leaf in leaves if not _is_finite(leaf)]
    if wrong:
        first = jax.tree_util.keystr(wrong[0], simple=True, separator=".")
        raise ValueError(
            f"{what} aren't all finite: NaN or infinity in {len(wrong)} of {len(leaves)} arrays, "
            f"{first} first"
        )


def _is_finite(leaf: Any) -> bool:
    on_host = not isinstance(leaf, jax.Array) or (
        leaf.is_fully_addressable and {d.platform for d in leaf.devices()} == {"cpu"}
    )
    # On a CPU, compiling for each shape would take longer than looking.
    return bool(np.isfinite(np.asarray(leaf)).all() if on_host else _all_finite(leaf))


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def _load(cfg: ModelConfig, source: Source, dtype: np.dtype, shardings: Any) -> Params:
    names = source.names
    table, skipped = find_tensors(cfg, names)
    wanted = {tensor.name for tensor in table}
    if wanted - names:
        raise ValueError(f"missing tensors: {_listed(wanted - names)}")
    # A tied head may be stored all the same; it must then be the embedding.
    head = {"lm_head.weight"} & names if cfg.tie_word_embeddings else set()
    surplus = names - wanted - set(skipped) - head
    if surplus:
        raise ValueError(f"surplus tensors: {_listed(surplus)}")
    if skipped:
        _log.warning("tensors that this decoder has no use for: %s", _listed(set(skipped)))
    tensors: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in table:
        tensors.setdefault(tensor.path, []).append(tensor)
    for name in head:
        _check_tied(source, name, tensors["embedding",][0].name)

    def load(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, *sharding: Any) -> jax.Array:
        path = tuple(key.key for key in keys)
        kind = dtype if is_matrix(keys, leaf) else _DTYPES["float32"]
        return load_leaf(source, tensors[path], leaf.shape, kind, *sharding)

    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    trees = [abstract] if shardings is None else [abstract, shardings]
    return jax.tree_util.tree_map_with_path(load, *trees)


def _check_tied(source: Source, name: str, embedding: str) -> None:
    head, rows = source.read(name), source.read(embedding)
    same = head.shape == rows.shape and all(
        np.array_equal(head[i : i + _ROWS], rows[i : i + _ROWS]) for i in range(0, len(rows), _ROWS)
    )
    if not same:
        raise ValueError(f"{name} differs from the embedding that it is tied to")


class _Host:
    """Parts of the parameters on the host, fetched as they are asked for."""

    def __init__(self, params: Params):
        self._params = params
        self._layer: Any = None
        self._blocks: dict[tuple[str, ...], np.ndarray] = {}

    def __call__(self, tensor: Tensor) -> np.ndarray:
        leaf = _get(self._params, tensor.path)
        if _on_host(leaf):
            return np.asarray(leaf) if tensor.block is None else np.asarray(leaf)[tensor.block]
        if not isinstance(tensor.block, tuple):
            return _fetch(leaf, tensor.block)
        # Experts that are tensors of their own come one after another, so their block is kept.
        block, *within = tensor.block
        layer = (tensor.path[:2], block)
        if layer != self._layer:
            self._layer, self._blocks = layer, {}
        if tensor.path not in self._blocks:
            self._blocks[tensor.path] = _fetch(leaf, block)
        return self._blocks[tensor.path][tuple(within)]


def _on_host(leaf: Any) -> bool:
    """Whether NumPy can look at the array where it lies."""
    if not isinstance(leaf, jax.Array):
        return True
    devices = leaf.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _fetch(leaf: jax.Array, block: Any) -> np.ndarray:
    # A copy on the device comes first: an array keeps what NumPy was once given of it.
    value = jax.numpy.copy(leaf) if block is None else _block(leaf, block)
    if not value.is_fully_addressable:
        if not isinstance(value.sharding, NamedSharding):
            raise ValueError(f"parameters of several processes need a mesh, not {value.sharding}")
        value = jax.device_put(value, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return np.asarray(value)


@jax.jit
def _block(leaf: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, block, keepdims=False)


def _plan(tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype) -> Planned:
    leaf = np.broadcast_to(np.float32(0), shape)
    out = tensor.out(leaf if tensor.block is None else leaf[tensor.block])
    return Planned(tensor.name, dtype if out.ndim > 1 else _DTYPES["float32"], out.shape)


def _get(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = tree
    for name in path:
        node = node[name]
    return node


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; a model directory holds {CONFIG_FILE} and model.safetensors, or "
            "several such files with their index"
        )
    try:
        config = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} isn't valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} isn't the config of a model: it holds no object")
    return config


def _dtype(name: str, value: str) -> np.dtype:
    if value not in _DTYPES:
        raise ValueError(f"{name} must be {' or '.join(_DTYPES)}, got {value!r}")
    return _DTYPES[value]


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
