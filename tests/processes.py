"""What Linux says of processes, for tests that kill some.

A process may end between any two reads: one that is gone has no children and no command.
"""

from pathlib import Path


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def running(pid: int) -> bool:
    """Alive and no zombie (one whose parent doesn't wait for it counts as ended)."""
    state = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def command_line(pid: int) -> bytes:
    """Its command line, words parted by zero bytes; empty for a zombie and one that is gone."""
    return _read(Path(f"/proc/{pid}/cmdline"))


def children(pid: int) -> list[int]:
    """What it has started, from whichever of its threads."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for thread in threads for child in _read(thread / "children").split()]


def tree(pid: int) -> list[int]:
    """A process and all that it and its children have started."""
    return [pid, *(found for child in children(pid) for found in tree(child))]
