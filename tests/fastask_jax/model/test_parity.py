"""The decoder against `transformers`: stored references, and torch run live where present."""

import jax
import numpy as np
import pytest

from fastask_jax.model import init_params

LABELS = (
    "tiny",
    "wide_pattern",
    "llama",
    "llama3_rope",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_no_pattern",
    "qwen3_5",
)
LENGTHS = (1, 63, 64, 65, 257)
LONGEST = max(LENGTHS)


@pytest.fixture
def drawn_params(references, module_tensors, params_of):
    def draw(cfg):
        abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract)
        shapes = {name: value.shape for name, value in module_tensors(cfg, empty).items()}
        return params_of(cfg, references.random_tensors(cfg, shapes))

    return draw


def test_every_config_is_tested(references):
    assert set(LABELS) == set(references.CONFIGS)


@pytest.mark.parametrize("label", LABELS)
def test_stored_references(references, logits_and_gradients, module_tensors, drawn_params, label):
    cfg = references.CONFIGS[label]
    stored = np.load(references.FILE)
    logits, grads = logits_and_gradients(
        cfg, drawn_params(cfg), references.tokens_for(cfg, 65), pad_to=LONGEST
    )
    np.testing.assert_allclose(logits, stored[f"{label}/logits"], atol=1e-4)
    by_name = module_tensors(cfg, grads)
    assert sorted(by_name) == stored[f"{label}/names"].tolist()
    for name, (norm, product) in zip(
        stored[f"{label}/names"], stored[f"{label}/grads"], strict=True
    ):
        got_norm, got_product = references.reduced(str(name), by_name[str(name)])
        assert abs(got_norm - norm) <= 1e-4 * norm + 1e-7, name
        assert abs(got_product - product) <= 1e-4 * norm + 1e-7, name


def test_the_stored_file_is_small(references):
    assert references.FILE.stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("label", LABELS)
def test_live_logits_and_every_gradient(
    references, logits_of, logits_and_gradients, module_tensors, params_of, label
):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    cfg = references.CONFIGS[label]
    model, tensors = references.torch_model(cfg)
    params = params_of(cfg, tensors)
    # All lengths run in one program, the shorter ones padded; each config also runs one of them
    # without padding, a different one from config to config.
    unpadded = LENGTHS[LABELS.index(label) % len(LENGTHS)]
    for length in LENGTHS:
        tokens = references.tokens_for(cfg, length)
        expected, expected_grads = references.run_torch(model, tokens)
        logits, grads = logits_and_gradients(cfg, params, tokens, pad_to=LONGEST)
        if length == unpadded:
            alone = logits_of(cfg, params, tokens)
            np.testing.assert_allclose(alone, expected, atol=1e-4)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        by_name = module_tensors(cfg, grads)
        assert by_name.keys() == expected_grads.keys()
        for name, grad in expected_grads.items():
            norm = np.linalg.norm(grad)
            error = np.linalg.norm(by_name[name] - grad)
            assert error <= 1e-4 * norm + 1e-7, (length, name)
