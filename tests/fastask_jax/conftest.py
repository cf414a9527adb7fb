"""What tests of the rollout and the policies share: tiny tokenizers with the shipped chat
template, a tiny random model, and an environment that answers anything."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.core import Message, Score, Step, ToolSpec

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


TOOLS = (
    ToolSpec("look", "Look.", {"type": "object", "properties": {"at": {"type": "array"}}}),
)


@dataclass(frozen=True)
class EchoTask:
    """turns: how many replies end the episode.  faults: "reset" or "step" breaks it there."""

    id: str
    turns: int = 3
    fault: str = ""


class EchoEnv:
    """Answers whatever is said with a checksum of it, some of it long; stops after its turns."""

    tools = TOOLS

    def __init__(self, stubborn=False):
        self.stubborn = stubborn
        self.closed = False
        self.replies = []

    def reset(self, task):
        if task.fault == "reset":
            raise RuntimeError("no workbook")
        self.task = task
        return [Message("system", "Echo."), Message("user", f"What about {task.id}?")]

    def step(self, reply):
        self.replies.append(reply)
        if self.task.fault == "step" and len(self.replies) == 2:
            raise RuntimeError("sandbox died")
        if len(self.replies) >= self.task.turns:
            return Step((), True, "answered")
        if reply.stop_reason == "length" and not self.stubborn:
            return Step((), True, "length")
        sign = zlib.crc32(reply.content.encode("utf-8", "replace"))
        return Step((Message("tool", f"{sign % 1000} " * (1 + sign % 5)),), False)

    def score(self):
        total = sum(zlib.crc32(r.content.encode("utf-8", "replace")) for r in self.replies)
        return Score(total % 100 / 100, {"correct": total % 100 / 100}, {"task": self.task.id})

    def close(self):
        self.closed = True


@pytest.fixture(scope="session")
def tiny_model(tokenizer):
    from fastask_jax.model import ModelConfig

    return ModelConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        num_layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        initializer_range=0.3,
    )


@pytest.fixture(scope="session")
def tiny_params(tiny_model):
    import jax

    from fastask_jax.model import init_params

    return init_params(tiny_model, jax.random.key(0))


@pytest.fixture(scope="session")
def echo():
    """The echo environment: `echo.Env`, `echo.Task`, `echo.TOOLS`."""
    return SimpleNamespace(Env=EchoEnv, Task=EchoTask, TOOLS=TOOLS)
