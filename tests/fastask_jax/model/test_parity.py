"""The decoder against `transformers`: stored references, and torch run live where present."""

import numpy as np
import pytest

from fastask_jax.model.hugging_face import from_hf_tensors, to_hf_tensors

LABELS = ["tiny", "wide_pattern", "attention_only"]


def drawn_params(references, cfg):
    import jax

    from fastask_jax.model import init_params

    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract)
    shapes = {name: value.shape for name, value in to_hf_tensors(cfg, empty)}
    tensors = references.random_tensors(shapes)
    return from_hf_tensors(cfg, set(tensors), tensors.__getitem__)


@pytest.mark.parametrize("label", LABELS)
def test_stored_references(references, logits_and_gradients, label):
    cfg = references.CONFIGS[label]
    stored = np.load(references.FILE)
    params = drawn_params(references, cfg)
    logits, grads = logits_and_gradients(cfg, params, references.tokens_for(cfg, 65))
    np.testing.assert_allclose(logits, stored[f"{label}/logits"], atol=1e-4)
    by_name = dict(to_hf_tensors(cfg, grads))
    assert sorted(by_name) == stored[f"{label}/names"].tolist()
    for name, (norm, product) in zip(
        stored[f"{label}/names"], stored[f"{label}/grads"], strict=True
    ):
        got_norm, got_product = references.reduced(str(name), by_name[str(name)])
        assert abs(got_norm - norm) <= 1e-4 * norm + 1e-7, name
        assert abs(got_product - product) <= 1e-4 * norm + 1e-7, name


def test_the_stored_file_is_small(references):
    assert references.FILE.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("label", LABELS)
def test_live_logits_and_every_gradient(references, logits_of, logits_and_gradients, label):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    cfg = references.CONFIGS[label]
    model, tensors = references.torch_model(cfg)
    params = from_hf_tensors(cfg, set(tensors), tensors.__getitem__)
    for length in (1, 63, 64, 257):
        tokens = references.tokens_for(cfg, length)
        with torch.no_grad():
            expected = model(torch.from_numpy(tokens)).logits.numpy()
        np.testing.assert_allclose(logits_of(cfg, params, tokens), expected, atol=1e-4)
    tokens = references.tokens_for(cfg, 65)
    expected, expected_grads = references.run_torch(model, tokens)
    got, grads = logits_and_gradients(cfg, params, tokens)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    by_name = dict(to_hf_tensors(cfg, grads))
    assert by_name.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        error = np.linalg.norm(by_name[name] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected) + 1e-7, name
