"""Tiny tokenizers with the shipped chat template, trained on the spot."""

from pathlib import Path

import pytest

TEMPLATE = Path("fastask_jax/model/tokenizers/chat_template.jinja")
TURN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def train_tokenizer(added=(), vocab_size=400):
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    transformers.logging.set_verbosity_error()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [
        "system user assistant read_ranges run_python get_workbook_metadata function parameter",
        'tool_call tool_response ranges ["Orders!A:D"] code print(sum(r.amount for r in Orders))',
        "ANSWER: 12500\n\nWhat is the net revenue of North in March 2024?\n",
    ] * 4
    core.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=TURN_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(list(added))
    root = Path(__file__).parents[2]
    tokenizer.chat_template = (root / TEMPLATE).read_text()
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Turn tokens only are special; the tool tags are ordinary text."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def tag_tokenizer():
    """As in Qwen3.5: the tool tags are single added tokens too."""
    return train_tokenizer(TOOL_TOKENS)


@pytest.fixture(scope="session")
def chat(tokenizer):
    from fastask_jax.rollout.chat import ChatFormat

    return ChatFormat(tokenizer)
