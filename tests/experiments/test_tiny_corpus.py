"""The tiny base's training data: the same ids as in rollouts, the explorer's shares."""

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from envs.core import Message
from envs.fast_ask import StreamConfig, TaskStream, answers
from envs.fast_ask.env import FastAskConfig, FastAskEnv
from envs.sandbox import Sandbox
from experiments.pretrain_tiny import Config, batches, encode, main, value_ids
from experiments.tiny_corpus import explore, must_be_tokens, transcripts
from fastask_jax.learn.checkpoint import Checkpointer
from fastask_jax.model import load_params
from fastask_jax.model.tokenizers import TINY, TOKENIZERS, load_tokenizer
from fastask_jax.policies.explorer import ExplorerPolicy
from fastask_jax.rollout.chat import ChatFormat

ENV = FastAskConfig(prompt="short")


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer(TOKENIZERS / TINY))


def test_pieces_are_the_ids_that_a_rollout_sees(chat):
    """Plays the explorer in the real environment and encodes every turn as a rollout does."""
    stream = TaskStream(StreamConfig(seed=3))
    with Sandbox() as sandbox:
        env = FastAskEnv(ENV, sandbox)
        for n in range(40):
            task = stream.task(n)
            pieces = explore(task, ExplorerPolicy(Random(n)), ENV)
            ids, sampled = encode(chat.tokenizer.backend_tokenizer, pieces)
            policy = ExplorerPolicy(Random(n))
            messages = env.reset(task)
            expected, mask = list(chat.encode_prompt(messages)), []
            mask += [False] * len(expected)
            reply = policy.start(messages, env.tools, task)
            while True:
                said = chat.encode_reply(
                    Message("assistant", reply.content, reply.tool_calls)
                )
                expected += said
                mask += [True] * len(said)
                step = env.step(reply)
                if step.done:
                    break
                seen = chat.encode_observation(step.messages)
                expected += seen
                mask += [False] * len(seen)
                reply = policy.reply(step.messages)
            assert ids.tolist() == expected, task.id
            assert sampled.tolist() == mask
        env.close()


def test_what_the_explorer_says_parses_back(chat):
    for n, pieces in enumerate(islice(transcripts(StreamConfig(seed=4), ENV), 30)):
        for text, sampled in pieces:
            if sampled:
                reply = chat.parse_reply(text.removesuffix("<|im_end|>"))
                assert all(call.error is None for call in reply.tool_calls), (n, text)
                assert reply.tool_calls or answers.last_answer(text) or "The answer is" in text


def test_the_explorer_is_right_in_about_three_of_ten():
    stream, right = TaskStream(StreamConfig(seed=5)), 0
    for n in range(280):
        task = stream.task(n)
        final = explore(task, ExplorerPolicy(Random(n)), ENV)[-1][0].removesuffix("<|im_end|>")
        right += answers.is_right(answers.last_answer(final), task.truth, task.answer_type)
    assert 0.2 < right / 280 < 0.42


def test_values_are_single_tokens(chat):
    backend = chat.tokenizer.backend_tokenizer
    split = [w for w in must_be_tokens() if len(backend.encode(w).ids) > 1 and w.isalpha()]
    assert split == []
    assert len(value_ids(backend)) > 300


def test_batches_are_reproducible_and_hold_what_they_say():
    config = Config(rows=4, transcripts=9, drill_from=0, drill_to=2)
    first, again = (list(islice(batches(config, start), 2)) for start in (1, 2))
    drilled, plain = first
    assert all((plain[k] == again[0][k]).all() for k in plain)
    for batch in (drilled, plain):
        places = batch["predict"][batch["weights"] > 0]
        segments = batch["segments"].reshape(-1)
        assert len(set(places.tolist())) == len(places) > 100
        assert (segments[places] == segments[places + 1]).all() and (segments[places] > 0).all()


def test_transcripts_follow_from_their_number():
    stream = list(islice(transcripts(StreamConfig(seed=6), ENV), 6))
    assert list(islice(transcripts(StreamConfig(seed=6), ENV, 4), 2)) == stream[4:]




@pytest.mark.slow
def test_pretraining_goes_on_where_it_stopped(tmp_path):
    config = Config(run_dir=tmp_path, rows=1, transcripts=3, tokens=512 * 3, save_every=2)
    assert main(config) == 0
    assert Checkpointer(tmp_path).steps() == [2, 3]
    assert main(replace(config, tokens=512 * 4)) == 0
    assert Checkpointer(tmp_path).latest() == 4
    assert main(replace(config, export=tmp_path / "policy")) == 0
    model, params = load_params(tmp_path / "policy")
    assert params["embedding"].shape == (model.vocab_size, model.hidden_size)


def test_export_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        main(Config(run_dir=tmp_path, export=tmp_path / "policy"))


def test_no_training_run_is_replaced(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(FileExistsError, match="holds an earlier run: give another --run-dir"):
        main(Config(run_dir=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": float("nan")}, {"warmup_steps": 0}, {"decay": 2.0}, {"rows": 0}]
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} (must be|is a share)"):
        Config(**wrong)
