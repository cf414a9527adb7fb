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
from itertools import takewhile
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from envs.core import Message, Reply, ToolCall
from envs.fast_ask import FAMILIES, StreamConfig, TaskStream, build_workbook, vocab
from envs.fast_ask.env import NO_OUTPUT, FastAskConfig, opening
from envs.fast_ask.programs import source_program
from envs.fast_ask.questions import KINDS, word
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


def recital(rng: Random, config: FastAskConfig) -> list[Piece]:
    """A copying drill: a question with random parameters, code that sets them, an output, and
    the output reported.  All copies and no noise: what a tiny model is slowest to learn."""
    kind = rng.choice([k for k in KINDS.values() if k.name in _SLOTS])
    ask = {key: _random_value(rng, key) for key in _SLOTS[kind.name]}
    if kind.name in ("open_balance", "paid_by", "paid_on"):
        by = rng.choice(tuple(_REFERENCES))
        ask |= {"by": by} | {key: _random_value(rng, key) for key in _REFERENCES[by]}
    if kind.name == "payment_invoice":
        by = rng.choice(("id", "payment"))
        keys = ("payment",) if by == "id" else _REFERENCES["payment"]
        ask = {"by": by} | {key: _random_value(rng, key) for key in keys}
    program = source_program(kind.name, ask).code.splitlines()
    code = "\n".join([*takewhile(_is_assignment, program), "print(n)"])
    output = _random_value(rng, rng.choice(("customer", "amount", "invoice", "due", "row")))
    messages = opening(word(kind, ask, rng.randrange(3)), ["Orders", "Notes"], config)
    return [
        (prompt_text(messages), False),
        (_call_text(ToolCall("run_python", {"code": code})) + "<|im_end|>", True),
        (observation_text([str(output)]), False),
        (f"ANSWER: {output}<|im_end|>", True),
    ]


_SLOTS = {
    "region_net": ("region", "first", "last"),
    "tier_usd": ("tier", "first", "last"),
    "top_customer": ("first", "last"),
    "region_target": ("region", "month"),
    "first_month": ("start", "amount"),
    "open_balance": ("date",),
    "payment_invoice": (),
    "paid_by": ("date",),
    "paid_on": (),
    "duplicate_row": (),
    "category_spend": ("category", "first", "last"),
    "top_vendor": ("first", "last"),
    "over_budget": ("department", "first", "last"),
}
_REFERENCES = {
    "id": ("invoice",),
    "payment": ("source", "method", "paid", "amount"),
    "signature": ("customer", "month", "amount", "due"),
}


def _is_assignment(line: str) -> bool:
    return re.fullmatch(r'[a-z]=("[^"]*"|\d+)', line) is not None


def _random_value(rng: Random, key: str) -> object:
    words = {
        "region": vocab.REGIONS,
        "tier": vocab.TIERS,
        "category": vocab.CATEGORIES,
        "department": vocab.DEPARTMENTS,
        "customer": vocab.CUSTOMERS + vocab.VENDORS,
        "method": vocab.METHODS,
        "source": vocab.SOURCES,
    }
    if key in words:
        return rng.choice(words[key])
    if key == "amount":
        return rng.randrange(10 ** rng.randint(2, 4), 100_000)
    if key in ("invoice", "payment"):
        return f"{'INV-' if key == 'invoice' else 'P'}{rng.randrange(100, 1000)}"
    if key == "row":
        return f"{rng.choice(('Payments', 'Ledger'))}!{rng.randint(2, 60)}"
    month = f"{rng.randint(2022, 2026)}-{rng.randint(1, 12):02d}"
    return f"{month}-{rng.randint(1, 28):02d}" if key in ("date", "due", "paid") else month


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
