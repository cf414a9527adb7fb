"""The oracle: solves a Fast Ask task through the tools alone.

It knows what the question's words mean (`task.ask`) and how its type is solved
(`envs.fast_ask.programs`), but no truth and no cell: it looks up the used ranges, reads the
columns it needs under the cell cap, runs the program and copies what that printed.
"""

from __future__ import annotations

from envs.core import Message, Reply, ToolCall, ToolSpec
from envs.fast_ask.programs import Program, helper_program, source_program
from envs.fast_ask.tasks import Task
from envs.fast_ask.tools import MAX_CELLS
from envs.workbook import Area, column_index, parse_area


class OraclePolicy:
    """use_helper: take the helper sheet's short way in easy workbooks.

    one_read_per_call: read each sheet in a call of its own, and the notes too (a longer
    episode, for benchmarks).
    """

    def __init__(self, use_helper: bool = False, one_read_per_call: bool = False) -> None:
        self.use_helper = use_helper
        self.one_read_per_call = one_read_per_call

    def start(self, messages: list[Message], tools: tuple[ToolSpec, ...], task: Task) -> Reply:
        easy = self.use_helper and task.difficulty == "easy"
        self._program = (helper_program if easy else source_program)(task.type, task.ask)
        self._plan: list[ToolCall] | None = None
        return _call("get_workbook_metadata")

    def reply(self, messages: tuple[Message, ...]) -> Reply:
        text = messages[-1].content
        if self._plan is None:
            self._plan = self._reads(self._program, _used_ranges(text))
            self._plan.append(ToolCall("run_python", {"code": self._program.code}))
        if self._plan:
            return Reply("", (self._plan.pop(0),), tokens=32)
        return Reply(f"ANSWER: {text.strip()}", tokens=16)

    def _reads(self, program: Program, used: dict[str, Area]) -> list[ToolCall]:
        wanted = list(program.reads)
        if self.one_read_per_call:
            wanted.append(("Notes", "A", "A"))
        calls: list[list[str]] = []
        room = 0
        for sheet, first, last in wanted:
            area = used[sheet]
            width = column_index(last) - column_index(first) + 1
            row = area.top
            if self.one_read_per_call:
                room = 0
            while row <= area.bottom:
                if room < width:
                    calls.append([])
                    room = MAX_CELLS
                stop = min(area.bottom, row + room // width - 1)
                calls[-1].append(f"{sheet}!{first}{row}:{last}{stop}")
                room -= (stop - row + 1) * width
                row = stop + 1
        return [ToolCall("read_ranges", {"ranges": ranges, "show": 0}) for ranges in calls]


def _call(name: str, **arguments: object) -> Reply:
    return Reply("", (ToolCall(name, arguments),), tokens=8)


def _used_ranges(metadata: str) -> dict[str, Area]:
    """Reads what get_workbook_metadata printed."""
    used = {}
    for line in metadata.splitlines():
        sheet, area, _ = parse_area(line.split(" #")[0])
        if sheet and area:
            used[sheet] = area
    return used
