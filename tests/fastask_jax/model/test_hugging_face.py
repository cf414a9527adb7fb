"""Weights in and out: round trips, files that `transformers` loads, and errors that name names."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastask_jax.model import init_params, load_params, save_params


@pytest.fixture(scope="module")
def params(small):
    return init_params(small, jax.random.key(0))


@pytest.fixture
def saved(small, params, tmp_path):
    save_params(tmp_path, small, params)
    return tmp_path


def overrides(cfg):
    """The fields that a Hugging Face config doesn't hold."""
    names = ("dtype", "delta_chunk", "moe_implementation", "scan_unroll", "remat")
    return {name: getattr(cfg, name) for name in names}


def test_round_trip_is_exact(small, params, saved):
    cfg, loaded = load_params(saved, **overrides(small))
    assert cfg == small
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, params)))


def test_bfloat16_halves_the_file_and_keeps_the_vectors(small, params, saved, tmp_path):
    low = tmp_path / "low"
    save_params(low, small, params, dtype="bfloat16")
    sizes = [(path / "model.safetensors").stat().st_size for path in (low, saved)]
    assert sizes[0] < 0.65 * sizes[1]
    _, loaded = load_params(low)
    mixer = loaded["blocks"]["layer_0"]["mixer"]
    np.testing.assert_array_equal(mixer["a_log"], params["blocks"]["layer_0"]["mixer"]["a_log"])
    np.testing.assert_allclose(loaded["embedding"], params["embedding"], rtol=1e-2)
    with pytest.raises(ValueError, match="dtype must be"):
        save_params(low, small, params, dtype="int8")


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_surplus_and_misshapen_tensors_are_named(saved):
    name = "model.layers.1.mlp.gate.weight"
    edit(saved, lambda tensors: tensors.update({name: tensors[name][:2].copy()}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 24\), expected \(4, 24\)"):
        load_params(saved)
    edit(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing tensors: {name}"):
        load_params(saved)
    edit(saved, lambda tensors: tensors.update({name: np.ones((4, 24), np.float32)}))
    edit(saved, lambda tensors: tensors.update({"mtp.norm": np.ones(3, np.float32)}))
    with pytest.raises(ValueError, match="surplus tensors: mtp.norm"):
        load_params(saved)


def test_a_stored_tied_head_must_be_the_embedding(saved, params):
    head = np.asarray(params["embedding"])
    edit(saved, lambda tensors: tensors.update({"lm_head.weight": head}))
    load_params(saved)
    edit(saved, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load_params(saved)


def test_files_that_are_missing_or_broken(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_params(tmp_path / "nowhere")
    (saved / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ValueError, match="model.safetensors can't be read"):
        load_params(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="isn't valid JSON"):
        load_params(saved)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save(small, tmp_path, logits_of, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    cfg = dataclasses.replace(small, tie_word_embeddings=tied)
    params = init_params(cfg, jax.random.key(3))
    save_params(tmp_path, cfg, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 33))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(cfg, params, tokens), expected, atol=1e-4)
    # And back: what transformers writes is what we read.
    model.save_pretrained(tmp_path / "theirs")
    _, loaded = load_params(tmp_path / "theirs")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, params)))
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["hidden_size"] == 24
