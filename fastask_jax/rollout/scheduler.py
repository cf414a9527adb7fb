"""Rollouts: weights and environments into trajectories, without a barrier.

A `Scheduler` is open-ended: groups (the copies of a task) are added and cancelled at any time, new
weights are taken between two decode calls, and each `round` does what can be done now.  A turn
that ends goes to the environment pool, the other slots decode on, and the slot goes on when its
tool result is back.  `rollout` runs one batch of groups to its end.

More episodes than slots are fine: an episode is admitted when its group's environments are
ready and a slot is free, those of groups added with `first` before all others.

What a trajectory contains depends on the weights, the seed and its task alone, not on slots,
batch company or how long tools took.  An episode whose environment fails is kept as an invalid
trajectory, never scored as a wrong answer.

Running episodes go on with new weights, each token keeping the version that made it; their slots
are fed anew first, as a state made by other weights would give logprobs that belong to neither.
The same feeding anew lets a slot be taken from an episode whose tool is slow, where
`RolloutConfig.evict_after` allows it: the one with the fewest tokens loses its slot.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from envs.core import Reply, ToolSpec
from envs.pool import Event
from fastask_jax.rollout.chat import ChatFormat
from fastask_jax.rollout.engine import Engine, Params
from fastask_jax.rollout.episodes import Episode, Group
from fastask_jax.rollout.pools import Pool
from fastask_jax.rollout.sampling import episode_key
from fastask_jax.rollout.settings import RolloutConfig, RolloutStats
from fastask_jax.rollout.slots import EpisodeSlots, Slots
from fastask_jax.rollout.transcript import Trajectory

__all__ = ["Group", "RolloutConfig", "RolloutStats", "Scheduler", "rollout"]


class Round(NamedTuple):
    """Groups that sampled their first token in a round, and those that ended in it."""

    sampled: list[Group]
    ended: list[Group]


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
    run = Scheduler(engine, pool, chat, config, tools, stats)
    run.on_finish = on_finish
    run.set_weights(params, version)
    seen: Counter[str] = Counter()
    began = time.perf_counter()
    groups = []
    for index, task in enumerate(tasks):
        name = str(getattr(task, "id", index))
        groups.append(run.add(index, task, group_size, f"{seed}", occurrence=seen[name]))
        seen[name] += 1
    try:
        while run.unfinished:
            run.round(run.config.stall_timeout, newer)
    finally:
        run.close()
        run.stats.seconds += time.perf_counter() - began
    return [trajectory for group in groups for trajectory in group.trajectories]


class Scheduler:
    """Groups of episodes over the slots of one engine and the environments of one pool.

    engine: an engine, or slots that stand for one elsewhere and have the same config and stats.
    set_weights: before the first round, and whenever there are others.
    unfinished: episodes that were added and have neither ended nor been cancelled.
    """

    def __init__(
        self,
        engine: Engine | EpisodeSlots,
        pool: Pool,
        chat: ChatFormat,
        config: RolloutConfig | None = None,
        tools: Sequence[ToolSpec] = (),
        stats: RolloutStats | None = None,
    ) -> None:
        if chat.stop_id != engine.stop_id:
            raise ValueError(f"chat ends turns at {chat.stop_id}, the engine at {engine.stop_id}")
        self.pool, self.chat, self.tools = pool, chat, tools
        self.config = config or RolloutConfig()
        self.stats = stats if stats is not None else RolloutStats()
        self.on_finish: Callable[[Trajectory], None] | None = None
        self.unfinished = 0
        self._slots: EpisodeSlots = (
            Slots(engine, self.config, self.stats) if isinstance(engine, Engine) else engine
        )
        self._groups: dict[Hashable, Group] = {}
        self._waiting: deque[Group] = deque()  # whose environments aren't started yet
        self._live: dict[str, Episode] = {}
        self._over: list[Episode] = []  # whose turn has ended and isn't sent yet
        self._heard = time.monotonic()
        self._ended: list[Group] = []

    def set_weights(self, params: Params, version: int) -> None:
        """The weights to go on with; `params` must stay as they are until others come."""
        self._slots.params, self._slots.version = params, version

    def add(
        self,
        key: Hashable,
        task: Any,
        copies: int,
        seed: str,
        *,
        occurrence: int = 0,
        first: bool = False,
    ) -> Group:
        """A group of `copies` episodes under a key that no other live group has.

        What is sampled follows from `seed`, the task's `id` (else the key), `occurrence` (for
        tasks that come twice with one seed) and the copy.  Raises ValueError for no copies or a
        key in use.
        """
        if copies < 1:
            raise ValueError(f"group_size must be at least 1, not {copies}")
        if key in self._groups:
            raise ValueError(f"group {key!r} is under way already")
        name = str(getattr(task, "id", key))
        group = self._groups[key] = Group(key, first, unfinished=copies)
        for copy in range(copies):
            place = key if isinstance(key, int) else 0
            group.episodes.append(
                Episode(
                    f"{seed}/{name}/{occurrence}/{copy}",
                    task,
                    Trajectory(name, place, copy, task),
                    episode_key(seed, name, occurrence, copy),
                    group,
                )
            )
        if not self._live:
            self._heard = time.monotonic()
        if first:
            self._waiting.appendleft(group)
        else:
            self._waiting.append(group)
        self.unfinished += copies
        return group

    def cancel(self, key: Hashable) -> None:
        """Frees all that a group holds; one that has ended, or was never here, is no error."""
        group = self._groups.pop(key, None)
        if group is None:
            return
        if group in self._waiting:
            self._waiting.remove(group)
        self._slots.forget(group)
        self._over = [episode for episode in self._over if episode.group is not group]
        for episode in group.episodes:
            if self._live.pop(episode.id, None) is not None:
                self.pool.drop(episode.id)
        self.unfinished -= group.unfinished

    def close(self) -> None:
        """Cancels every group."""
        for key in list(self._groups):
            self.cancel(key)

    def round(
        self,
        patience: float = 0.0,
        newer: Callable[[], tuple[Params, int] | None] = lambda: None,
    ) -> Round:
        """Takes what environments have answered and newer weights, feeds and decodes once.

        While the devices decode, the turns that the last round ended go to their environments, and
        what these answer meanwhile is read.  Waits up to `patience` seconds for an environment
        where nothing can be decoded.  Raises RuntimeError when none has answered for
        `stall_timeout` although episodes wait for them.
        """
        self._ended = []
        self._start_groups()
        if not self._slots.busy:
            self._send_turns()
        self._take_events(patience)
        found = newer()
        if found is not None:
            self.set_weights(*found)
        if self._slots.begin():
            self._send_turns()
            for event in self.pool.poll(0.0):
                self._handle(self._live[str(event.episode_id)], event)
            self._over += self._slots.end()
        return Round(self._slots.take_begun(), self._ended)

    # -- environments -----------------------------------------------------------------------

    def _start_groups(self) -> None:
        """Resets the environments of the next groups, at most one group ahead of the slots (with
        eviction, ahead of twice as many)."""
        slots = self._slots.capacity * (1 if self.config.evict_after is None else 2)
        while self._waiting and len(self._live) < slots + len(self._waiting[0].episodes):
            group = self._waiting.popleft()
            group.resetting = len(group.episodes)
            for episode in group.episodes:
                episode.began = time.perf_counter()
                self._live[episode.id] = episode
                self.pool.reset(episode.id, episode.task)

    def _take_events(self, patience: float) -> None:
        # A ready episode without a free slot has to wait for events as well.
        busy = self._slots.busy
        if not (busy or self._live):
            return
        patience = min(patience, self.config.stall_timeout)
        if self._slots.wanted and self.config.evict_after is not None:
            patience = min(patience, self.config.evict_after)
        began = time.monotonic()
        events = self.pool.poll(0.0 if busy else patience)
        now = time.monotonic()
        self.stats.pool_seconds += 0.0 if busy else now - began
        for event in events:
            self._handle(self._live[str(event.episode_id)], event)
        if busy or events:
            self._heard = now
        elif now - self._heard >= self.config.stall_timeout:
            waiting = sorted(self._live)
            raise RuntimeError(
                f"no environment answered for {self.config.stall_timeout:g} s; {len(waiting)} "
                f"episodes wait, the first is {waiting[0]}"
            )

    def _handle(self, episode: Episode, event: Event) -> None:
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

    def _handle_reset(self, episode: Episode, event: Event) -> None:
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
            if self._slots.room(episode) <= len(prompt):
                raise ValueError(
                    f"the prompt of task {episode.trajectory.task_id} has {len(prompt)} tokens "
                    f"and a slot holds {self._slots.room(episode)}: raise EngineConfig.max_len"
                )
        # Together, so that the whole group shares one prefill.
        if group.resetting == 0:
            ready = [episode for episode in group.episodes if episode.prompt is not None]
            self._slots.enqueue(ready, group.first)

    def _stop_reason(self, episode: Episode, event: Event) -> str:
        """The binding budget where one cut the last turn, else what the environment says."""
        if episode.ended in ("token_budget", "context"):
            return episode.ended
        return (event.step.stop_reason if event.step else None) or "answered"

    def _observe(self, episode: Episode, event: Event) -> None:
        trajectory = episode.trajectory
        ids = self.chat.encode_observation(event.messages)
        if episode.turn[-1] != self.chat.stop_id:
            ids = [self.chat.stop_id, *ids]  # the cut turn still has to end
        # One more token must fit, or there is nothing left to say it in.
        if episode.ended == "context" or len(ids) >= self._slots.room(episode):
            self._end_early(episode, "context")
        elif trajectory.sampled >= self.config.max_tokens:
            self._end_early(episode, "token_budget")
        elif self.config.max_turns is not None and trajectory.turns >= self.config.max_turns:
            self._end_early(episode, "max_turns")
        else:
            trajectory.add_observation(ids)
            self.stats.observation_tokens += len(ids)
            self._slots.observe(episode, ids)

    def _end_early(self, episode: Episode, reason: str) -> None:
        """Tells the environment that no more will come, so that it scores what there is."""
        episode.closing = reason
        self.pool.step(episode.id, Reply("", stop_reason="length"))

    def _finish(self, episode: Episode, reason: str, error: str | None = None) -> None:
        trajectory = episode.trajectory
        trajectory.stop_reason, trajectory.error = reason, error
        if error is None and trajectory.score is None:
            trajectory.error = "the environment ended the episode without a score"
        trajectory.seconds = time.perf_counter() - episode.began
        del self._live[episode.id]
        if error is not None:
            self.pool.drop(episode.id)
        self._slots.release(episode)
        self.unfinished -= 1
        self.stats.stop_reasons[reason] += 1
        if self.on_finish is not None:
            self.on_finish(trajectory)
        group = episode.group
        group.unfinished -= 1
        if not group.unfinished:
            del self._groups[group.key]
            self._ended.append(group)

    def _send_turns(self) -> None:
        """Gives the environments the turns that have ended."""
        over, self._over = self._over, []
        for episode in over:
            stop_reason = "stop" if episode.ended == "stop" else "length"
            reply = self.chat.parse_reply(episode.turn, self.tools, stop_reason)
            self.pool.step(episode.id, reply)
