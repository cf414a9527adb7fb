"""The shape of a decoder, as one frozen config, and the named presets.

Field names follow the Hugging Face text configs with the `num_` prefixes and `attention` suffixes
of head counts left out.  `families.py` says which of these shapes `transformers` has a name for.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from kernels.choice import Kernels

DELTA = "linear_attention"
FULL = "full_attention"
DENSE = "dense"
MOE = "moe"
REMATS = ("none", "block", "dots")


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary frequencies stretched as in Llama 3.1; the fields of rope_type "llama3".

    Wavelengths longer than `original_max_position_embeddings / low_freq_factor` grow by `factor`,
    those shorter than `... / high_freq_factor` stay, and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        positive = all(_is_positive(value) for value in dataclasses.astuple(self))
        if not positive or self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "a llama3 rope needs positive factors and high_freq_factor above "
                f"low_freq_factor, got {self}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder whose layers are a token mixer and a feed-forward, each chosen by a pattern.

    Raises:
      ValueError: from the constructor, on sizes that don't fit together.
    """

    vocab_size: int = 2048
    hidden_size: int = 128
    num_layers: int = 4
    # Kinds of the layers' mixers and feed-forwards, each repeated over the depth and kept as the
    # shortest pattern that says the same.
    mixers: tuple[str, ...] = (DELTA, FULL)
    feed_forwards: tuple[str, ...] = (MOE,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    # Norms over each query and key head.
    qk_norm: bool = True
    # A sigmoid gate on the output of full attention.
    attention_gate: bool = True
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    # Width of the dense feed-forwards.
    intermediate_size: int = 256
    num_experts: int = 4
    num_experts_per_tok: int = 2
    # Whether the weights of the chosen experts add up to 1.
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 96
    # 0: no shared expert.
    shared_expert_intermediate_size: int = 96
    rms_norm_eps: float = 1e-6
    # Norms scale by 1 + weight, not by weight.
    zero_centered_norms: bool = True
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 32_768
    # Standard deviation of the initial embeddings; linear layers scale with their fan-in.
    initializer_range: float = 0.02
    # Activation type; parameters, gates, states, softmax statistics stay float32.
    dtype: str = "float32"
    # Tokens per chunk of the gated delta rule.
    delta_chunk: int = 32
    # Implementations of the operations in `kernels`.
    kernels: Kernels = Kernels()
    # "dense" computes every expert for every token, "sorted" only the chosen ones; "auto" takes
    # "dense" up to eight experts, where one wide product beats sorting.
    moe_implementation: str = "auto"
    # Blocks unrolled per scan step; `scan_unroll >= num_blocks` leaves no loop at all, which
    # compiles longer and runs faster at tiny depth.
    scan_unroll: int = 1
    # What the backward pass recomputes: "none" nothing, "block" each block, "dots" each block but
    # for the outputs of its matrix products with weights.
    remat: str = "none"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "shared_expert_intermediate_size" else 1
            if type(field.default) is float and not _is_positive(value):
                raise ValueError(f"{field.name} must be a positive number, got {value!r}")
            if type(field.default) is bool and type(value) is not bool:
                raise ValueError(f"{field.name} must be true or false, got {value!r}")
            if type(field.default) is int and type(value) is not int:
                raise ValueError(f"{field.name} must be a whole number, got {value!r}")
            if type(field.default) is int and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        for name, kinds in (("mixers", (DELTA, FULL)), ("feed_forwards", (DENSE, MOE))):
            object.__setattr__(self, name, self._pattern(name, kinds))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError("linear_num_value_heads must be a multiple of linear_num_key_heads")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError("num_experts_per_tok must not exceed num_experts")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"head_dim * partial_rotary_factor must be even and at most head_dim, "
                f"got {self.rotary_dim}"
            )
        if self.moe_implementation not in ("auto", "dense", "sorted"):
            raise ValueError("moe_implementation must be auto, dense or sorted")
        if self.remat not in REMATS:
            raise ValueError(f"remat must be one of {', '.join(REMATS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError("dtype must be float32 or bfloat16")

    def _pattern(self, name: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
        pattern = tuple(getattr(self, name))
        unknown = sorted({str(kind) for kind in pattern if kind not in kinds})
        if unknown or not pattern:
            raise ValueError(
                f"{name} must list {' or '.join(kinds)}, got {', '.join(unknown) or 'nothing'}"
            )
        if self.num_layers % len(pattern):
            raise ValueError(
                f"num_layers ({self.num_layers}) must be a multiple of the length of {name} "
                f"({len(pattern)})"
            )
        return pattern[: _period(pattern)]

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The mixer of every layer, "linear_attention" or "full_attention"."""
        return self.mixers * (self.num_layers // len(self.mixers))

    @property
    def feed_forward_types(self) -> tuple[str, ...]:
        """The feed-forward of every layer, "dense" or "moe"."""
        return self.feed_forwards * (self.num_layers // len(self.feed_forwards))

    @property
    def block_layers(self) -> tuple[tuple[str, str], ...]:
        """Mixer and feed-forward of the layers of one block: the smallest unit that the list of
        layers repeats, and that layers are scanned by."""
        layers = tuple(zip(self.layer_types, self.feed_forward_types, strict=True))
        return layers[: _period(layers)]

    @property
    def num_blocks(self) -> int:
        return self.num_layers // len(self.block_layers)

    @property
    def num_moe_layers(self) -> int:
        return self.feed_forward_types.count(MOE)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def unrolled(self) -> bool:
        return self.scan_unroll >= self.num_blocks

    @property
    def dense_experts(self) -> bool:
        if self.moe_implementation == "auto":
            return self.num_experts <= 8
        return self.moe_implementation == "dense"


def _is_positive(value: object) -> bool:
    return type(value) is not bool and isinstance(value, int | float) and 0 < value < math.inf


def _period(sequence: tuple) -> int:
    """The length of the shortest unit that `sequence` repeats a whole number of times."""
    size = len(sequence)
    return next(
        n for n in range(1, size + 1) if size % n == 0 and sequence[:n] * (size // n) == sequence
    )


PRESETS: dict[str, ModelConfig] = {
    # Small enough for reinforcement learning on two CPU cores.
    "tiny": ModelConfig(
        vocab_size=2560,
        hidden_size=96,
        head_dim=24,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        initializer_range=0.1,
        scan_unroll=2,
    ),
    # Language model of Qwen/Qwen3.5-35B-A3B.
    "qwen3.5-35b-a3b": ModelConfig(
        vocab_size=248_320,
        hidden_size=2048,
        num_layers=40,
        mixers=(DELTA, DELTA, DELTA, FULL),
        heads=16,
        kv_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        rope_theta=10_000_000.0,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        max_position_embeddings=262_144,
        dtype="bfloat16",
        delta_chunk=64,
        remat="block",
    ),
    # Language model of Qwen/Qwen3.5-122B-A10B.
    "qwen3.5-122b-a10b": ModelConfig(
        vocab_size=248_320,
        hidden_size=3072,
        num_layers=48,
        mixers=(DELTA, DELTA, DELTA, FULL),
        heads=32,
        kv_heads=2,
        head_dim=256,
        partial_rotary_factor=0.25,
        rope_theta=10_000_000.0,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        tie_word_embeddings=False,
        max_position_embeddings=262_144,
        dtype="bfloat16",
        delta_chunk=64,
        remat="block",
    ),
    # HuggingFaceTB/SmolLM2-135M and its instruction-tuned version.
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        mixers=(FULL,),
        feed_forwards=(DENSE,),
        heads=9,
        kv_heads=3,
        head_dim=64,
        qk_norm=False,
        attention_gate=False,
        partial_rotary_factor=1.0,
        rope_theta=100_000.0,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        zero_centered_norms=False,
        max_position_embeddings=8192,
        initializer_range=1 / 24,
    ),
}
