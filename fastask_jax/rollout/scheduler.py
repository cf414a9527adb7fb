"""Rollouts: weights and environments into trajectories.

More episodes than slots are fine: an episode is admitted when its group's environments are
ready and a slot is free.  There is no barrier: a turn that ends goes to the environment pool,
the other slots decode on, and the slot goes on when its tool result is back.

What a trajectory contains depends on the weights, the seed and its task alone, not on slots,
batch company or how long tools took; the result is ordered by task and sample.  An episode
whose environment fails is kept as an invalid trajectory, never scored as a wrong answer.

Weights may change between two decode calls.  Running episodes go on with the new ones, each token
keeping the version that made it; their slots are fed anew first, as a state made by other weights
would give logprobs that belong to neither.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.core import Message, Reply, ToolSpec
from envs.pool import Event
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, Params, Turn
from fastask_jax.rollout.pools import Pool
from fastask_jax.rollout.sampling import episode_key
from fastask_jax.rollout.settings import RolloutConfig, RolloutStats
from fastask_jax.rollout.transcript import Trajectory

__all__ = ["RolloutConfig", "RolloutStats", "rollout"]


@dataclass(eq=False)
class _Episode:
    """One copy of a task on its way through the slots."""

    id: str
    task: Any
    trajectory: Trajectory
    key: Any
    group: _Group
    began: float = 0.0
    messages: tuple[Message, ...] = ()
    prompt: list[int] | None = None
    slot: int | None = None
    turn: list[int] = field(default_factory=list)
    ended: str | None = None  # why the last turn ended: "stop" or the binding budget
    closing: str | None = None  # the scheduler's own stop reason, once it has ended the episode


@dataclass(eq=False)
class _Group:
    episodes: list[_Episode] = field(default_factory=list)
    resetting: int = 0


def rollout(
    engine: Engine,
    params: Params,
    version: int,
    tasks: Sequence[Any],
    group_size: int,
    pool: Pool,
    chat: ChatFormat,
    *,
    seed: int | str,
    config: RolloutConfig | None = None,
    tools: Sequence[ToolSpec] = (),
    on_finish: Callable[[Trajectory], None] | None = None,
    newer: Callable[[], tuple[Params, int] | None] = lambda: None,
    stats: RolloutStats | None = None,
) -> list[Trajectory]:
    """Runs `group_size` episodes of each task; returns them ordered by task, then sample.

    A task's `id` attribute (else its place in `tasks`) names it; with `seed` it decides what is
    sampled, so pass a new seed for each training step.  `tools` gives parameter types for
    parsing (and the prompt's tool block, if the config asks).  `on_finish` is called once per
    trajectory, in the order in which they end.  `newer` is asked before each decode call for
    weights to go on with, and their version; None keeps those it has.

    Raises ValueError for a prompt that leaves no room in a slot, RuntimeError when no event
    comes for `stall_timeout`, and whatever the pool raises.  Live episodes are dropped then.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}")
    if chat.stop_id != engine.stop_id:
        raise ValueError(f"chat ends turns at {chat.stop_id}, the engine at {engine.stop_id}")
    run = _Rollout(engine, params, version, pool, chat, config or RolloutConfig(), tools)
    run.stats = stats if stats is not None else RolloutStats()
    run.on_finish, run.newer = on_finish, newer
    run.plan(tasks, group_size, seed)
    try:
        return run.run()
    finally:
        for episode_id in list(run.live):
            pool.drop(episode_id)


class _Rollout:
    """The state of one call of `rollout`."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        pool: Pool,
        chat: ChatFormat,
        config: RolloutConfig,
        tools: Sequence[ToolSpec],
    ) -> None:
        self.engine, self.params, self.version = engine, params, version
        self.pool, self.chat, self.config, self.tools = pool, chat, config, tools
        self.stats = RolloutStats()
        self.on_finish: Callable[[Trajectory], None] | None = None
        self.newer: Callable[[], tuple[Params, int] | None] = lambda: None
        self.episodes: list[_Episode] = []
        self.groups: deque[_Group] = deque()
        self.ready: deque[_Episode] = deque()
        self.live: dict[str, _Episode] = {}
        self.free = list(range(engine.config.slots))[::-1]
        self.running: dict[int, _Episode] = {}
        self.observed: dict[int, list[int]] = {}
        self.made_by: dict[int, int] = {}  # slot -> version of the weights that fed it
        self.unfinished = 0

    def plan(self, tasks: Sequence[Any], group_size: int, seed: int | str) -> None:
        seen: Counter[str] = Counter()
        for index, task in enumerate(tasks):
            name = str(getattr(task, "id", index))
            occurrence = seen[name]
            seen[name] += 1
            group = _Group()
            for copy in range(group_size):
                key = episode_key(seed, name, occurrence, copy)
                trajectory = Trajectory(name, index, copy, task)
                episode_id = f"{seed}/{name}/{occurrence}/{copy}"
                group.episodes.append(_Episode(episode_id, task, trajectory, key, group))
            self.groups.append(group)
            self.episodes.extend(group.episodes)
        self.unfinished = len(self.episodes)

    def run(self) -> list[Trajectory]:
        began = time.perf_counter()
        while self.unfinished:
            self._start_groups()
            self._take_events()
            self.params, self.version = self.newer() or (self.params, self.version)
            self._admit()
            self._feed_again()
            self._feed_observations()
            if self.running:
                self._decode()
        self.stats.seconds += time.perf_counter() - began
        return [episode.trajectory for episode in self.episodes]

    # -- environments -----------------------------------------------------------------------

    def _start_groups(self) -> None:
        """Resets the environments of the next groups, at most one group ahead of the slots."""
        while self.groups and len(self.live) < self.engine.config.slots + len(
            self.groups[0].episodes
        ):
            group = self.groups.popleft()
            group.resetting = len(group.episodes)
            for episode in group.episodes:
                episode.began = time.perf_counter()
                self.live[episode.id] = episode
                self.pool.reset(episode.id, episode.task)

    def _take_events(self) -> None:
        # A ready episode without a free slot has to wait for events as well.
        busy = bool(self.running or self.observed or (self.ready and self.free))
        began = time.perf_counter()
        events = self.pool.poll(0.0 if busy else self.config.stall_timeout)
        for event in events:
            self._handle(self.live[str(event.episode_id)], event)
        self.stats.pool_seconds += time.perf_counter() - began
        if not (busy or events):
            waiting = sorted(self.live)
            raise RuntimeError(
                f"no environment answered for {self.config.stall_timeout:g} s; {len(waiting)} "
                f"episodes wait, the first is {waiting[0] if waiting else 'none'}"
            )

    def _handle(self, episode: _Episode, event: Event) -> None:
        if episode.prompt is None:
            self._handle_reset(episode, event)
        elif event.error is not None:
            self._finish(episode, "error", error=event.error)
        elif event.step is not None and event.step.done:
            episode.trajectory.score = event.score
            self._finish(episode, episode.closing or self._stop_reason(episode, event))
        elif episode.closing is not None:
            self._finish(
                episode,
                episode.closing,
                error=f"the environment went on after the episode was ended ({episode.closing})",
            )
        else:
            self._observe(episode, event)

    def _handle_reset(self, episode: _Episode, event: Event) -> None:
        group = episode.group
        group.resetting -= 1
        if event.error is not None:
            self._finish(episode, "error", error=event.error)
        else:
            shown = self.tools if self.config.tools_in_prompt else None
            first = next((e for e in group.episodes if e.prompt is not None), None)
            if first is not None and first.prompt and first.messages == event.messages:
                prompt = first.prompt
            else:
                prompt = self.chat.encode_prompt(event.messages, shown)
            episode.prompt, episode.messages = prompt, event.messages
            if len(prompt) >= self.engine.config.max_len:
                raise ValueError(
                    f"the prompt of task {episode.trajectory.task_id} has {len(prompt)} tokens "
                    f"and a slot holds {self.engine.config.max_len}: raise EngineConfig.max_len"
                )
        # Together, so that the whole group shares one prefill.
        if group.resetting == 0:
            self.ready.extend(e for e in group.episodes if e.prompt is not None)

    def _stop_reason(self, episode: _Episode, event: Event) -> str:
        """The binding budget where one cut the last turn, else what the environment says."""
        if episode.ended in ("token_budget", "context"):
            return episode.ended
        return (event.step.stop_reason if event.step else None) or "answered"

    def _observe(self, episode: _Episode, event: Event) -> None:
        trajectory, slot = episode.trajectory, self._slot(episode)
        ids = self.chat.encode_observation(event.messages)
        if episode.turn[-1] != self.chat.stop_id:
            ids = [self.chat.stop_id, *ids]  # the cut turn still has to end
        # One more token must fit, or there is nothing left to say it in.
        if episode.ended == "context" or len(ids) >= self.engine.room(slot):
            self._end_early(episode, "context")
        elif trajectory.sampled >= self.config.max_tokens:
            self._end_early(episode, "token_budget")
        elif self.config.max_turns is not None and trajectory.turns >= self.config.max_turns:
            self._end_early(episode, "max_turns")
        else:
            trajectory.add_observation(ids)
            self.observed[slot] = ids
            self.stats.observation_tokens += len(ids)
            self._begin_turn(episode)

    def _end_early(self, episode: _Episode, reason: str) -> None:
        """Tells the environment that no more will come, so that it scores what there is."""
        episode.closing = reason
        self.pool.step(episode.id, Reply("", stop_reason="length"))

    def _finish(self, episode: _Episode, reason: str, error: str | None = None) -> None:
        trajectory = episode.trajectory
        trajectory.stop_reason, trajectory.error = reason, error
        if error is None and trajectory.score is None:
            trajectory.error = "the environment ended the episode without a score"
        trajectory.seconds = time.perf_counter() - episode.began
        del self.live[episode.id]
        if error is not None:
            self.pool.drop(episode.id)
        if episode.slot is not None:
            self.free.append(episode.slot)
            episode.slot = None
        self.unfinished -= 1
        self.stats.stop_reasons[reason] += 1
        if self.on_finish is not None:
            self.on_finish(trajectory)

    # -- slots ------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives free slots to ready episodes; equal prompts are fed once and copied."""
        prompts: dict[int, list[int]] = {}
        sources: dict[int, int] = {}
        leaders: dict[tuple[int, ...], int] = {}
        while self.free and self.ready:
            episode = self.ready.popleft()
            assert episode.prompt is not None
            slot = episode.slot = self.free.pop()
            leader = leaders.setdefault(tuple(episode.prompt), slot)
            if leader == slot:
                prompts[slot] = episode.prompt
                self.stats.prompt_tokens += len(episode.prompt)
            else:
                sources[slot] = leader
                self.stats.shared_tokens += len(episode.prompt)
            episode.trajectory.add_prompt(episode.prompt)
            self.made_by[slot] = self.version
            self._begin_turn(episode)
        if prompts:
            began = time.perf_counter()
            self.engine.append(self.params, prompts, fresh=True)
            self.engine.share(sources)
            self.stats.append_seconds += time.perf_counter() - began

    def _feed_again(self) -> None:
        """Gives the slots that are to run and were fed by other weights a state by these."""
        texts = {
            slot: episode.trajectory.ids.tolist()
            for slot, episode in self.running.items()
            if self.made_by[slot] != self.version
        }
        if texts:
            began = time.perf_counter()
            self.engine.append(self.params, texts, fresh=True)
            for slot, ids in texts.items():
                self.observed.pop(slot, None)  # it is part of the text
                self.made_by[slot] = self.version
                self.stats.refed_tokens += len(ids)
            self.stats.append_seconds += time.perf_counter() - began

    def _feed_observations(self) -> None:
        if self.observed:
            began = time.perf_counter()
            self.engine.append(self.params, self.observed)
            self.observed.clear()
            self.stats.append_seconds += time.perf_counter() - began

    def _begin_turn(self, episode: _Episode) -> None:
        episode.turn, episode.ended = [], None
        self.running[self._slot(episode)] = episode

    def _decode(self) -> None:
        began = time.perf_counter()
        row_steps = self.engine.row_steps
        budgets = {slot: self._budget(episode) for slot, episode in self.running.items()}
        turns = {
            slot: Turn(episode.key, budgets[slot][0]) for slot, episode in self.running.items()
        }
        results = self.engine.decode(self.params, turns, self.config.temperature)
        self.stats.decode_seconds += time.perf_counter() - began
        self.stats.rounds += 1
        self.stats.row_steps += self.engine.row_steps - row_steps
        for slot, sampled in results.items():
            episode = self.running[slot]
            episode.trajectory.add_sampled(sampled.ids, sampled.logprobs, self.version)
            episode.turn.extend(sampled.ids)
            self.stats.sampled_tokens += len(sampled.ids)
            if sampled.ended is not None:
                del self.running[slot]
                episode.ended = "stop" if sampled.ended == "stop" else budgets[slot][1]
                self._send(episode)

    def _send(self, episode: _Episode) -> None:
        stop_reason = "stop" if episode.ended == "stop" else "length"
        reply = self.chat.parse_reply(episode.turn, self.tools, stop_reason)
        began = time.perf_counter()
        self.pool.step(episode.id, reply)
        self.stats.pool_seconds += time.perf_counter() - began

    def _budget(self, episode: _Episode) -> tuple[int, str]:
        """Tokens that the running turn may still get, and the budget that says so."""
        return min(
            (self.engine.room(self._slot(episode)), "context"),
            (self.config.max_tokens - episode.trajectory.sampled, "token_budget"),
            (self.config.max_turn_tokens - len(episode.turn), "length"),
            key=lambda pair: pair[0],
        )

    @staticmethod
    def _slot(episode: _Episode) -> int:
        assert episode.slot is not None
        return episode.slot
