"""Writes references.npz: what `transformers` computes for a few tiny configs (torch, float32).

    python tests/fastask_jax/model/make_references.py

Weights aren't stored; both sides draw them from seeds that follow from the tensor names.  For
each config the file holds token ids, logits, and for every tensor the gradient of the mean
next-token loss, reduced to its norm and its product with a fixed random direction.
"""

import zlib
from pathlib import Path

import numpy as np

from fastask_jax.model.config import DELTA, DENSE, FULL, MOE, Llama3Rope, ModelConfig
from fastask_jax.model.families import to_hf_config

FILE = Path(__file__).with_name("references.npz")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "head_dim": 16,
    # Random weights make some outputs of the delta rule nearly zero, which the norm behind it
    # blows up, rounding errors (of torch too) included; a larger epsilon bounds that.
    "rms_norm_eps": 1e-3,
}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
_MOE = {"moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 24}
_PLAIN = {
    **SMALL,
    "mixers": (FULL,),
    "attention_gate": False,
    "zero_centered_norms": False,
    "partial_rotary_factor": 1.0,
    "intermediate_size": 40,
}
_DENSE_PLAIN = {**_PLAIN, "num_layers": 2, "feed_forwards": (DENSE,)}
_MOE_PLAIN = {**_PLAIN, **_MOE, "shared_expert_intermediate_size": 0}

CONFIGS = {
    # Qwen3.5-MoE
    "tiny": ModelConfig(**SMALL, **_DELTA, **_MOE, **_SHARED, scan_unroll=2),
    "wide_pattern": ModelConfig(
        **SMALL,
        **_DELTA,
        **_MOE,
        **_SHARED,
        num_layers=6,
        mixers=(DELTA, DELTA, FULL),
        heads=4,
        kv_heads=1,
        partial_rotary_factor=0.25,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        num_experts=6,
        num_experts_per_tok=3,
        moe_implementation="sorted",
        tie_word_embeddings=False,
    ),
    # Llama
    "llama": ModelConfig(**_DENSE_PLAIN, qk_norm=False, heads=8, kv_heads=2),
    "llama3_rope": ModelConfig(
        **_DENSE_PLAIN,
        qk_norm=False,
        heads=2,
        kv_heads=2,
        rope_theta=500.0,
        # With a head of 16 and this base, the three kinds of wavelength all occur.
        rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 64),
        tie_word_embeddings=False,
    ),
    # Qwen3
    "qwen3": ModelConfig(**_DENSE_PLAIN, heads=4, kv_heads=1, scan_unroll=2),
    # Qwen3-MoE
    "qwen3_moe": ModelConfig(
        **_MOE_PLAIN,
        num_layers=4,
        feed_forwards=(DENSE, MOE),
        heads=6,
        kv_heads=2,
        num_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    ),
    "qwen3_moe_no_pattern": ModelConfig(
        **_MOE_PLAIN,
        num_layers=3,
        feed_forwards=(MOE, MOE, DENSE),
        heads=4,
        kv_heads=4,
        num_experts=40,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    ),
    # Qwen3.5 dense
    "qwen3_5": ModelConfig(
        **SMALL,
        **_DELTA,
        intermediate_size=40,
        num_layers=3,
        mixers=(DELTA, FULL, FULL),
        feed_forwards=(DENSE,),
        heads=6,
        kv_heads=2,
        partial_rotary_factor=0.25,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        tie_word_embeddings=False,
    ),
}


def generator(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def random_tensors(
    cfg: ModelConfig, shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Hugging Face tensors of plausible sizes, each drawn from its own name."""
    tensors = {}
    for name, shape in shapes.items():
        random = generator(name)
        if name.endswith("A_log"):
            value = np.log(random.uniform(0.2, 4.0, shape))
        elif name.endswith("norm.weight") and (
            not cfg.zero_centered_norms or "linear_attn" in name
        ):
            value = random.normal(1.0, 0.1, shape)
        elif len(shape) == 1:
            value = random.normal(0.0, 0.1, shape)
        else:
            # Small steps of the residual stream, as at the start of training: errors don't grow.
            residual = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
            value = random.normal(0.0, 0.3 if residual else 1.0, shape) / shape[-1] ** 0.5
        tensors[name] = value.astype(np.float32)
    return tensors


def tokens_for(cfg: ModelConfig, length: int, rows: int = 2) -> np.ndarray:
    return generator(f"tokens {length}").integers(0, cfg.vocab_size, (rows, length))


def torch_model(cfg: ModelConfig):
    """A float32 `transformers` model with the drawn weights, and those weights by name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = to_hf_config(cfg)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tensors = random_tensors(cfg, names)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, strict=False)
    return model.eval(), tensors


def run_torch(model, tokens: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradient of the mean next-token loss by tensor name."""
    import torch

    ids = torch.from_numpy(tokens)
    model.zero_grad()
    logits = model(ids).logits
    if tokens.shape[1] > 1:
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)
        )
        loss.backward()
    grads = {
        name: np.zeros(tuple(p.shape), np.float32) if p.grad is None else p.grad.numpy().copy()
        for name, p in model.named_parameters()
    }
    return logits.detach().numpy(), grads


def reduced(name: str, gradient: np.ndarray) -> np.ndarray:
    """`[norm, product with a random unit direction]` of a gradient."""
    direction = generator(f"direction {name}").normal(size=gradient.shape)
    direction /= np.linalg.norm(direction)
    wide = gradient.astype(np.float64)
    return np.asarray([np.linalg.norm(wide), np.vdot(direction, wide)], np.float32)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    arrays = {}
    for label, cfg in CONFIGS.items():
        model, _ = torch_model(cfg)
        tokens = tokens_for(cfg, 65)
        logits, grads = run_torch(model, tokens)
        arrays[f"{label}/logits"] = logits
        names = sorted(grads)
        arrays[f"{label}/grads"] = np.stack([reduced(name, grads[name]) for name in names])
        arrays[f"{label}/names"] = np.asarray(names)
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
