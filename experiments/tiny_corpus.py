"""Transcripts of the noisy explorer, and the tokenizer that is trained on them.

A transcript is a list of pieces (text, sampled?): exactly the pieces that a rollout encodes
one by one, so that pre-training and rollouts see the same ids.  Python runs in this process
without the sandbox: the code comes from `envs.fast_ask.programs`, not from a model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from envs.core import Message, Reply, ToolCall
from envs.fast_ask import FAMILIES, StreamConfig, TaskStream, build_workbook, vocab
from envs.fast_ask.env import NO_OUTPUT, FastAskConfig, opening
from envs.fast_ask.sheets import COLORS
from envs.fast_ask.tasks import Task
from envs.fast_ask.tools import TOOLS, Toolbox
from envs.sandbox.child import Interpreter
from fastask_jax.policies.explorer import ExplorerPolicy

Piece = tuple[str, bool]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# Years, month and day parts, two-digit groups, capitalised words and the left halves of ranges
# stand alone, so that a value is the same few tokens in a question, a cell, code and an answer.
# All other runs, blanks included, may merge: code and wordings come out short.
SPLIT = (
    r"![A-Z]{1,3}[0-9]{0,7}:|20[0-9]{2}(?=-)|-[0-9]{2}(?![0-9])|[0-9]{1,2}"
    r"|[A-Z][A-Za-z]*|[^A-Z0-9]+"
)


def _call_text(call: ToolCall) -> str:
    lines = [f"<tool_call>\n<function={call.name}>\n"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join(lines) + "</function>\n</tool_call>"


def reply_text(reply: Reply) -> str:
    """What the policy would have sampled, without the closing <|im_end|>."""
    calls = "\n".join(map(_call_text, reply.tool_calls))
    return f"{reply.content}\n\n{calls}" if reply.content and calls else reply.content + calls


def prompt_text(messages: list[Message]) -> str:
    turns = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
    return f"{turns}<|im_start|>assistant\n"


def observation_text(texts: list[str]) -> str:
    body = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
    return f"\n<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"


def explore(task: Task, policy: ExplorerPolicy, config: FastAskConfig) -> list[Piece]:
    """One episode of the explorer as pieces; the last turn ends with <|im_end|>."""
    # A session's interpreter takes the process over, as its own process may; lend it this one.
    main, streams = sys.modules["__main__"], (sys.stdin, sys.stdout, sys.stderr)
    interpreter = Interpreter(soft_seconds=2.0, output_chars=10_000)
    sys.modules["__main__"] = main

    def python(code: str) -> str:
        try:
            result = interpreter.run(code)
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
        output = result["output"].rstrip("\n")
        if result["error"] is None:
            return output or NO_OUTPUT
        return f"{output}\nerror: {result['error']}".lstrip("\n")

    def bind(sheet: str, top: int, left: int, rows: list[list]) -> None:
        interpreter._bindings.bind(sheet, top, left, rows)
        interpreter._space.update(interpreter._bindings.namespace)

    book = build_workbook(task)
    box = Toolbox(book, python, bind)
    messages = opening(task.question, book.names(), config)
    pieces: list[Piece] = [(prompt_text(messages), False)]
    reply = policy.start(messages, TOOLS, task)
    for _ in range(config.max_turns):
        pieces.append((reply_text(reply) + "<|im_end|>", True))
        if not reply.tool_calls:
            break
        texts = [box.call(call) for call in reply.tool_calls]
        pieces.append((observation_text(texts), False))
        reply = policy.reply(tuple(Message("tool", text) for text in texts))
    return pieces


def transcripts(config: StreamConfig, env: FastAskConfig, start: int = 0) -> Iterator[list[Piece]]:
    """Endless transcripts; number n depends on the configs and n alone."""
    stream = TaskStream(config)
    n = start
    while True:
        policy = ExplorerPolicy(Random(f"explorer/{config.seed}/{n}"))
        yield explore(stream.task(n), policy, env)
        n += 1


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE; all vocabulary words and two-digit groups become single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=48,
        show_progress=False,
    )

    # Trained on what lies between special tokens: merges must never spell one.
    between = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))

    def with_words() -> Iterator[str]:
        for _ in range(400):
            yield from must_be_tokens()
        for text in texts:
            yield from between.split(text)

    tokenizer.train_from_iterator(with_words(), trainer)
    return tokenizer


def must_be_tokens() -> list[str]:
    """Values that a policy has to copy: each is one token."""
    words = [w for name in dir(vocab) if name.isupper() for w in getattr(vocab, name) if
             isinstance(w, str) and w.isalpha() and w[0].isupper()]  # fmt: skip
    words += [f"{n:02d}" for n in range(100)] + [str(n) for n in range(10)]
    words += [color for color in COLORS if color]
    words += [f"-{n:02d}" for n in range(1, 32)] + [f"{year}-" for year in range(2022, 2028)]
    return sorted(set(words) - set(FAMILIES))
