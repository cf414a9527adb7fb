"""The architectures of `transformers` that this decoder covers, and their configs.

`to_hf_config` and `from_hf_config` translate the contents of `config.json`, after the
configuration and modelling code of `transformers` 5.  Names of tensors are in `tensors.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from fastask_jax.model.config import DELTA, DENSE, FULL, MOE, Llama3Rope, ModelConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
_DELTA_SIZES = {
    name: name
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}
_DENSE_SIZES = {"intermediate_size": "intermediate_size"}
_MOE_SIZES = {
    name: name for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
}
_SHARED = {"shared_expert_intermediate_size": "shared_expert_intermediate_size"}
# Fields that a config may leave out, and what `transformers` then takes.
_DEFAULTS = {"tie_word_embeddings": False, "initializer_range": 0.02}


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(x) is kind for x in value)


# What the fields that are read here must be, those of rotary positions among them; a null is an
# absent field.
_LONGEST = "original_max_position_embeddings"
_POSITIVE = ("num_hidden_layers", "num_attention_heads", "full_attention_interval",
             "decoder_sparse_step")  # fmt: skip
_REAL = ("rms_norm_eps", "initializer_range", "attention_dropout", "rope_theta", "factor",
         "low_freq_factor", "high_freq_factor", "partial_rotary_factor")  # fmt: skip
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias",
          "use_sliding_window", "attn_output_gate")  # fmt: skip
_ALL_SIZES = _SIZES | _DELTA_SIZES | _DENSE_SIZES | _MOE_SIZES | _SHARED
_WHOLE = {*_ALL_SIZES.values(), *_POSITIVE, "num_local_experts", _LONGEST} - {*_REAL}
_KINDS: dict[str, tuple[Callable[[Any], bool], Collection[str]]] = {
    "a whole number": (lambda value: type(value) is int, _WHOLE),
    "at least 1": (lambda value: value >= 1, _POSITIVE),
    # Unlike math.isfinite, this takes whole numbers of any size.
    "a finite number": (
        lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
        _REAL,
    ),
    "true or false": (lambda value: type(value) is bool, _FLAGS),
    "a string": (
        lambda value: type(value) is str,
        ("model_type", "hidden_act", "rope_type", "type"),
    ),
    "an object": (
        lambda value: isinstance(value, dict),
        ("text_config", "rope_parameters", "rope_scaling"),
    ),
    "a list of strings": (_list_of(str), ("layer_types",)),
    "a list of whole numbers": (_list_of(int), ("mlp_only_layers",)),
}


class Family(NamedTuple):
    """One architecture of `transformers`.

    sizes: fields (ours -> theirs) that its config holds.  fixed: fields that all its models share.
    skipped: patterns of tensors that its checkpoints may hold and this decoder has no use for.
    separate_experts: whether its checkpoints hold each expert's matrices as tensors of their own.
    """

    architecture: str
    mixers: frozenset[str]
    feed_forwards: frozenset[str]
    sizes: dict[str, str]
    fixed: dict[str, Any]
    skipped: tuple[str, ...] = ()
    separate_experts: bool = False


_PLAIN = {"attention_gate": False, "zero_centered_norms": False, "partial_rotary_factor": 1.0}
_GATED = {"attention_gate": True, "zero_centered_norms": True, "qk_norm": True}
# Multi-token prediction and the vision tower, as `transformers` ignores them.
_EXTRAS = (r"mtp\..*", r"model\.visual\..*")

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        frozenset({FULL}),
        frozenset({DENSE}),
        _SIZES | _DENSE_SIZES,
        _PLAIN | {"qk_norm": False},
        (r".*\.rotary_emb\.inv_freq",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        frozenset({FULL}),
        frozenset({DENSE}),
        _SIZES | _DENSE_SIZES,
        _PLAIN | {"qk_norm": True},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        frozenset({FULL}),
        frozenset({DENSE, MOE}),
        _SIZES | _DENSE_SIZES | _MOE_SIZES,
        _PLAIN | {"qk_norm": True, "shared_expert_intermediate_size": 0},
        separate_experts=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        frozenset({DELTA, FULL}),
        frozenset({DENSE}),
        _SIZES | _DELTA_SIZES | _DENSE_SIZES,
        _GATED,
        _EXTRAS,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        frozenset({DELTA, FULL}),
        frozenset({MOE}),
        _SIZES | _DELTA_SIZES | _MOE_SIZES | _SHARED,
        _GATED | {"norm_topk_prob": True},
        _EXTRAS,
    ),
}
# Multimodal model types, and that of the language model inside.
_MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def family_of(cfg: ModelConfig) -> str:
    """The `model_type` of this decoder in `transformers`.

    Raises:
      ValueError: no architecture there has this mix of features.
    """
    for name, family in FAMILIES.items():
        routed = MOE in cfg.feed_forwards
        shared = cfg.shared_expert_intermediate_size > 0
        if (
            family.mixers.issuperset(cfg.mixers)
            and family.feed_forwards.issuperset(cfg.feed_forwards)
            and all(getattr(cfg, field) == value for field, value in family.fixed.items())
            and (not routed or shared == ("shared_expert_intermediate_size" in family.sizes))
        ):
            return name
    fields = sorted({field for family in FAMILIES.values() for field in family.fixed})
    mix = {field: getattr(cfg, field) for field in ("mixers", "feed_forwards", *fields)}
    raise ValueError(f"transformers has no architecture with {mix}; it has {', '.join(FAMILIES)}")


def to_hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """The `config.json` of this model for `transformers`.

    Raises:
      ValueError: no architecture there has this mix of features.
    """
    kind = family_of(cfg)
    family = FAMILIES[kind]
    if kind == "llama" and cfg.hidden_size % cfg.heads:
        raise ValueError(
            f"transformers wants hidden_size ({cfg.hidden_size}) of a llama to be a multiple of "
            f"num_attention_heads ({cfg.heads})"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(cfg.rope_scaling)}
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        "hidden_act": "silu",
        "attention_bias": False,
        **{theirs: getattr(cfg, ours) for ours, theirs in family.sizes.items()},
        **{name: getattr(cfg, name) for name in _DEFAULTS},
        "rope_parameters": rope,
    }
    if kind == "llama":
        # transformers would otherwise take the ids of Llama's own tokenizer.
        config |= {"mlp_bias": False, "bos_token_id": None, "eos_token_id": None}
    elif kind == "qwen3_moe":
        dense = [i for i, kind in enumerate(cfg.feed_forward_types) if kind == DENSE]
        config |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        config |= {"norm_topk_prob": cfg.norm_topk_prob}
    elif kind != "qwen3":
        config["layer_types"] = list(cfg.layer_types)
        rope["partial_rotary_factor"] = cfg.partial_rotary_factor
    return config


def from_hf_config(config: dict[str, Any], **overrides: Any) -> ModelConfig:
    """A `ModelConfig` from the contents of `config.json`, of a text or a multimodal model.

    `overrides` set fields that a Hugging Face config doesn't have (`scan_unroll`, `dtype`, ...).

    Raises:
      ValueError: another architecture, or a feature that this decoder doesn't have.
    """
    text = _text_config(config)
    kind = text.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} isn't supported; supported are {_supported()}")
    family = FAMILIES[kind]
    _refuse(kind, text)
    if kind in ("llama", "qwen3_moe") and text.get("head_dim") is None:
        text["head_dim"] = _needed(text, "hidden_size") // _needed(text, "num_attention_heads")
    if kind == "llama" and text.get("num_key_value_heads") is None:
        text["num_key_value_heads"] = _needed(text, "num_attention_heads")
    if "num_local_experts" in text:
        text.setdefault("num_experts", text["num_local_experts"])
    values = dict(family.fixed)
    values["mixers"], values["feed_forwards"] = _layers(kind, text)
    kinds = set(values["feed_forwards"])
    unused = {**({} if DENSE in kinds else _DENSE_SIZES), **({} if MOE in kinds else _MOE_SIZES)}
    absent = {theirs for theirs in family.sizes.values() if text.get(theirs) is None}
    if absent - unused.keys():
        raise ValueError(f"config.json lacks {', '.join(sorted(absent - unused.keys()))}")
    values |= {o: text[theirs] for o, theirs in family.sizes.items() if theirs not in absent}
    values |= {name: _given(text, name, default) for name, default in _DEFAULTS.items()}
    if kind == "qwen3_moe":
        values["norm_topk_prob"] = _given(text, "norm_topk_prob", False)
    return ModelConfig(**(values | _rope(kind, text) | overrides))


def _supported() -> str:
    return ", ".join((*FAMILIES, *_MULTIMODAL))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of the language model's part, whose fields are of the right kinds."""
    _check_kinds(config, "")
    text = dict(_given(config, "text_config", config))
    _check_kinds(text, "text_config.")
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ValueError("quantised checkpoints (quantization_config) aren't supported")
    outer = config.get("model_type")
    if config.get("text_config") is None:
        if outer in _MULTIMODAL:
            raise ValueError(f"config.json lacks text_config, which model_type {outer!r} needs")
        return text
    if outer is not None and _MULTIMODAL.get(outer) != text.get("model_type"):
        raise ValueError(
            f"model_type {outer!r} around {text.get('model_type')!r} isn't supported; supported "
            f"are {_supported()}"
        )
    tied = _given(text, "tie_word_embeddings", config.get("tie_word_embeddings"))
    return text | {"tie_word_embeddings": tied}


def _check_kinds(fields: dict[str, Any], place: str) -> None:
    """Raises ValueError for a field, of those at `place`, that isn't of its kind."""
    for label, (is_kind, names) in _KINDS.items():
        for name in names:
            if fields.get(name) is not None and not is_kind(fields[name]):
                raise ValueError(
                    f"config.json: {place}{name} must be {label}, got {fields[name]!r}"
                )


def _given(fields: dict[str, Any], name: str, default: Any) -> Any:
    return default if fields.get(name) is None else fields[name]


def _needed(text: dict[str, Any], name: str) -> Any:
    if text.get(name) is None:
        raise ValueError(f"config.json lacks {name}")
    return text[name]


def _refuse(kind: str, text: dict[str, Any]) -> None:
    """Raises ValueError for a feature that this decoder doesn't have."""
    for name in ("attention_bias", "mlp_bias"):
        if text.get(name):
            raise ValueError(f"{name} is set, but only layers without biases are supported")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {text['hidden_act']!r} isn't supported; only silu is")
    if text.get("use_sliding_window") or "sliding_attention" in (text.get("layer_types") or ()):
        raise ValueError("sliding windows aren't supported; only full attention is")
    if text.get("attention_dropout"):
        raise ValueError("attention_dropout is set, but dropout isn't supported")
    if text.get("attn_output_gate") is False and FAMILIES[kind].fixed["attention_gate"]:
        raise ValueError(f"attn_output_gate is off, but {kind} is supported only with it")
    if kind == "qwen3_5_moe_text" and text.get("mlp_only_layers"):
        raise ValueError(f"mlp_only_layers isn't supported for {kind}, only for qwen3_moe")


def _layers(kind: str, text: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The mixer and the feed-forward of every layer."""
    count = _needed(text, "num_hidden_layers")
    mixers = text.get("layer_types")
    if DELTA not in FAMILIES[kind].mixers:
        mixers = mixers or [FULL] * count
        if set(mixers) != {FULL}:
            raise ValueError(f"layer_types of {kind} must all be {FULL}, got {sorted(set(mixers))}")
    elif not mixers:
        interval = _given(text, "full_attention_interval", 4)
        mixers = [DELTA if (i + 1) % interval else FULL for i in range(count)]
    if len(mixers) != count:
        raise ValueError(f"layer_types lists {len(mixers)} layers, num_hidden_layers is {count}")
    if kind != "qwen3_moe":
        return mixers, [*FAMILIES[kind].feed_forwards]
    dense, step = text.get("mlp_only_layers") or (), _given(text, "decoder_sparse_step", 1)
    routed = (_needed(text, "num_experts") and i not in dense and (i + 1) % step == 0
              for i in range(count))  # fmt: skip
    return mixers, [MOE if is_routed else DENSE for is_routed in routed]


def _rope(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions.

    As in `transformers`, a `rope_scaling` that isn't empty stands in for all of `rope_parameters`,
    and some of what the one that counts leaves out is looked for beside it.
    """
    place = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(place) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{place} for each kind of layer aren't supported; only one is")
    _check_kinds(rope, f"{place}.")
    style = rope.get("rope_type") or rope.get("type") or "default"
    if style not in ("default", "llama3"):
        raise ValueError(
            f"config.json: {place}.rope_type {style!r} isn't supported; only default and llama3 are"
        )
    theta = _given(rope, "rope_theta", _given(text, "rope_theta", 10_000.0))
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    fixed = "partial_rotary_factor" in FAMILIES[kind].fixed
    # A null beside it means 1, not what an absent field does.
    partial = text.get("partial_rotary_factor", 1.0 if fixed else 0.25)
    partial = rope.get("partial_rotary_factor", 1.0 if partial is None else partial)
    if not fixed:
        fields["partial_rotary_factor"] = partial
    elif partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} isn't supported for {kind}; only 1 is")
    if style == "llama3":
        longest = _given(rope, _LONGEST, _needed(text, "max_position_embeddings"))
        names = [field.name for field in dataclasses.fields(Llama3Rope)]
        rope = rope | {_LONGEST: _given(text, _LONGEST, longest)}
        fields["rope_scaling"] = Llama3Rope(**{name: _needed(rope, name) for name in names})
    return fields
