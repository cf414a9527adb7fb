"""GGUF files: their metadata, and their tensors under the names and layouts of `transformers`.

Llama, Qwen3 and Qwen3-MoE, with tensors in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K.
Quantised tensors are unpacked by the `gguf` package; the header is read here, because that
package's reader takes seconds for the two lists of a tokenizer and can't tell a file that was
cut short.  The format is described in ggml's docs/gguf.md, the names and the order of query and
key rows in llama.cpp's converter.  Building tokenizers is left to `tokenizers`, and writing
GGUF files is left out.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# Formats of the scalar types of metadata values, by their number in the file.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Bytes that are unpacked at a time.
_SLAB_BYTES = 1 << 24

# `transformers` name: those of llama.cpp that it is made of, joined along the second axis.
_OUTER: dict[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("token_embd.weight",),
    "model.norm.weight": ("output_norm.weight",),
    "lm_head.weight": ("output.weight",),
}
_INNER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("attn_norm.weight",),
    "self_attn.q_proj.weight": ("attn_q.weight",),
    "self_attn.k_proj.weight": ("attn_k.weight",),
    "self_attn.v_proj.weight": ("attn_v.weight",),
    "self_attn.o_proj.weight": ("attn_output.weight",),
    "self_attn.q_norm.weight": ("attn_q_norm.weight",),
    "self_attn.k_norm.weight": ("attn_k_norm.weight",),
    "post_attention_layernorm.weight": ("ffn_norm.weight",),
    "mlp.gate_proj.weight": ("ffn_gate.weight",),
    "mlp.up_proj.weight": ("ffn_up.weight",),
    "mlp.down_proj.weight": ("ffn_down.weight",),
    "mlp.gate.weight": ("ffn_gate_inp.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}
_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# Keys that would change what a model computes, and the values with which they don't.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}


class _Stored(NamedTuple):
    """A tensor as it lies in the file; `shape` has the fastest axis last."""

    type: str
    shape: tuple[int, ...]
    start: int


class GGUFFile:
    """The contents of one file; a `fastask_jax.model.streaming.Source`.

    metadata: every key of the file; lists are Python lists.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the `gguf` package is missing.
      ValueError: the file is corrupt or cut short, or holds a type that isn't supported.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._package = _gguf()
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no GGUF file {self.path}")
        size = self.path.stat().st_size
        try:
            with open(self.path, "rb") as stream:
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self.metadata, infos, at = _Header(data).read()
        except (ValueError, struct.error, OverflowError) as error:
            raise ValueError(f"{self.path} can't be read as GGUF: {error}") from None
        self._stored: dict[str, _Stored] = {}
        # As in llama.cpp, tensors lie in the order of the header, without holes but for padding.
        for name, (number, shape, start) in infos.items():
            at = _aligned(at, self.metadata)
            if start != at:
                raise ValueError(
                    f"{self.path} is corrupt: tensor {name} starts at byte {start:,}, not right "
                    f"after the one before it, at {at:,}; fetch the file again"
                )
            self._stored[name] = stored = _Stored(self._type(name, number), shape, start)
            at = start + self._nbytes(name, stored)
            if at > size:
                raise ValueError(
                    f"{self.path} is cut short: it has {size:,} bytes and tensor {name} goes "
                    "beyond them; fetch the file again"
                )
        self._parts = self._names()

    def hf_config(self) -> dict[str, Any]:
        """What `config.json` would say.

        Raises:
          ValueError: another architecture, a missing key, or a feature that isn't supported.
        """
        architecture = self.metadata.get("general.architecture")
        if architecture not in _MODEL_TYPES:
            raise ValueError(
                f"{self.path} has architecture {architecture!r}; supported are "
                f"{', '.join(_MODEL_TYPES)}"
            )

        def value(key: str, *default: Any, real: bool = False, least: int = 1) -> Any:
            found = self.metadata.get(f"{architecture}.{key}", *default)
            if found is None:
                raise ValueError(f"{self.path} lacks {architecture}.{key}")
            if real:
                wanted = "that is finite and above 0"
                fits = type(found) in (int, float) and 0 < found < math.inf
            else:
                wanted = f"that is whole and at least {least}"
                fits = type(found) is int and found >= least
            if not fits:
                raise ValueError(
                    f"{self.path}: {architecture}.{key} is {found!r}, not a number {wanted}"
                )
            return found

        width, heads = value("embedding_length"), value("attention.head_count")
        size = value("attention.key_length", width // heads)
        embedding = self._stored.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path} has no tensor token_embd.weight")
        vocabulary = embedding.shape[0]
        for key, what, only in (
            ("attention.value_length", "size of a head", size),
            ("rope.dimension_count", "size of a head", size),
            ("vocab_size", "number of rows of token_embd.weight", vocabulary),
        ):
            if value(key, only) != only:
                raise ValueError(
                    f"{self.path}: {architecture}.{key} is {value(key)}, but only the {what} "
                    f"({only}) is supported"
                )
        neutral = _NEUTRAL | {"attention.scale": (0, float(np.float32(size**-0.5)))}
        for key, allowed in neutral.items():
            found = self.metadata.get(f"{architecture}.{key}", allowed[0])
            if found not in allowed:
                raise ValueError(
                    f"{self.path}: {architecture}.{key} is {found!r}, which changes the "
                    f"computation; supported is {' or '.join(map(repr, allowed))}"
                )
        scaling = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._stored:
            raise ValueError(f"{self.path} stretches its rotary positions; that isn't supported")
        experts = value("expert_count", 0, least=0)
        if bool(experts) != (architecture == "qwen3moe"):
            raise ValueError(f"{self.path}: {experts} experts in {architecture} aren't supported")
        # Stored as float32; the shortest decimal that it stands for is what was meant.
        epsilon = np.float32(value("attention.layer_norm_rms_epsilon", real=True))
        config = {
            "model_type": _MODEL_TYPES[architecture],
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": size,
            "rms_norm_eps": float(str(epsilon)),
            "rope_theta": value("rope.freq_base", 10_000.0, real=True),
            "max_position_embeddings": value("context_length"),
            "tie_word_embeddings": "output.weight" not in self._stored,
        }
        if not experts:
            return config | {"intermediate_size": value("feed_forward_length")}
        return config | {
            "intermediate_size": value("feed_forward_length", value("expert_feed_forward_length")),
            "num_experts": experts,
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }

    @property
    def names(self) -> set[str]:
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        first, *others = (self._stored[part].shape for part in self._parts[name])
        if not others:
            return first
        return (first[0], first[1] + sum(shape[1] for shape in others), *first[2:])

    def read(self, name: str) -> np.ndarray:
        """The tensor as `transformers` has it: a view of the file, or float32 where it has to be
        unpacked, joined or reordered."""
        parts = self._parts[name]
        if len(parts) > 1:
            value, at = np.empty(self.shape(name), np.float32), 0
            for part in parts:
                width = self._stored[part].shape[1]
                value[:, at : at + width] = self._unpacked(part)
                at += width
            return value
        value = self._unpacked(parts[0])
        turned = re.fullmatch(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.weight", name)
        if turned and self.metadata["general.architecture"] == "llama":
            heads = self.hf_config()[_HEADS[turned[1]]]
            return _half_by_half(value, heads)
        return value

    def _unpacked(self, name: str) -> np.ndarray:
        kind, shape, start = self._stored[name]
        if kind in _PLAIN:
            return np.asarray(np.memmap(self.path, _PLAIN[kind], "r", offset=start, shape=shape))
        quantisation = self._package.GGMLQuantizationType[kind]
        rows = math.prod(shape[:-1])
        width = self._nbytes(name, self._stored[name]) // rows
        packed = np.asarray(np.memmap(self.path, np.uint8, "r", offset=start, shape=(rows, width)))
        out = np.empty((rows, shape[-1]), np.float32)
        step = max(1, _SLAB_BYTES // out.strides[0])
        for row in range(0, rows, step):
            out[row : row + step] = self._package.dequantize(packed[row : row + step], quantisation)
        return out.reshape(shape)

    def _type(self, name: str, number: int) -> str:
        try:
            kind = self._package.GGMLQuantizationType(number).name
        except ValueError:
            kind = f"number {number}"
        if kind not in _PLAIN and kind not in _QUANTISED:
            raise ValueError(
                f"tensor {name} in {self.path} has type {kind}; supported are "
                f"{', '.join((*_PLAIN, *_QUANTISED))}"
            )
        return kind

    def _nbytes(self, name: str, stored: _Stored) -> int:
        block, size = self._package.GGML_QUANT_SIZES[
            self._package.GGMLQuantizationType[stored.type]
        ]
        if not stored.shape or 0 in stored.shape or stored.shape[-1] % block:
            raise ValueError(
                f"{self.path}: tensor {name} of shape {stored.shape} isn't made of whole blocks "
                f"of {stored.type}"
            )
        return math.prod(stored.shape) // block * size

    def _names(self) -> dict[str, tuple[str, ...]]:
        """What each tensor of `transformers` is made of; names unknown there stay as they are."""
        layers = {
            int(match[1]) for name in self._stored if (match := re.match(r"blk\.(\d+)\.", name))
        }
        known = dict(_OUTER)
        for layer in layers:
            for theirs, ours in _INNER.items():
                known[f"model.layers.{layer}.{theirs}"] = tuple(
                    f"blk.{layer}.{name}" for name in ours
                )
        found = {
            theirs: ours for theirs, ours in known.items() if all(n in self._stored for n in ours)
        }
        used = {name for ours in found.values() for name in ours}
        return found | {name: (name,) for name in self._stored.keys() - used}


def _half_by_half(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order of `transformers`, which turns row i together with row
    i + size / 2; llama.cpp turns neighbours, and interleaves the two halves for that."""
    rows, width = value.shape
    halves = value.reshape(heads, rows // heads // 2, 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            "reading GGUF files needs the gguf package: pip install '.[gguf]'"
        ) from None
    return gguf


def _aligned(at: int, metadata: dict[str, Any]) -> int:
    """The first byte from `at` on that a tensor may start at."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}, not a whole number of bytes")
    return -(-at // alignment) * alignment


_Info = tuple[int, tuple[int, ...], int]


class _Header:
    """Reads the front of a file; raises ValueError or struct.error where it makes no sense."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Info], int]:
        """The metadata, type number, shape and offset of every tensor, and where their data
        begins."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        self._at = 4
        version = self._one("I")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}, not 2 or 3 (or is a big-endian file)")
        tensors, keys = self._one("Q"), self._one("Q")
        metadata = self._named(keys, lambda: self._value(self._one("I")))
        infos = self._named(tensors, self._info)
        data = _aligned(self._at, metadata)
        infos = {name: (number, shape, data + at) for name, (number, shape, at) in infos.items()}
        return metadata, infos, data

    def _named(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._string()
            if name in found:
                raise ValueError(f"it has {name} twice")
            found[name] = read()
        return found

    def _skip(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self._at
        if size > len(self._data) - at:
            raise ValueError(
                f"it is cut short: its header goes on beyond its {len(self._data):,} bytes"
            )
        self._at += size
        return at

    def _many(self, kind: str, count: int) -> tuple[Any, ...]:
        at = self._skip(struct.calcsize(f"<{kind}") * count)
        return struct.unpack_from(f"<{count}{kind}", self._data, at)

    def _one(self, kind: str) -> Any:
        return self._many(kind, 1)[0]

    def _string(self) -> str:
        at = self._skip(self._one("Q"))
        return self._data[at : self._at].decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 1:
            raise ValueError(f"it has a value of the unknown type {kind}")
        kind, count = self._one("I"), self._one("Q")
        if kind in _SCALARS:
            return list(self._many(_SCALARS[kind], count))
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _info(self) -> _Info:
        count = self._one("I")
        if not 1 <= count <= 4:
            raise ValueError(f"it has a tensor of {count} dimensions")
        shape = tuple(reversed(self._many("Q", count)))
        return self._one("I"), shape, self._one("Q")
