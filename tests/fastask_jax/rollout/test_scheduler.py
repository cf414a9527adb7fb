import dataclasses
import json
import random

import jax
import numpy as np
import pytest

from envs.core import Step
from fastask_jax.learn.packing import PackConfig, pack
from fastask_jax.learn.score import make_scorer
from fastask_jax.rollout.engine import Engine, EngineConfig
from fastask_jax.rollout.pools import InlinePool
from fastask_jax.rollout.scheduler import RolloutConfig, RolloutStats, Scheduler, rollout

SHORT = RolloutConfig(max_turn_tokens=12, max_tokens=60)




class LatePool(InlinePool):
    """Hands out events late, out of order, and a few at a time."""

    def __init__(self, make, seed):
        super().__init__(make)
        self.random = random.Random(seed)
        self.held = []

    def poll(self, timeout=None):
        self.held += super().poll()
        self.random.shuffle(self.held)
        count = self.random.randint(0 if timeout == 0.0 else 1, max(1, len(self.held)))
        events, self.held = self.held[:count], self.held[count:]
        return events

    def drop(self, episode_id):
        self.held = [e for e in self.held if e.episode_id != episode_id]
        super().drop(episode_id)


def tasks_of(echo, count=4):
    return [echo.Task(f"task-{i}", turns=1 + i % 4) for i in range(count)]


def run(engine, params, chat, echo, tasks, group=3, pool=None, config=SHORT, **options):
    pool = pool or InlinePool(lambda _: echo.Env())
    options = {"seed": 0, "tools": echo.TOOLS, **options}
    return rollout(engine, params, 7, tasks, group, pool, chat, config=config, **options)


def content(trajectories):
    """All that must not depend on timing."""
    return [
        (
            t.task_id,
            t.group,
            t.sample,
            t.ids.tolist(),
            t.mask.tolist(),
            t.logprobs.tolist(),
            t.versions.tolist(),
            t.spans,
            t.score,
            t.stop_reason,
            t.error,
        )
        for t in trajectories
    ]


def test_more_episodes_than_slots_in_order(engine, params, chat, echo):
    tasks, finished = tasks_of(echo, 5), []
    stats = RolloutStats()
    pool = InlinePool(lambda _: echo.Env(stubborn=True))
    trajectories = run(
        engine, params, chat, echo, tasks, pool=pool, on_finish=finished.append, stats=stats
    )
    places = [(group, copy) for group in range(5) for copy in range(3)]
    assert [(t.group, t.sample) for t in trajectories] == places
    assert sorted(map(id, finished)) == sorted(map(id, trajectories))
    for trajectory in trajectories:
        assert trajectory.valid
        assert trajectory.stop_reason == "answered"
        assert trajectory.turns == tasks[trajectory.group].turns
        assert set(trajectory.versions[trajectory.mask]) == {7}
    assert len({tuple(t.ids.tolist()) for t in trajectories}) == 15
    assert stats.sampled_tokens == sum(t.sampled for t in trajectories)
    # one prompt per group is fed, the other copies take its state
    assert stats.shared_tokens > stats.prompt_tokens
    assert 0 < stats.occupancy <= 1
    assert stats.stop_reasons == {"answered": 15}


def test_turns_extend_each_other_and_only_sampled_tokens_have_the_mask(
    engine, params, chat, echo
):
    pool = InlinePool(lambda _: echo.Env(stubborn=True))
    for trajectory in run(engine, params, chat, echo, tasks_of(echo), pool=pool):
        kinds = [span.kind for span in trajectory.spans]
        assert kinds == ["prompt", *["reply", "observation"] * (trajectory.turns - 1), "reply"]
        mask = np.zeros(len(trajectory), bool)
        for span in trajectory.spans:
            ids = trajectory.span_ids(span)
            if span.kind == "reply":
                mask[span.start : span.end] = True
                assert 1 <= len(ids) <= SHORT.max_turn_tokens
                cut = ids[-1] != chat.stop_id
                assert cut == (len(ids) == SHORT.max_turn_tokens) or not cut
            elif span.kind == "observation":
                # the stop token of a cut turn isn't sampled: it belongs to the observation
                assert (ids[0] == chat.stop_id) == cut
                text = chat.decode(ids).removeprefix("<|im_end|>")
                assert text.startswith("\n<|im_start|>user\n<tool_response>\n")
                assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
        assert (trajectory.mask == mask).all()


@pytest.mark.parametrize("seed", range(4))
def test_late_and_shuffled_tool_results_change_no_bit(engine, params, chat, echo, seed):
    tasks = tasks_of(echo, 6)
    expected = content(run(engine, params, chat, echo, tasks))
    pool = LatePool(lambda _: echo.Env(), seed)
    assert content(run(engine, params, chat, echo, tasks, pool=pool)) == expected


def test_feeding_a_call_at_a_time_changes_no_bit(engine, params, chat, echo, monkeypatch):
    """Some slots decode while others' text is still on its way."""
    tasks = tasks_of(echo, 6)
    expected = content(run(engine, params, chat, echo, tasks))
    config = dataclasses.replace(engine.config, append_calls=1)
    monkeypatch.setattr(engine, "config", config)
    unfinished, start = 0, Engine.start

    def spied(self, params, turns, temperature):
        nonlocal unfinished
        unfinished += len(turns) < 6
        return start(self, params, turns, temperature)

    monkeypatch.setattr(Engine, "start", spied)
    assert content(run(engine, params, chat, echo, tasks)) == expected
    assert unfinished > 3


def test_company_changes_no_bit(engine, params, chat, echo):
    tasks = tasks_of(echo, 6)
    together = content(run(engine, params, chat, echo, tasks))
    for index in (1, 4):
        [alone] = [
            t
            for t in run(engine, params, chat, echo, [tasks[index]], group=2)
            if t.sample == 1
        ]
        found = content([dataclasses.replace(alone, group=index)])[0]
        assert found == together[3 * index + 1]


def test_seed_task_and_copy_decide_what_is_sampled(engine, params, chat, echo):
    task = echo.Task("same", turns=2)
    first = run(engine, params, chat, echo, [task, task], group=2, seed="0/1")
    again = run(engine, params, chat, echo, [task, task], group=2, seed="0/1")
    other = run(engine, params, chat, echo, [task, task], group=2, seed="0/2")
    assert content(first) == content(again)
    ids = {tuple(t.ids.tolist()) for t in first + other}
    assert len(ids) == 8


def test_sampler_logprobs_are_the_learners(engine, model, params, chat, echo):
    for temperature in (1.0, 0.7):
        config = dataclasses.replace(SHORT, temperature=temperature)
        pool = InlinePool(lambda _: echo.Env(stubborn=True))
        trajectories = run(
            engine, params, chat, echo, tasks_of(echo), pool=pool, config=config
        )
        packed = pack(trajectories, PackConfig(row_lengths=(256, 512), micro_batch_rows=2))
        score = make_scorer(model, micro_batch_rows=2)
        logprobs, _ = score(params, packed, temperature)
        gaps = [
            np.abs(learned - t.logprobs)[t.mask].max()
            for learned, t in zip(packed.unpack(logprobs), trajectories, strict=True)
        ]
        assert max(t.turns for t in trajectories) == 4
        assert max(gaps) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("append_calls", [None, 1])
def test_weights_may_change_under_running_episodes(
    engine, params, model, chat, echo, monkeypatch, append_calls
):
    """Each token's logprob is the learner's under the version that made it, although weights
    change several times within turns, while prompts wait and while tools run."""
    config = dataclasses.replace(engine.config, append_calls=append_calls)
    monkeypatch.setattr(engine, "config", config)
    generations = [jax.tree.map(lambda x, n=n: x * (1 + 0.03 * n), params) for n in range(4)]
    asked = 0

    def newer():
        nonlocal asked
        asked += 1
        version = min(asked // 4, 3)
        return (generations[version], version) if asked % 4 == 0 else None

    stats = RolloutStats()
    pool = LatePool(lambda _: echo.Env(stubborn=True), seed=1)
    trajectories = rollout(
        engine, generations[0], 0, tasks_of(echo, 5), 3, pool, chat,
        seed=0, config=SHORT, tools=echo.TOOLS, newer=newer, stats=stats,
    )  # fmt: skip
    assert stats.refed_tokens > 0
    made = [set(t.versions[t.mask].tolist()) for t in trajectories]
    assert set.union(*made) == {0, 1, 2, 3} and max(map(len, made)) > 1
    packed = pack(trajectories, PackConfig(row_lengths=(256, 512), micro_batch_rows=2))
    score = make_scorer(model, micro_batch_rows=2)
    for version, weights in enumerate(generations):
        logprobs, _ = score(weights, packed, 1.0)
        for learned, t in zip(packed.unpack(logprobs), trajectories, strict=True):
            mine = t.mask & (t.versions == version)
            assert not mine.any() or np.abs(learned - t.logprobs)[mine].max() < 1e-4


@pytest.mark.slow
def test_slots_taken_from_slow_tools_change_no_logprob(engine, params, model, chat, echo):
    """Episodes that lost their slot while their tool ran are read again, also by newer weights,
    and what they sample is scored as the learner scores it."""
    config = dataclasses.replace(SHORT, evict_after=0.0)
    generations = [params, jax.tree.map(lambda x: x * 1.05, params)]
    asked = 0

    def newer():
        nonlocal asked
        asked += 1
        return (generations[1], 1) if asked == 120 else None

    stats = RolloutStats()
    pool = LatePool(lambda _: echo.Env(stubborn=True), seed=2)
    # 201 trajectories: rare meetings of eviction, sharing and the change have room to happen.
    tasks = [echo.Task(f"task-{i}", turns=4) for i in range(67)]
    trajectories = rollout(
        engine, params, 0, tasks, 3, pool, chat,
        seed=0, config=config, tools=echo.TOOLS, newer=newer, stats=stats,
    )  # fmt: skip
    assert stats.evictions > 5 and stats.shared_tokens > 0
    assert all(t.valid and t.turns == 4 for t in trajectories)
    assert set().union(*(t.versions[t.mask].tolist() for t in trajectories)) == {0, 1}
    packed = pack(trajectories, PackConfig(row_lengths=(256, 512), micro_batch_rows=2))
    score = make_scorer(model, micro_batch_rows=2)
    for version, weights in enumerate(generations):
        logprobs, _ = score(weights, packed, 1.0)
        for learned, t in zip(packed.unpack(logprobs), trajectories, strict=True):
            mine = t.mask & (t.versions == version)
            assert not mine.any() or np.abs(learned - t.logprobs)[mine].max() < 1e-4


def test_a_cancelled_group_leaves_no_trace(engine, params, chat, echo):
    """Not in the pool, not in the slots, and not in what the others sample."""
    environments = []

    def make(_):
        environments.append(echo.Env(stubborn=True))
        return environments[-1]

    def trajectories(cancelled):
        pool = InlinePool(make)
        scheduler = Scheduler(engine, pool, chat, SHORT, echo.TOOLS)
        scheduler.set_weights(params, 0)
        groups = [
            scheduler.add(i, echo.Task(f"task-{i}", turns=3), 2, "0")
            for i in range(6 if cancelled else 3)
        ]
        rounds = 0
        while scheduler.unfinished:
            scheduler.round()
            rounds += 1
            if cancelled and rounds == 2:
                for key in (3, 4, 5, 99):
                    scheduler.cancel(key)
        return content(t for group in groups[:3] for t in group.trajectories)

    assert trajectories(cancelled=True) == trajectories(cancelled=False)
    assert all(environment.closed for environment in environments)


def test_what_is_first_goes_first(engine, params, chat, echo):
    scheduler = Scheduler(engine, InlinePool(lambda _: echo.Env(True)), chat, SHORT, echo.TOOLS)
    scheduler.set_weights(params, 0)
    slots = engine.config.slots
    for i in range(3 * slots):
        scheduler.add(i, echo.Task(f"task-{i}", turns=3), 1, "0")
    scheduler.round()
    late = scheduler.add("late", echo.Task("late", turns=3), 1, "0", first=True)
    ended = []
    while late.unfinished:
        ended += scheduler.round().ended
    # Only those that had a slot, or a place before it, can have ended before it.
    assert len(ended) <= 2 * slots
    with pytest.raises(ValueError, match="group 40 is under way already"):
        scheduler.add(40, echo.Task("x"), 1, "0")
        scheduler.add(40, echo.Task("x"), 1, "0")
    scheduler.close()
    assert scheduler.unfinished == 0


def test_greedy_copies_agree(engine, params, chat, echo):
    config = dataclasses.replace(SHORT, temperature=0.0)
    trajectories = run(engine, params, chat, echo, tasks_of(echo, 2), config=config)
    for group in (trajectories[:3], trajectories[3:]):
        assert len({tuple(t.ids.tolist()) for t in group}) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RolloutConfig(max_turn_tokens=8, max_tokens=20), "token_budget"),
        (RolloutConfig(max_turn_tokens=8, max_tokens=10_000), "context"),
        (RolloutConfig(max_turn_tokens=4, max_tokens=10_000, max_turns=3), "max_turns"),
        (RolloutConfig(max_turn_tokens=8, max_tokens=100), "length"),
    ],
)
def test_every_budget_has_its_stop_reason(engine, params, chat, echo, config, reason):
    class Env(echo.Env):
        """Ends when told so by an empty reply, or at a cut turn if it isn't stubborn."""

        def step(self, reply):
            if reply.stop_reason == "length" and (not reply.content or reason == "length"):
                return Step((), True, "length")
            return super().step(reply)

    pool = InlinePool(lambda _: Env(stubborn=True))
    tasks = [echo.Task("long", turns=1000)]
    trajectories = run(engine, params, chat, echo, tasks, group=6, pool=pool, config=config)
    reasons = [t.stop_reason for t in trajectories]
    assert reason in reasons
    assert set(reasons) <= {reason, "length"}
    for trajectory in trajectories:
        assert trajectory.valid
        assert len(trajectory) <= engine.config.max_len
        assert trajectory.sampled <= config.max_tokens
        if reason == "max_turns" and trajectory.stop_reason == reason:
            assert trajectory.turns == 3
        if trajectory.stop_reason == "token_budget":
            assert trajectory.sampled == config.max_tokens


@pytest.mark.parametrize("fault", ["reset", "step"])
def test_environment_faults_are_invalid_never_wrong(engine, params, chat, echo, fault):
    tasks = tasks_of(echo, 3)
    tasks[1] = echo.Task("broken", turns=5, fault=fault)
    environments = []

    def make(_):
        environments.append(echo.Env(stubborn=True))
        return environments[-1]

    healthy = run(
        engine, params, chat, echo, tasks_of(echo, 3), pool=InlinePool(lambda _: echo.Env(True))
    )
    trajectories = run(engine, params, chat, echo, tasks, pool=InlinePool(make))
    for trajectory in trajectories[3:6]:
        assert not trajectory.valid
        assert trajectory.stop_reason == "error"
        assert trajectory.error.startswith("RuntimeError: ")
        assert trajectory.score is None
        assert trajectory.reward == 0.0
        json.dumps(trajectory.to_json(chat))
    others = trajectories[:3] + trajectories[6:]
    assert content(others) == content(healthy[:3] + healthy[6:])
    assert all(environment.closed for environment in environments)


def test_an_environment_that_ignores_the_end_is_an_error(engine, params, chat, echo):
    pool = InlinePool(lambda _: echo.Env(stubborn=True))
    config = RolloutConfig(max_turn_tokens=4, max_turns=2)
    [trajectory] = run(
        engine, params, chat, echo, [echo.Task("x", turns=99)], 1, pool=pool, config=config
    )
    assert not trajectory.valid
    assert "went on after the episode was ended (max_turns)" in trajectory.error


def test_a_silent_pool_is_reported_and_dropped(engine, params, chat, echo):
    class Silent(InlinePool):
        def poll(self, timeout=None):
            return []

    environments = []

    def make(_):
        environments.append(echo.Env())
        return environments[-1]

    config = dataclasses.replace(SHORT, stall_timeout=0.01)
    with pytest.raises(RuntimeError, match="no environment answered for 0.01 s; 3 episodes wait"):
        run(engine, params, chat, echo, tasks_of(echo, 1), pool=Silent(make), config=config)
    assert environments
    assert all(environment.closed for environment in environments)


def test_episodes_without_a_slot_wait_for_events_and_stall_with_the_rest(
    engine, params, chat, echo
):
    """All slots wait for their tools while more episodes are ready: no spinning, no hang."""

    class Mute(InlinePool):
        resets, waits = 12, 0

        def poll(self, timeout=None):
            events = super().poll()
            if self.resets > 0:  # the answers to resets come, those to steps never do
                self.resets -= len(events)
                return events
            if timeout == 0.0:
                self.waits += 1
                assert self.waits < 20, "polls without waiting, and for ever"
            return []

    pool = Mute(lambda _: echo.Env(stubborn=True))
    tasks = [echo.Task(f"task-{i}", turns=9) for i in range(6)]
    config = dataclasses.replace(SHORT, stall_timeout=0.01)
    with pytest.raises(RuntimeError, match="no environment answered for 0.01 s"):
        run(engine, params, chat, echo, tasks, group=2, pool=pool, config=config)


def test_misuse_gets_a_clear_error(engine, model, params, chat, echo):
    with pytest.raises(ValueError, match="group_size must be at least 1"):
        run(engine, params, chat, echo, tasks_of(echo), group=0)
    small = Engine(model, EngineConfig(slots=1, max_len=16), chat.stop_id)
    with pytest.raises(ValueError, match="raise EngineConfig.max_len"):
        run(small, params, chat, echo, tasks_of(echo))
    other = Engine(model, EngineConfig(slots=1, max_len=16), chat.stop_id - 1)
    with pytest.raises(ValueError, match="chat ends turns at"):
        run(other, params, chat, echo, tasks_of(echo))
    for name, value in [("temperature", -1.0), ("max_tokens", 0), ("max_turns", 0)]:
        with pytest.raises(ValueError, match=name):
            RolloutConfig(**{name: value})
    assert run(engine, params, chat, echo, []) == []


def test_a_run_compiles_each_function_a_few_times(engine, params, chat, echo):
    run(engine, params, chat, echo, tasks_of(echo))
    before = dict(engine.traces)
    for seed in range(3):
        run(engine, params, chat, echo, tasks_of(echo, 2 + seed), group=1 + seed, seed=seed)
    assert dict(engine.traces) == before
    limits = {"append": 2, "share": 1, "decode": 2}  # one per bucket
    assert all(before[name] <= limit for name, limit in limits.items())
