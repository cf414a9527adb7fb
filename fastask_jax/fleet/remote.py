"""The slots of a server: what `rollout.slots.Slots` is to an engine, for one behind HTTP.

Each turn of an episode is one request that holds its text so far, its key and its budget; the
server goes on in the slot that still holds that text.  As many episodes are under way as the
server has slots, so that no turn finds its state gone.  Weights are a folder that the server reads
while it goes on with those before; turns under way keep whatever versions the server tells of their
tokens.

A turn names the version that the server has confirmed, and is refused by a server that is behind
it: one that was started anew, and so is lost.  That version, and not that of the first token that
comes back, counts as a group's oldest.  A new episode waits for the weights that it was begun with.

Left out: eviction of slow episodes, which the server does as it likes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from fastask_jax.fleet.replica import Lost
from fastask_jax.rollout.episodes import Episode, Group
from fastask_jax.rollout.settings import RolloutConfig, RolloutStats
from fastask_jax.rollout.slots import turn_budget

# How long a step waits for an answer (seconds); what tools have said waits as long.
_WAIT = 0.02


class Client(Protocol):
    """Where requests go: `ServerClient`."""

    def post(self, path: str, body: Any) -> Future[dict[str, Any]]: ...


class Folder(Protocol):
    """Weights on a disk that the server reads; `hold` is false where they are gone."""

    path: str

    def hold(self) -> bool: ...

    def release(self) -> None: ...


class RemoteSlots:
    """What `Scheduler` works with; `params` is a Folder.

    capacity: episodes under way at a time.  max_len: tokens of a whole trajectory, at most those
    of a slot of the server.
    """

    def __init__(
        self,
        client: Client,
        capacity: int,
        max_len: int,
        stop_id: int,
        config: RolloutConfig,
        stats: RolloutStats,
    ) -> None:
        self.capacity, self.stop_id = capacity, stop_id
        self.params: Folder | None = None
        self.version = -1
        self._client, self._max_len, self.config, self.stats = client, max_len, config, stats
        self._confirmed = self._tried = -1
        self._loading: Future[dict[str, Any]] | None = None
        self._begun: list[Group] = []
        self._ready: deque[Episode] = deque()
        self._needs: dict[str, int] = {}  # episode -> the oldest version that may begin it
        self._free = list(range(capacity))[::-1]
        # Turns to be sent, with the number of their tokens that the server hasn't seen.
        self._turns: dict[int, tuple[Episode, int]] = {}
        self._flying: dict[Future[dict[str, Any]], tuple[Episode, str, int]] = {}

    @property
    def busy(self) -> bool:
        """Whether the server has something to do, or could have."""
        return bool(self._flying or self._turns or (self._ready and self._free))

    @property
    def wanted(self) -> bool:
        """Whether an episode waits for a slot."""
        return bool(self._ready)

    def enqueue(self, episodes: Sequence[Episode], first: bool) -> None:
        """Episodes that are to get a slot, behind those that wait or before them."""
        for episode in episodes:
            self._needs[episode.id] = self.version
        if first:
            self._ready.extendleft(reversed(episodes))
        else:
            self._ready.extend(episodes)

    def observe(self, episode: Episode, ids: list[int]) -> None:
        """What the environment has answered, by now part of the text."""
        self._begin_turn(episode, len(ids))

    def release(self, episode: Episode) -> None:
        """Takes the episode's slot from it, and its turn from the server."""
        self._needs.pop(episode.id, None)
        for future in [f for f, (other, *_) in self._flying.items() if other is episode]:
            del self._flying[future]
            future.cancel()
        slot, episode.slot = episode.slot, None
        if slot is not None:
            self._turns.pop(slot, None)
            self._free.append(slot)

    def forget(self, group: Group) -> None:
        """Takes slots and places in the queue from a group's episodes."""
        self._ready = deque(e for e in self._ready if e.group is not group)
        for episode in group.episodes:
            self.release(episode)

    def room(self, episode: Episode) -> int:
        """Tokens that its trajectory may still get."""
        return self._max_len - len(episode.trajectory)

    def begin(self) -> bool:
        """Sends what can be sent; false where nothing is under way."""
        self._follow_weights()
        self._admit()
        self._send()
        return self.busy

    def end(self) -> list[Episode]:
        """Waits a moment for answers; returns the episodes whose turn has ended.  Raises Lost with
        the server, and RuntimeError for a turn that it refuses."""
        began = time.perf_counter()
        futures = [*self._flying, *([self._loading] if self._loading else [])]
        done = wait(futures, _WAIT, FIRST_COMPLETED).done
        self.stats.decode_seconds += time.perf_counter() - began
        if self._turns and not futures:  # newer weights are on their way
            time.sleep(_WAIT)
        return [self._take(future) for future in done if future in self._flying]

    def take_begun(self) -> list[Group]:
        """Groups whose first turn was sent since this was asked last."""
        begun, self._begun = self._begun, []
        return begun

    def _follow_weights(self) -> None:
        """Has the server read the newest weights, one version after another."""
        if self._loading is not None and self._loading.done():
            self._loading.result()
            self._confirmed, self._loading = self._tried, None
        if self._loading is not None or self._tried == self.version or self.params is None:
            return
        if self.params.hold():  # else newer ones are on their way
            body = {"version": self.version, "path": self.params.path}
            self._tried = self.version
            self._loading = self._client.post("/inference/v1/weights", body)
            folder = self.params
            self._loading.add_done_callback(lambda _: folder.release())

    def _admit(self) -> None:
        while self._free and self._ready:
            episode = self._ready.popleft()
            assert episode.prompt is not None
            episode.slot = self._free.pop()
            episode.trajectory.add_prompt(episode.prompt)
            self.stats.prompt_tokens += len(episode.prompt)
            self._begin_turn(episode, len(episode.prompt))

    def _begin_turn(self, episode: Episode, new: int) -> None:
        assert episode.slot is not None
        episode.turn, episode.ended = [], None
        self._turns[episode.slot] = episode, new

    def _send(self) -> None:
        for slot, (episode, new) in list(self._turns.items()):
            # None of these before the server has weights at all.
            if self._confirmed < max(0, self._needs[episode.id]):
                continue
            del self._turns[slot]
            budget, limit = turn_budget(episode, self.room(episode), self.config)
            body = {
                "ids": episode.trajectory.ids.tolist(),
                "max_tokens": budget,
                "temperature": self.config.temperature,
                "key": [int(half) for half in episode.key],
                "min_version": self._confirmed,
            }
            future = self._client.post("/inference/v1/generate", body)
            self._flying[future] = episode, limit, new
            if episode.group.oldest is None:
                episode.group.oldest = self._confirmed
                self._begun.append(episode.group)

    def _take(self, future: Future[dict[str, Any]]) -> Episode:
        episode, limit, new = self._flying.pop(future)
        answer = future.result()
        sampled = list(zip(answer["ids"], answer["logprobs"], answer["versions"], strict=True))
        oldest = episode.group.oldest
        if not sampled or (oldest is not None and min(v for *_, v in sampled) < oldest):
            raise Lost("the server has sampled by older weights than it was given")
        for version, part in groupby(sampled, itemgetter(2)):
            ids, logprobs, _ = zip(*part, strict=True)
            episode.trajectory.add_sampled(ids, logprobs, version)
            episode.turn.extend(ids)
        episode.ended = "stop" if answer["stop_reason"] == "stop" else limit
        usage = answer["usage"]
        self.stats.rounds += 1
        # Its rows are the server's to count: here no step is idle.
        self.stats.row_steps += len(sampled)
        self.stats.sampled_tokens += len(sampled)
        fed = usage["prompt_tokens"] - usage["cached_tokens"]
        self.stats.refed_tokens += max(0, fed - new)
        return episode
