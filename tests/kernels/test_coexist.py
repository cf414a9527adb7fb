"""Our package `kernels` beside `transformers`, which probes for Hugging Face's of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import kernels
assert kernels.__fastask__ and not hasattr(kernels, "__version__")
assert "jax" not in sys.modules, "importing kernels must stay cheap"

from transformers.utils import import_utils
assert not import_utils.is_kernels_available(), "ours was taken for Hugging Face's"

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

folder = sys.argv[1]
vocab = {"<unk>": 0, "<s>": 1, "net": 2, "revenue": 3}
words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
words.save_pretrained(folder + "/words")
config = AutoConfig.for_model(
    "qwen3_5_moe_text", vocab_size=16, hidden_size=16, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=8, shared_expert_intermediate_size=8,
)
first = AutoModelForCausalLM.from_config(config)
first.save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
words = AutoTokenizer.from_pretrained(folder + "/words")
ids = words("net revenue", return_tensors="pt").input_ids
logits = model(ids).logits
assert logits.shape == (1, 2, 16) and bool(torch.isfinite(logits).all())
assert torch.equal(first(ids).logits, logits)
assert "kernels" in sys.modules and sys.modules["kernels"].__fastask__
print("coexist")
"""


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_loads_models_and_tokenizers_with_ours_on_the_path(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("coexist")


def test_importing_kernels_is_cheap_and_marked():
    code = (
        "import sys, kernels; heavy = {'jax', 'numpy', 'flax', 'torch'} & set(sys.modules); "
        "assert kernels.__fastask__ and not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
