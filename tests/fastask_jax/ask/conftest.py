"""A small workbook file, a policy that has learned one transcript about it by heart (real
weights, real decoding), and one with random weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.workbook import Sheet, Workbook, write_xlsx

QUESTION = "How many units did West order?"
SHEETS = {
    "Orders": [("order", "region", "units"), ("SO-1", "West", 12), ("SO-2", "East", 7),
               ("SO-3", "West", 30)],
    "Notes and Plans": [("note",), ("nothing to see",)],
}  # fmt: skip
CODE = 'print(sum(o.units for o in Orders if o.region=="West"))'


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("books") / "orders.xlsx"
    sheets = [Sheet(name, dict(enumerate(rows, 1))) for name, rows in SHEETS.items()]
    write_xlsx(Workbook(sheets), path)
    return str(path)


@pytest.fixture(scope="session")
def small():
    """A config for the shipped tokenizer that compiles fast and learns by heart in no time."""
    from fastask_jax.model import PRESETS

    return replace(
        PRESETS["tiny"],
        num_layers=1,
        mixers=("full_attention",),
        hidden_size=64,
        head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
    )


@pytest.fixture(scope="session")
def blank(small, tmp_path_factory) -> Path:
    """A policy folder with random weights."""
    import jax

    from fastask_jax.ask.checkpoint import SHIPPED
    from fastask_jax.model import init_params, save_params
    from fastask_jax.model.tokenizers import load_tokenizer

    folder = tmp_path_factory.mktemp("blank") / "policy"
    tokenizer = load_tokenizer(SHIPPED)
    params = init_params(small, jax.random.key(0))
    save_params(folder, small, params, extras=tokenizer.save_pretrained)
    return folder


def transcript(book: str) -> tuple[list[int], list[bool]]:
    """Ids of an episode that reads a range twice, computes and answers; and which were said."""
    from envs.core import Message, Reply, ToolCall
    from envs.fast_ask.env import FastAskConfig, FastAskEnv
    from envs.sandbox import Sandbox
    from envs.workbook import read_workbook
    from fastask_jax.ask.checkpoint import SHIPPED
    from fastask_jax.model.tokenizers import load_tokenizer
    from fastask_jax.rollout.chat import ChatFormat

    chat = ChatFormat(load_tokenizer(SHIPPED))
    read = ToolCall("read_ranges", {"ranges": ["Orders!A:C", "'Notes and Plans'!A1"], "show": 0})
    again = ToolCall("read_ranges", {"ranges": ["Orders!A:C"], "show": 0})
    turns = [(read,), (again, ToolCall("run_python", {"code": CODE})), ()]
    with Sandbox() as sandbox:
        env = FastAskEnv(FastAskConfig(prompt="short"), sandbox)
        ids = chat.encode_prompt(env.ask(read_workbook(book), QUESTION))
        said = [False] * len(ids)
        for calls in turns:
            text = "" if calls else "ANSWER: 42"
            reply = chat.encode_reply(Message("assistant", text, calls))
            step = env.step(Reply(text, calls))
            shown = [] if step.done else chat.encode_observation(step.messages)
            assert step.done or "error" not in step.messages[-1].content
            ids += reply + shown
            said += [True] * len(reply) + [False] * len(shown)
        env.close()
    return ids, said


@pytest.fixture(scope="session")
def taught(small, book, tmp_path_factory) -> Path:
    """A run directory whose policy knows the transcript of `QUESTION` by heart."""
    import jax
    import jax.numpy as jnp
    import optax

    from fastask_jax.ask.checkpoint import SHIPPED
    from fastask_jax.model import forward, init_params, save_params, unembedding
    from fastask_jax.model.tokenizers import load_tokenizer

    ids, said = transcript(book)
    tokens = jnp.asarray([ids])
    mask = jnp.asarray([said[1:]])

    def loss(params):
        hidden, _ = forward(
            small, params, tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens)
        )
        logprobs = jax.nn.log_softmax(hidden[:, :-1] @ unembedding(params))
        chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
        return -jnp.min(jnp.where(mask, chosen, 0)), -jnp.sum(chosen * mask) / mask.sum()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        grads, worst = jax.grad(lambda p: loss(p)[::-1], has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, worst

    params = init_params(small, jax.random.key(1))
    state = optimizer.init(params)
    for _ in range(200):
        params, state, worst = step(params, state)
        if worst < 0.1:
            break
    assert worst < 0.1
    run = tmp_path_factory.mktemp("taught")
    tokenizer = load_tokenizer(SHIPPED)
    save_params(run / "policy", small, params, extras=tokenizer.save_pretrained)
    asked = {"prompt": "short", "list_sheets": True, "max_turns": 15, "max_calls": 4}
    config = {"env": asked, "rollout": {"tools_in_prompt": False}}
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.fixture
def home(tmp_path_factory, monkeypatch):
    """A home folder of the tests' own, and JAX's compile cache as it was afterwards."""
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.getbasetemp() / "home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(folder))
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def asked():
    return SimpleNamespace(question=QUESTION, evidence=["Orders!A1:C4", "'Notes and Plans'!A1"])
