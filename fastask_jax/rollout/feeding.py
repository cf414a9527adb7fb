"""Text on its way into an engine's slots, a few calls at a time.

A long text takes many append calls, and slots that decode wait meanwhile.  So texts queue here,
cut into the engine's pieces, and `run` makes some of the calls: between two decode calls, no more
than `EngineConfig.append_calls`.  A slot can decode when nothing of its text waits any more.

Equal texts for emptied slots are fed once and then copied: the copies of a prompt cost one.

What a slot holds in the end depends on its own pieces alone, so neither the limit nor the company
changes what it computes.

Left out: whose slots these are, and which weights have fed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastask_jax.rollout.engine import Engine, Params, Piece


class Feeder:
    """The texts that wait for the slots of one engine; they take turns, a call each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queues: dict[int, list[Piece]] = {}
        self._texts: dict[int, Sequence[int]] = {}  # of emptied slots whose text waits
        self._copies: dict[int, int] = {}  # slot -> the one whose text it will take

    def __contains__(self, slot: int) -> bool:
        """Whether something is still to be done before the slot can decode."""
        return slot in self._queues or slot in self._copies

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, texts: Mapping[int, Sequence[int]], fresh: bool = False) -> set[int]:
        """Takes ids for slots; `fresh` ones are emptied first, and what waited for them is
        forgotten.  Returns the slots that will copy another one's text instead of reading it.

        Raises ValueError for an empty text, one that doesn't fit, or more for a slot that can't
        decode yet.
        """
        leaders = {tuple(ids): slot for slot, ids in self._texts.items() if slot not in texts}
        copying = set()
        for slot, ids in texts.items():
            if not fresh:
                if slot in self:
                    raise ValueError(f"slot {slot} doesn't hold all of its text yet")
                self._queues[slot] = self.engine.cut(slot, ids)
                continue
            self.drop(slot)
            leader = leaders.setdefault(tuple(ids), slot)
            if leader == slot:
                self._texts[slot] = ids
                self._queues[slot] = self.engine.cut(slot, ids, fresh=True)
            else:
                self._copies[slot] = leader
                copying.add(slot)
        return copying

    def drop(self, slot: int) -> None:
        """Forgets what waits for a slot; if others were to copy it, the first of them reads it."""
        self._copies.pop(slot, None)
        text = self._texts.pop(slot, None)
        self._queues.pop(slot, None)
        heirs = [copy for copy, leader in self._copies.items() if leader == slot]
        if heirs:
            assert text is not None
            first, *others = heirs
            del self._copies[first]
            self._texts[first] = text
            self._queues[first] = self.engine.cut(first, text, fresh=True)
            self._copies |= dict.fromkeys(others, first)

    def run(self, params: Params, calls: int | None = None) -> None:
        """Makes at most so many append calls, or all that there are to make."""
        while self._queues and (calls is None or calls > 0):
            batch = self._batch()
            self.engine.feed(params, batch)
            for piece in batch:
                _, *rest = self._queues.pop(piece.slot)
                if rest:  # behind the others, so that no long text holds up a short one
                    self._queues[piece.slot] = rest
                else:
                    self._texts.pop(piece.slot, None)
            if calls is not None:
                calls -= 1
        ready = {copy: of for copy, of in self._copies.items() if of not in self._queues}
        if ready:
            self.engine.share(ready)
            for copy in ready:
                del self._copies[copy]

    def _batch(self) -> list[Piece]:
        """The next piece of the slot whose turn it is, and others that fit its call."""
        firsts = [queue[0] for queue in self._queues.values()]
        bucket = firsts[0].bucket
        return [p for p in firsts if p.bucket == bucket][: self.engine.config.append_rows]
