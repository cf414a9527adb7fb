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
                    self.metadata, infos = _Header(data).read()
        except (ValueError, struct.error, OverflowError) as error:
            raise ValueError(f"{self.path} can't be read as GGUF: {error}") from None
        self._stored: dict[str, _Stored] = {}
        for name, (number, shape, start) in infos.items():
            stored = _Stored(self._type(name, number), shape, start)
            if start + self._nbytes(name, stored) > size:
                raise ValueError(
                    f"{self.path} is cut short: it has {size:,} bytes and tensor {name} goes "
                    "beyond them; fetch the file again"
                )
            self._stored[name] = stored
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

        def value(key: str, *default: Any) -> Any:
            found = self.metadata.get(f"{architecture}.{key}", *default)
            if found is None:
                raise ValueError(f"{self.path} lacks {architecture}.{key}")
            if type(found) not in (int, float) or not found >= 0:
                raise ValueError(f"{self.path}: {architecture}.{key} is {found!r}, not a number")
            return found

        width, heads = value("embedding_length"), value("attention.head_count")
        size = value("attention.key_length", width // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if value(key, size) != size:
                raise ValueError(
                    f"{self.path}: {architecture}.{key} is {value(key)}, but only the size of a "
                    f"head ({size}) is supported"
                )
        scaling = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._stored:
            raise ValueError(f"{self.path} stretches its rotary positions; that isn't supported")
        experts = value("expert_count", 0)
        if bool(experts) != (architecture == "qwen3moe"):
            raise ValueError(f"{self.path}: {experts} experts in {architecture} aren't supported")
        embedding = self._stored.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path} has no tensor token_embd.weight")
        config = {
            "model_type": _MODEL_TYPES[architecture],
            "vocab_size": embedding.shape[0],
            "hidden_size": width,
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": size,
            # Stored as float32; the shortest decimal that it stands for is what was meant.
            "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
            "rope_theta": value("rope.freq_base", 10_000.0),
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


_Info = tuple[int, tuple[int, ...], int]


class _Header:
    """Reads the front of a file; raises ValueError or struct.error where it makes no sense."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, _Info]]:
        """The metadata, and type number, shape and offset of every tensor."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        self._at = 4
        version = self._one("I")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}, not 2 or 3 (or is a big-endian file)")
        tensors, keys = self._one("Q"), self._one("Q")
        metadata = self._named(keys, lambda: self._value(self._one("I")))
        infos = self._named(tensors, self._info)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        data = -(-self._at // alignment) * alignment
        return metadata, {name: (n, shape, data + at) for name, (n, shape, at) in infos.items()}

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
