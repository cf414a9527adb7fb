"""The shape of a decoder, as one frozen config, and the named presets.

Field names follow the Hugging Face text config of Qwen3.5-MoE with the `num_` prefixes and
`attention` suffixes of head counts left out.  Dense feed-forward families (Llama, Qwen3, dense
Qwen3.5) are not described yet.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

DELTA = "linear_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid decoder: blocks of `full_attention_interval` layers, the last of each with full
    attention and the others with the gated delta rule, each followed by routed experts.

    Raises:
      ValueError: from the constructor, on sizes that don't fit together.
    """

    vocab_size: int = 2048
    hidden_size: int = 128
    num_layers: int = 4
    full_attention_interval: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10_000.0
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    num_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 96
    shared_expert_intermediate_size: int = 96
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 32_768
    # Standard deviation of the initial embeddings; linear layers scale with their fan-in.
    initializer_range: float = 0.02
    # Activation type; parameters, gates, states, softmax statistics stay float32.
    dtype: str = "float32"
    # Tokens per chunk of the gated delta rule.
    delta_chunk: int = 32
    # "dense" computes every expert for every token, "sorted" only the chosen ones; "auto" takes
    # "dense" up to eight experts, where one wide product beats sorting.
    moe_implementation: str = "auto"
    # Blocks unrolled per scan step; `scan_unroll >= num_blocks` leaves no loop at all, which
    # compiles longer and runs faster at tiny depth.
    scan_unroll: int = 1
    # "none" keeps all activations for the backward pass, "block" recomputes each block.
    remat: str = "none"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.num_layers % self.full_attention_interval:
            raise ValueError(
                f"num_layers ({self.num_layers}) must be a multiple of "
                f"full_attention_interval ({self.full_attention_interval})"
            )
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
        if self.remat not in ("none", "block"):
            raise ValueError("remat must be none or block")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError("dtype must be float32 or bfloat16")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The mixer of every layer, "linear_attention" or "full_attention"."""
        return self.block_types * self.num_blocks

    @property
    def block_types(self) -> tuple[str, ...]:
        """The mixers of one block, the unit that layers are scanned by."""
        return (DELTA,) * (self.full_attention_interval - 1) + (FULL,)

    @property
    def num_blocks(self) -> int:
        return self.num_layers // self.full_attention_interval

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
        full_attention_interval=4,
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
}
