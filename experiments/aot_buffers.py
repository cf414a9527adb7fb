"""The largest buffers of a program, from the text that XLA dumps while it compiles.

The compiler writes which values are alive when most memory is in use (live-range.txt), where each
value lies and how large it is with padding (buffer-assignment.txt), and which operation of the
source each instruction came from (the program itself).  All three exist even when the program
turns out not to fit.  Values that share their memory count once; equal buffers of the layers of a
block are one entry.

Left out: buffers outside the main memory of a device, and those of the runtime.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
_ALIVE = re.compile(r"\s+(\S+?)(\{[\d,]*\}): \d+ bytes \(cumulative")
_ALLOCATION = re.compile(r"allocation (\d+):")
_VALUE = re.compile(
    r"\s+value: <\d+ (\S+?)(\{[\d,]*\})? (?:\(phi\) )?@(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): ([^{]*)"
)
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = ")
_SOURCE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLS = re.compile(r"calls=%([^\s,]+)")
# Parts of an operation's name that say how it is run and not what it is, and JAX's other words.
_WRAPPERS = re.compile(r"jit\(_?\w+\)|while|body|cond|closed_call|checkpoint|shard_map")
_WORDS = {"transpose(jvp())": "backward", "jvp()": "forward", "rematted_computation": "recomputed"}


@dataclass(frozen=True)
class Buffer:
    """count buffers of gib each on every device, padding included.  shape: of one device's part,
    with its type.  name: the argument or operation of the source, or else XLA's instruction."""

    gib: float
    count: int
    shape: str
    name: str


@dataclass(frozen=True)
class _Place:
    allocation: int
    offset: int
    size: int
    shape: str


def largest_buffers(folder: Path, count: int) -> list[Buffer]:
    """The `count` largest entries at the peak, the largest first; none where there is no dump."""
    places = _places(_text(folder, "-buffer-assignment.txt"))
    alive = _alive(_text(folder, "-live-range.txt"))
    taken = {places[value]: value[0] for value in alive if value in places}
    # What a loop carries has no name of its own: one of those that share its memory has.
    sharing = defaultdict(list)
    for (instruction, _), place in places.items():
        if place in taken:
            sharing[place].append(instruction)
    instructions = {instruction for names in sharing.values() for instruction in names}
    sources = _sources(_text(folder, ".after_optimizations.txt"), instructions)
    groups: dict[tuple[int, str, str], set[tuple[int, int]]] = defaultdict(set)
    for place, instruction in taken.items():
        names = (sources[name] for name in [instruction, *sharing[place]] if name in sources)
        key = (place.size, place.shape, next(names, re.sub(r"[.\d]+$", "", instruction)))
        groups[key].add((place.allocation, place.offset))
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0] * len(item[1]), item[0]))
    return [
        Buffer(round(size / GIB, 4), len(where), shape, name)
        for (size, shape, name), where in ordered[:count]
    ]


def _text(folder: Path, ending: str) -> str:
    """The dump's file of that kind; of several programs, the largest."""
    found = [path for path in folder.iterdir() if path.name.endswith(ending)]
    return max(found, key=lambda path: path.stat().st_size).read_text("utf-8") if found else ""


def _alive(ranges: str) -> Iterator[tuple[str, str]]:
    """Instruction, and place in its result, of every value that is alive at the peak."""
    lines = iter(ranges.splitlines())
    for line in lines:
        if line.rstrip().endswith("(peak):"):
            break
    for line in lines:
        found = _ALIVE.match(line)
        if not found:
            break
        yield found[1], found[2]


def _places(assignment: str) -> dict[tuple[str, str], _Place]:
    """Where each value lies in main memory (which XLA numbers 0)."""
    places, allocation = {}, -1
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            allocation = int(found[1])
        elif (found := _VALUE.match(line)) and found[3] == "0":
            place = _Place(allocation, int(found[5]), int(found[4]), found[6].strip())
            places[found[1], found[2] or "{}"] = place
    return places


def _sources(program: str, instructions: set[str]) -> dict[str, str]:
    """The source's name of each instruction that has one; a fusion may have it from its root."""
    sources: dict[str, str] = {}
    roots: dict[str, str] = {}
    calls: dict[str, str] = {}
    computation = ""
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            computation = found[1]
        elif found := _INSTRUCTION.match(line):
            name = _SOURCE.search(line)
            if found[1] and name:
                roots[computation] = name[1]
            if found[2] not in instructions:
                continue
            if name:
                sources[found[2]] = name[1]
            elif called := _CALLS.search(line):
                calls[found[2]] = called[1]
    fused = {name: roots[called] for name, called in calls.items() if called in roots}
    named = {name: _readable(text) for name, text in (fused | sources).items()}
    return {name: text for name, text in named.items() if text}


def _readable(name: str) -> str:
    """`jit(f)/while/body/GatedDeltaNet/dot_general` -> `GatedDeltaNet/dot_general`; layers of a
    block are told apart no longer."""
    name = re.sub(r"layer_\d+", "layer_*", name.replace("\\'", "'"))
    parts = (part for part in name.split("/") if not _WRAPPERS.fullmatch(part))
    return "/".join(_WORDS.get(part, part) for part in parts)
