"""Name and layout of every tensor of a checkpoint, as `transformers` has it and as it is here.

`tensor_table` lists the tensors as they are written, `find_tensors` as a given checkpoint has
them.  Names and layouts are those of `transformers` 5 (its modelling code and
`conversion_mapping.py`).  Reading and writing files is left to `hugging_face.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fastask_jax.model.config import FULL, MOE, ModelConfig
from fastask_jax.model.families import FAMILIES, family_of

Map = Callable[[np.ndarray], np.ndarray]
Index = int | tuple[int | slice, ...]


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    path, block: where it lies in the parameters; `block` indexes a stacked leaf (its block, or
    block, expert and columns), None for a leaf that isn't stacked.  name: in the checkpoint.  out,
    into: from our layout to theirs and back.
    """

    path: tuple[str, ...]
    block: Index | None
    name: str
    out: Map
    into: Map


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _swap(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


# `(path within a layer, index within the leaf, Hugging Face suffix, ours -> theirs, back)`
_Entry = tuple[tuple[str, ...], tuple[int | slice, ...], str, Map, Map]


def _attention(cfg: ModelConfig) -> Iterator[_Entry]:
    width, size = cfg.hidden_size, cfg.head_dim

    def split(*heads: int) -> tuple[Map, Map]:
        """`[D, heads, K]` here, `[heads * K, D]` there."""
        return lambda x: x.reshape(width, -1).T, lambda x: x.T.reshape(width, *heads)

    for name, heads in (
        ("q_proj", (cfg.heads, size * (2 if cfg.attention_gate else 1))),
        ("k_proj", (cfg.kv_heads, size)),
        ("v_proj", (cfg.kv_heads, size)),
    ):
        yield ("mixer", name), (), f"self_attn.{name}.weight", *split(*heads)
    yield (
        ("mixer", "o_proj"),
        (),
        "self_attn.o_proj.weight",
        lambda x: x.reshape(-1, width).T,
        lambda x: x.T.reshape(cfg.heads, size, width),
    )
    for name in ("q_norm", "k_norm") if cfg.qk_norm else ():
        yield ("mixer", name), (), f"self_attn.{name}.weight", _same, _same


def _delta() -> Iterator[_Entry]:
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        yield ("mixer", name), (), f"linear_attn.{name}.weight", _swap, _swap
    yield (
        ("mixer", "conv"),
        (),
        "linear_attn.conv1d.weight",
        lambda x: x.T[:, None, :],
        lambda x: x[:, 0, :].T,
    )
    yield ("mixer", "a_log"), (), "linear_attn.A_log", _same, _same
    yield ("mixer", "dt_bias"), (), "linear_attn.dt_bias", _same, _same
    yield ("mixer", "norm"), (), "linear_attn.norm.weight", _same, _same


def _dense() -> Iterator[_Entry]:
    yield ("mlp_norm",), (), "post_attention_layernorm.weight", _same, _same
    for name in ("gate", "up", "down"):
        yield ("mlp", name), (), f"mlp.{name}_proj.weight", _swap, _swap


def _moe(cfg: ModelConfig, separate: bool) -> Iterator[_Entry]:
    yield ("moe_norm",), (), "post_attention_layernorm.weight", _same, _same
    yield ("moe", "router"), (), "mlp.gate.weight", _swap, _swap
    if separate:
        # Gate and up projections are the two halves of one leaf here.
        gate, up = slice(cfg.moe_intermediate_size), slice(cfg.moe_intermediate_size, None)
        for expert in range(cfg.num_experts):
            for leaf, index, name in (
                ("gate_up", (expert, slice(None), gate), "gate_proj"),
                ("gate_up", (expert, slice(None), up), "up_proj"),
                ("down", (expert,), "down_proj"),
            ):
                yield ("moe", leaf), index, f"mlp.experts.{expert}.{name}.weight", _swap, _swap
    else:
        yield ("moe", "gate_up"), (), "mlp.experts.gate_up_proj", _swap, _swap
        yield ("moe", "down"), (), "mlp.experts.down_proj", _swap, _swap
    if cfg.shared_expert_intermediate_size:
        for name in ("gate", "up", "down"):
            suffix = f"mlp.shared_expert.{name}_proj.weight"
            yield ("moe", f"shared_{name}"), (), suffix, _swap, _swap
        yield ("moe", "shared_router"), (), "mlp.shared_expert_gate.weight", _swap, _swap


def tensor_table(cfg: ModelConfig, separate_experts: bool | None = None) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this config.

    `separate_experts` chooses between one tensor for each expert's projection, and all experts in
    one as in the modules of `transformers`; None takes what the family's published checkpoints
    have, which `save_pretrained` keeps.
    """
    if separate_experts is None:
        separate_experts = FAMILIES[family_of(cfg)].separate_experts
    yield Tensor(("embedding",), None, "model.embed_tokens.weight", _same, _same)
    for layer, (mixer, feed_forward) in enumerate(
        zip(cfg.layer_types, cfg.feed_forward_types, strict=True)
    ):
        block, place = divmod(layer, len(cfg.block_layers))
        entries = [
            (("mixer_norm",), (), "input_layernorm.weight", _same, _same),
            *(_attention(cfg) if mixer == FULL else _delta()),
            *(_moe(cfg, separate_experts) if feed_forward == MOE else _dense()),
        ]
        for path, index, suffix, out, into in entries:
            yield Tensor(
                ("blocks", f"layer_{place}", *path),
                (block, *index) if index else block,
                f"model.layers.{layer}.{suffix}",
                out,
                into,
            )
    yield Tensor(("final_norm",), None, "model.norm.weight", _same, _same)
    if not cfg.tie_word_embeddings:
        yield Tensor(("head",), None, "lm_head.weight", _swap, _swap)


def find_tensors(cfg: ModelConfig, names: Iterable[str]) -> tuple[list[Tensor], list[str]]:
    """The tensors of this config under the names that a checkpoint with `names` has for them, and
    those of its names that are skipped: vision towers, multi-token prediction, saved buffers.

    Experts may be separate or in one tensor, and the language model may lie within a multimodal
    one.  Whether every tensor is there, and no other, is left to the caller.
    """
    names = set(names)
    patterns = [re.compile(pattern) for pattern in FAMILIES[family_of(cfg)].skipped]
    skipped = {name for name in names if any(p.fullmatch(name) for p in patterns)}
    wanted = names - skipped
    separate = any(re.search(r"\.mlp\.experts\.\d+\.", name) for name in wanted)
    table = list(tensor_table(cfg, separate_experts=separate))
    inner = "model.language_model."
    if any(name.startswith(inner) for name in wanted):
        table = [
            tensor._replace(name=re.sub(r"^model\.", inner, tensor.name)) for tensor in table
        ]
    return table, sorted(skipped)
