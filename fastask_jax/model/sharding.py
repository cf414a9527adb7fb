"""Where each parameter lives on a mesh, and the forward pass and cached decoding there.

Logical axes stand beside the shapes in the modules, the table from them to mesh axes is
`mesh.RULES`.  A logical axis without a rule, two axes of one parameter on the same mesh axis, or
a dimension that doesn't divide is an error, never a silent replication; the one exception is
named in `REPLICATED_WHEN_UNEVEN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fastask_jax.model import cache as decoding
from fastask_jax.model import decoder
from fastask_jax.model.config import DELTA, ModelConfig
from fastask_jax.model.layers import Adapted, low_rank_axes
from fastask_jax.model.mesh import ROW_AXES, RULES, AnyMesh, row_devices, token_axis

# With more tensor shards than key/value heads, every shard keeps all of them.
REPLICATED_WHEN_UNEVEN = frozenset({"kv_heads"})


def logical_axes(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of parameters with a tuple of logical axes (or None) in place of each array."""
    return jax.tree.map(lambda leaf: leaf.axes, _declared(cfg), is_leaf=_is_declaration)


class _Declaration(NamedTuple):
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def _is_declaration(x: Any) -> bool:
    return isinstance(x, _Declaration)


@lru_cache(maxsize=32)
def _declared(cfg: ModelConfig) -> dict[str, Any]:
    """The tree of parameters as the modules declare them."""
    flat = nnx.to_flat_state(nnx.split(decoder.abstract_decoder(cfg))[1])
    return nnx.traversals.unflatten_mapping(
        {path: _Declaration(leaf.shape, leaf.get_metadata()["logical_axes"]) for path, leaf in flat}
    )


def partition_spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh_shape: Mapping[str, int],
    rules: Mapping[str, str | None] = RULES,
) -> PartitionSpec:
    """The partition of one array.

    Raises:
      ValueError: a logical axis without a rule, a rule for a mesh axis that doesn't exist, two
        dimensions on one mesh axis, or a dimension that doesn't divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no sharding rule")
        target = None if axis is None else rules[axis]
        if target is not None:
            if target not in mesh_shape:
                raise ValueError(
                    f"logical axis {axis!r} is to be split over mesh axis {target!r}, but the mesh "
                    f"has only {tuple(mesh_shape)}"
                )
            if target in spec:
                raise ValueError(f"axes {tuple(axes)} put two dimensions on mesh axis {target!r}")
            if size % mesh_shape[target]:
                if axis not in REPLICATED_WHEN_UNEVEN:
                    raise ValueError(
                        f"logical axis {axis!r} of size {size} doesn't divide over mesh axis "
                        f"{target!r} of size {mesh_shape[target]}"
                    )
                target = None
        spec.append(target)
    return PartitionSpec(*spec)


def param_specs(
    cfg: ModelConfig, mesh: AnyMesh, rules: Mapping[str, str | None] = RULES
) -> dict[str, Any]:
    """The tree of parameters with a `PartitionSpec` in place of each array."""
    return jax.tree.map(
        lambda leaf: partition_spec(leaf.axes, leaf.shape, mesh.shape, rules),
        _declared(cfg),
        is_leaf=_is_declaration,
    )


def specs_like(cfg: ModelConfig, params: decoder.Params, mesh: AnyMesh) -> dict[str, Any]:
    """`param_specs` for parameters of which some may be `Adapted`."""

    def spec(declared: _Declaration, leaf: Any) -> Any:
        axes = declared.axes
        if not isinstance(leaf, Adapted):
            return partition_spec(axes, declared.shape, mesh.shape)
        a_axes, b_axes = low_rank_axes(axes)
        parts: Any = (
            partition_spec(names, part.shape, mesh.shape)
            for names, part in ((axes, leaf.base), (a_axes, leaf.a), (b_axes, leaf.b))
        )
        return Adapted(*parts)

    return jax.tree.map(spec, _declared(cfg), params, is_leaf=_is_declaration)


def param_shardings(
    cfg: ModelConfig, mesh: AnyMesh, rules: Mapping[str, str | None] = RULES
) -> dict[str, Any]:
    """The tree of parameters with a `NamedSharding` in place of each array."""
    return shardings(mesh, param_specs(cfg, mesh, rules))


def shardings(mesh: AnyMesh, specs: Any) -> Any:
    """A tree of `PartitionSpec` with a `NamedSharding` in place of each."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def forward(
    cfg: ModelConfig,
    params: decoder.Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    expert_ids: jax.Array | None = None,
    return_expert_ids: bool = False,
    *,
    mesh: AnyMesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`decoder.forward`, over a mesh where one of several devices is given.

    The hidden states are then partitioned as `hidden_spec` says, `params` must be as in
    `param_specs`, and the routing's sums are the whole batch's.

    Raises:
      ValueError: as `decoder.forward` does, and for rows or heads that don't divide over the mesh.
    """
    run = partial(decoder.forward, cfg, return_expert_ids=return_expert_ids)
    if mesh is None or mesh.size == 1:
        return run(params, tokens, positions, segment_ids, expert_ids)
    check_rows(tokens.shape[0], mesh)
    _check_heads(cfg, mesh)
    rows, hidden = PartitionSpec(ROW_AXES), hidden_spec(mesh, tokens.shape[1])
    ids = PartitionSpec(None, *rows)
    sums = {"tokens": PartitionSpec()}
    if cfg.num_moe_layers:
        sums |= {"expert_counts": PartitionSpec(), "router_probs": PartitionSpec()}
        if return_expert_ids:
            sums["expert_ids"] = PartitionSpec(None, *hidden)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(
            specs_like(cfg, params, mesh),
            *(rows, rows, rows),
            None if expert_ids is None else ids,
        ),
        out_specs=(hidden, sums),
        check_vma=False,
    )(params, tokens, positions, segment_ids, expert_ids)


def hidden_spec(mesh: AnyMesh, length: int) -> PartitionSpec:
    """Partition of hidden states `[B, T, D]` between layers and behind the last one."""
    return PartitionSpec(ROW_AXES, token_axis(mesh, length))


def check_rows(rows: int, mesh: AnyMesh) -> None:
    """Raises ValueError unless the rows of a batch divide over the mesh."""
    if rows % row_devices(mesh):
        raise ValueError(
            f"{rows} rows don't divide over the {row_devices(mesh)} parts of the mesh's axes "
            f"{', '.join(ROW_AXES)}: choose a multiple"
        )


def _check_heads(cfg: ModelConfig, mesh: AnyMesh) -> None:
    if DELTA in cfg.mixers and cfg.linear_num_key_heads % mesh.shape["tensor"]:
        raise ValueError(
            f"linear_num_key_heads ({cfg.linear_num_key_heads}) doesn't divide over mesh axis "
            f"'tensor' of size {mesh.shape['tensor']}"
        )


# How `tensor` splits what a slot holds, by the name of the leaf.
_SLOT_AXES: dict[str, tuple[str | None, ...]] = {
    "length": (),
    "k": ("tensor",),
    "v": ("tensor",),
    "conv": (None, "tensor"),
    "state": ("tensor",),
}


def cache_specs(cfg: ModelConfig) -> decoding.Cache:
    """The tree of a cache with a `PartitionSpec` in place of each array: slots are rows."""

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        stacked = [None] if path[0].key == "stacked" else []
        return PartitionSpec(*stacked, ROW_AXES, *_SLOT_AXES[path[-1].key])

    shapes = jax.eval_shape(lambda: decoding.init_cache(cfg, 1, 1))
    return jax.tree_util.tree_map_with_path(spec, shapes)


def init_cache(
    cfg: ModelConfig, slots: int, max_len: int, *, mesh: AnyMesh | None = None
) -> decoding.Cache:
    """`cache.init_cache`, over a mesh where one of several devices is given.

    A device of `tensor` then holds what its heads need: key/value heads that don't divide are
    held more than once, and the channels of the convolution lie in another order.

    Raises:
      ValueError: as `cache.init_cache` does, and for slots or heads that don't divide.
    """
    if mesh is None or mesh.size == 1:
        return decoding.init_cache(cfg, slots, max_len)
    check_rows(slots, mesh)
    _check_heads(cfg, mesh)
    make = partial(decoding.init_cache, cfg, slots // row_devices(mesh), max_len)
    return jax.shard_map(
        make, mesh=mesh, in_specs=(), out_specs=cache_specs(cfg), check_vma=False
    )()


def extend(
    cfg: ModelConfig,
    params: decoder.Params,
    cache: decoding.Cache,
    tokens: jax.Array,
    counts: jax.Array,
    *,
    mesh: AnyMesh | None = None,
) -> tuple[jax.Array, decoding.Cache]:
    """`cache.extend`, over a mesh where one of several devices is given: slots and hidden states
    are then split by rows, the cache is from `init_cache` with the same mesh, and parameters are
    stacked."""
    run = partial(decoding.extend, cfg)
    if mesh is None or mesh.size == 1:
        return run(params, cache, tokens, counts)
    rows, specs = PartitionSpec(ROW_AXES), cache_specs(cfg)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs_like(cfg, params, mesh), specs, rows, rows),
        out_specs=(rows, specs),
        check_vma=False,
    )(params, cache, tokens, counts)
