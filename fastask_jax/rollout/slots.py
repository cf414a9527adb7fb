"""The slots of an engine: which episodes hold one, what is fed to them, and decoding.

Episodes come in as ready, get a slot when one is free, and sample turn after turn; a slot whose
episode waits for its tool is parked, its state kept.  New weights feed all slots that run anew.

`EpisodeSlots` is what a scheduler needs of them, wherever they are.

Left out: environments and groups (the scheduler).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastask_jax.rollout.engine import Decoding, Engine, Params, Turn
from fastask_jax.rollout.episodes import Episode, Group
from fastask_jax.rollout.feeding import Feeder
from fastask_jax.rollout.settings import RolloutConfig, RolloutStats


@dataclass(frozen=True)
class _Decoding:
    """Decode calls under way, for whom, within which budgets, by which weights, and since when."""

    calls: Decoding
    episodes: dict[int, Episode]
    budgets: dict[int, tuple[int, str]]
    version: int
    began: float
    started: float


class EpisodeSlots(Protocol):
    """Where a scheduler's episodes are sampled; `Slots` says what each part does.

    capacity: episodes that can be under way at a time.  stop_id: the token that ends a turn.
    """

    capacity: int
    stop_id: int
    params: Any
    version: int

    @property
    def busy(self) -> bool: ...

    @property
    def wanted(self) -> bool: ...

    def enqueue(self, episodes: Sequence[Episode], first: bool) -> None: ...

    def observe(self, episode: Episode, ids: list[int]) -> None: ...

    def release(self, episode: Episode) -> None: ...

    def forget(self, group: Group) -> None: ...

    def room(self, episode: Episode) -> int: ...

    def begin(self) -> bool: ...

    def end(self) -> list[Episode]: ...

    def take_begun(self) -> list[Group]: ...


class Slots:
    """See the module.  `params` and `version` are what the next call decodes with."""

    def __init__(self, engine: Engine, config: RolloutConfig, stats: RolloutStats) -> None:
        self.engine, self.config, self.stats = engine, config, stats
        self.capacity, self.stop_id = engine.config.slots, engine.stop_id
        self.params: Params = None
        self.version = -1
        self._begun: list[Group] = []
        self._ready: deque[Episode] = deque()
        self._free = list(range(engine.config.slots))[::-1]
        self._running: dict[int, Episode] = {}
        self._feeder = Feeder(engine)
        self._made_by: dict[int, int] = {}  # slot -> version of the weights that fed it
        # slot -> the episode that waits for its tool, and since when
        self._parked: dict[int, tuple[Episode, float]] = {}
        self._decoding: _Decoding | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something to feed or to decode."""
        return bool(self._running or (self._ready and self._free))

    @property
    def wanted(self) -> bool:
        """Whether an episode waits for a slot."""
        return bool(self._ready)

    def enqueue(self, episodes: Sequence[Episode], first: bool) -> None:
        """Episodes that are to get a slot, behind those that wait or before them."""
        if first:
            self._ready.extendleft(reversed(episodes))
        else:
            self._ready.extend(episodes)

    def observe(self, episode: Episode, ids: list[int]) -> None:
        """What the environment has answered: the next turn begins behind it."""
        if episode.slot is None:  # evicted; whatever it reads is part of its text by now
            self.enqueue([episode], first=True)
        else:
            # By newer weights it will be read with the rest of its text (`_feed_again`).
            if self._made_by[episode.slot] == self.version:
                self._feeder.put({episode.slot: ids})
            self._begin_turn(episode)

    def release(self, episode: Episode) -> None:
        """Takes the episode's slot from it."""
        slot, episode.slot = episode.slot, None
        if slot is not None:
            self._running.pop(slot, None)
            self._feeder.drop(slot)
            self._parked.pop(slot, None)
            self._free.append(slot)

    def forget(self, group: Group) -> None:
        """Takes slots and places in the queue from a group's episodes."""
        self._ready = deque(e for e in self._ready if e.group is not group)
        for episode in group.episodes:
            self.release(episode)

    def room(self, episode: Episode) -> int:
        """Tokens that its trajectory may still get."""
        return self.engine.config.max_len - len(episode.trajectory)

    def begin(self) -> bool:
        """Admits, feeds, and starts to decode what can be; false where nothing can."""
        self._evict()
        self._feed_again()
        self._admit()
        self._feed()
        ready = {s: e for s, e in self._running.items() if s not in self._feeder}
        if ready:
            self._start(ready)
        return bool(ready)

    def end(self) -> list[Episode]:
        """Takes what `begin` has started; returns the episodes whose turn has ended.  In between,
        episodes that aren't decoded may be enqueued, observed and released."""
        decoding, self._decoding = self._decoding, None
        return [] if decoding is None else self._take(decoding)

    def take_begun(self) -> list[Group]:
        """Groups that have sampled their first token since this was asked last."""
        begun, self._begun = self._begun, []
        return begun

    def _evict(self) -> None:
        """Frees slots for ready episodes, where others have waited for their tools for long: those
        first whose text costs least to feed again."""
        wanted = len(self._ready) - len(self._free)
        if self.config.evict_after is None or wanted <= 0:
            return
        long_ago = time.monotonic() - self.config.evict_after
        slow = [episode for episode, since in self._parked.values() if since <= long_ago]
        for episode in sorted(slow, key=lambda episode: len(episode.trajectory))[:wanted]:
            self.release(episode)
            self.stats.evictions += 1

    def _admit(self) -> None:
        """Gives free slots to ready episodes; equal prompts are fed once and copied."""
        texts: dict[int, list[int]] = {}
        again: dict[int, list[int]] = {}
        while self._free and self._ready:
            episode = self._ready.popleft()
            assert episode.prompt is not None
            trajectory = episode.trajectory
            slot = episode.slot = self._free.pop()
            if trajectory.spans:  # evicted before
                again[slot] = trajectory.ids.tolist()
            else:
                trajectory.add_prompt(episode.prompt)
                texts[slot] = episode.prompt
            self._made_by[slot] = self.version
            self._begin_turn(episode)
        copied = self._feeder.put(texts, fresh=True)
        for slot, ids in texts.items():
            if slot in copied:
                self.stats.shared_tokens += len(ids)
            else:
                self.stats.prompt_tokens += len(ids)
        self._put_again(again)

    def _feed_again(self) -> None:
        """Gives the slots that are to run and were fed by other weights a state by these."""
        stale = {
            slot: episode.trajectory.ids.tolist()
            for slot, episode in self._running.items()
            if self._made_by[slot] != self.version
        }
        self._put_again(stale)
        self._made_by |= dict.fromkeys(stale, self.version)

    def _put_again(self, texts: dict[int, list[int]]) -> None:
        copied = self._feeder.put(texts, fresh=True)
        self.stats.refed_tokens += sum(len(ids) for s, ids in texts.items() if s not in copied)

    def _feed(self) -> None:
        """Feeds what may be fed before the next decode call: all that waits, or some calls' worth
        and then as much as it takes for some slot to be ready."""
        began = time.perf_counter()
        self._feeder.run(self.params, self.engine.config.append_calls)
        while self._feeder and all(slot in self._feeder for slot in self._running):
            self._feeder.run(self.params, 1)
        self.stats.append_seconds += time.perf_counter() - began

    def _begin_turn(self, episode: Episode) -> None:
        episode.turn, episode.ended = [], None
        slot = self._slot(episode)
        self._parked.pop(slot, None)
        self._running[slot] = episode

    def _start(self, episodes: dict[int, Episode]) -> None:
        began = time.perf_counter()
        budgets = {
            slot: turn_budget(episode, self.room(episode), self.config)
            for slot, episode in episodes.items()
        }
        turns = {slot: Turn(episode.key, budgets[slot][0]) for slot, episode in episodes.items()}
        calls = self.engine.start(self.params, turns, self.config.temperature)
        started = time.perf_counter()
        self._decoding = _Decoding(calls, episodes, budgets, self.version, began, started)

    def _take(self, decoding: _Decoding) -> list[Episode]:
        if decoding.calls.done:
            self.stats.late_seconds += time.perf_counter() - decoding.started
        row_steps = self.engine.row_steps
        results = self.engine.finish(decoding.calls)
        self.stats.decode_seconds += time.perf_counter() - decoding.began
        self.stats.rounds += 1
        self.stats.row_steps += self.engine.row_steps - row_steps
        over = []
        for slot, sampled in results.items():
            episode = decoding.episodes[slot]
            episode.trajectory.add_sampled(sampled.ids, sampled.logprobs, decoding.version)
            if episode.group.oldest is None:
                episode.group.oldest = decoding.version
                self._begun.append(episode.group)
            episode.turn.extend(sampled.ids)
            self.stats.sampled_tokens += len(sampled.ids)
            if sampled.ended is not None:
                del self._running[slot]
                budget = decoding.budgets[slot][1]
                episode.ended = "stop" if sampled.ended == "stop" else budget
                self._parked[slot] = episode, time.monotonic()
                over.append(episode)
        return over

    @staticmethod
    def _slot(episode: Episode) -> int:
        assert episode.slot is not None
        return episode.slot


def turn_budget(episode: Episode, room: int, config: RolloutConfig) -> tuple[int, str]:
    """Tokens that the running turn may still get, and the budget that says so.

    room: tokens that its trajectory may still get.
    """
    return min(
        (room, "context"),
        (config.max_tokens - episode.trajectory.sampled, "token_budget"),
        (config.max_turn_tokens - len(episode.turn), "length"),
        key=lambda pair: pair[0],
    )
