"""Adapters in the files of PEFT: what PEFT loads is the model that was trained here."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from fastask_jax.model import init_params, save_params
from fastask_jax.model.lora import (
    ATTENTION,
    TARGETS,
    LoraConfig,
    attach,
    init_adapters,
    merge_adapters,
)
from fastask_jax.model.peft import check_peft, save_adapter

LABELS = ("llama3_rope", "qwen3_moe", "wide_pattern")


def drawn(cfg, lora):
    """Adapters whose B isn't zero any more."""
    adapters = init_adapters(cfg, lora, jax.random.key(1))
    random = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: x + 0.1 * random.standard_normal(x.shape).astype(np.float32), adapters
    )


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("label", LABELS)
def test_peft_and_transformers_load_what_was_trained(references, tmp_path, logits_of, label):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    torch.set_num_threads(1)
    # A large epsilon, so that norms of small vectors don't blow rounding up: this is about files.
    cfg = dataclasses.replace(references.CONFIGS[label], rms_norm_eps=0.1)
    lora = LoraConfig(rank=3, alpha=6.0)
    if label == "qwen3_moe":  # dense and routed layers mix
        lora = dataclasses.replace(lora, targets=ATTENTION)
    weights, adapters = init_params(cfg, jax.random.key(0)), drawn(cfg, lora)
    save_params(tmp_path / "base", cfg, weights)
    save_params(tmp_path / "merged", cfg, merge_adapters(cfg, lora, weights, adapters))
    save_adapter(tmp_path / "adapter", cfg, lora, adapters, base=str(tmp_path / "base"))
    tokens = references.tokens_for(cfg, 19)
    ours = logits_of(cfg, attach(lora, weights, adapters), tokens)
    base = load(tmp_path / "base")
    untouched = run(torch, base, tokens)
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapted = [module for module in wrapped.modules() if hasattr(module, "lora_A")]
    assert 2 * len(adapted) == count(tmp_path / "adapter")
    theirs = run(torch, wrapped, tokens)
    merged = run(torch, load(tmp_path / "merged"), tokens)
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    np.testing.assert_allclose(merged, ours, atol=1e-5)
    assert np.abs(untouched - ours).max() > 1e-2


def run(torch, model, tokens):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


def count(folder):
    """Tensors in the adapter's file."""
    with open(folder / "adapter_model.safetensors", "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return len(header.keys() - {"__metadata__"})


def test_names_and_settings(small, tmp_path):
    lora = LoraConfig(rank=2, alpha=3.0, targets=("mixer.q_proj", "moe.shared_up"))
    adapters = drawn(small, lora)
    save_adapter(tmp_path / "out", small, lora, adapters, base="somewhere")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3.0)
    assert config["base_model_name_or_path"] == "somewhere"
    assert config["target_modules"] == ["mlp.shared_expert.up_proj", "self_attn.q_proj"]
    # Every layer has a shared expert, half of them attention; an A and a B of each.
    assert count(tmp_path / "out") == 2 * (small.num_layers + small.num_layers // 2)


def test_what_peft_cannot_load_leaves_merged(small, references, tmp_path):
    lora = LoraConfig(rank=2, targets=TARGETS)
    with pytest.raises(ValueError, match="on moe.gate_up, moe.down of this model: merge them"):
        save_adapter(tmp_path / "out", small, lora, drawn(small, lora))
    assert not (tmp_path / "out").exists()
    mixed = references.CONFIGS["qwen3_moe_no_pattern"]
    with pytest.raises(ValueError, match="on mlp.gate, mlp.up, mlp.down of this model"):
        check_peft(mixed, LoraConfig(rank=2))
    check_peft(mixed, dataclasses.replace(lora, targets=ATTENTION))
    check_peft(references.CONFIGS["qwen3"], LoraConfig(rank=2))
