"""Workbooks that were read once, kept as blocks of rows by the hash of the file's bytes.

A kept book is one file: blocks of rows, each JSON behind zlib, then the outline with the place
of every block, then a footer.  It is written beside and renamed, so a half-written one is never
found.  The folder is private to its user and holds at most `most` bytes: the oldest books go.
Left out: anything about the file but its bytes; a book that was renamed is still known.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

VERSION = 1  # of what is kept; another one finds nothing
ROWS, STEP = 64, 16  # of a block; of one step of writing
_MAGIC = b"fastask!"
_FOOTER = 24
_CACHED = 64  # blocks


class BlockStore:
    """A folder of kept workbooks.

    Raises ValueError where the folder can't be used: it must be this user's own, closed to
    others' writing.
    """

    def __init__(self, folder: str | os.PathLike[str], most: int = 2 << 30) -> None:
        self.folder, self.most = Path(folder), most
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.stat()
        except OSError as error:
            raise ValueError(f"can't keep workbooks in {folder}: {error.strerror}") from error
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError(f"{folder} isn't private; give a folder that only you can write to")

    def digest(self, file: BinaryIO) -> str:
        return digest(file)

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}.book"

    def find(self, digest: str) -> KeptBook | None:
        """The book of that digest, or None.  A broken one is removed."""
        path = self.path(digest)
        try:
            book = KeptBook(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, zlib.error):
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # the last to go
        return book

    def writing(self, digest: str) -> dict[str, str]:
        """What a `StoreWriter` needs to know, beside the file."""
        self._make_room()
        return {"digest": digest, "path": str(self.path(digest))}

    def _make_room(self) -> None:
        kept = []
        for path in self.folder.glob("*.book*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            kept.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size


def digest(file: BinaryIO) -> str:
    """The name of a file's bytes."""
    file.seek(0)
    found = hashlib.blake2b(digest_size=16, person=b"book%d" % VERSION)
    while chunk := file.read(1 << 20):
        found.update(chunk)
    return found.hexdigest()


class KeptBook:
    """A kept book: its outline, and its rows."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)
        try:
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(size - _FOOTER, 0))
            footer = self._file.read(_FOOTER)
            if footer[16:] != _MAGIC:
                raise ValueError("no footer")
            start, length = (int.from_bytes(footer[i : i + 8], "little") for i in (0, 8))
            kept = self._load(start, length)
            self.outline: dict[str, Any] = kept["outline"]
            self._blocks: list[list[list[int]]] = kept["blocks"]
        except BaseException:
            self._file.close()
            raise
        self._tops = [[block[0] for block in blocks] for blocks in self._blocks]
        self._cache: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()

    def _load(self, start: int, length: int) -> Any:
        data = os.pread(self._file.fileno(), length, start)
        return json.loads(zlib.decompress(data))

    def rows(self, sheet: int, top: int, bottom: int) -> list[Any]:
        """The filled rows from `top` to `bottom`, both included."""
        blocks, out = self._blocks[sheet], []
        place = max(bisect_right(self._tops[sheet], top) - 1, 0)
        while place < len(blocks) and blocks[place][0] <= bottom:
            if blocks[place][1] >= top:
                out += [r for r in self._block(sheet, place) if top <= r[0] <= bottom]
            place += 1
        return out

    def uncalculated(self, sheet: int) -> int:
        """Formulas without a stored result."""
        count: int = self.outline["sheets"][sheet]["uncalculated"]
        return count

    def _block(self, sheet: int, place: int) -> list[Any]:
        key = sheet, place
        found = self._cache.get(key)
        if found is None:
            _, _, start, length = self._blocks[sheet][place]
            found = self._cache[key] = self._load(start, length)
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found

    def close(self) -> None:
        self._file.close()


class StoreWriter:
    """Writes a source's rows into the store, a few at a step."""

    def __init__(self, source: Any, file: BinaryIO, digest: str, path: str) -> None:
        self._source, self._file, self._digest, self._path = source, file, digest, path
        self._beside = f"{path}.{os.getpid()}"
        number = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._out: BinaryIO = os.fdopen(number, "wb")
        self._sheet, self._place = 0, 0
        self._numbers: list[int] | None = None
        self._rows: list[Any] = []
        self._blocks: list[list[list[int]]] = [[] for _ in source.outline["sheets"]]
        self._exact: list[list[int]] = [[0, 0, 1 << 20, 0] for _ in self._blocks]
        self._unstored = [0 for _ in self._blocks]
        self.done = self.kept = False

    def step(self) -> None:
        """Reads and writes up to `STEP` rows; the last step makes the book known."""
        if self._sheet == len(self._blocks):
            self._finish()
            return
        if self._numbers is None:
            self._numbers = self._source.numbers(self._sheet)
        some = self._numbers[self._place : self._place + STEP]
        if some:
            rows = self._source.rows(self._sheet, some[0], some[-1])
            self._rows += rows
            self._measure(rows)
            self._place += STEP
        if len(self._rows) >= ROWS or (not some and self._rows):
            where = self._write(self._rows)
            self._blocks[self._sheet].append([self._rows[0][0], self._rows[-1][0], *where])
            self._rows = []
        if not some:
            self._sheet, self._place, self._numbers = self._sheet + 1, 0, None

    def _measure(self, rows: list[Any]) -> None:
        from envs.workbook.sheetxml import bounds, unstored

        self._unstored[self._sheet] += unstored(rows)
        found, exact = bounds(rows), self._exact[self._sheet]
        if found[0]:
            exact[:] = [min(exact[0] or found[0], found[0]), max(exact[1], found[1]),
                        min(exact[2], found[2]), max(exact[3], found[3])]  # fmt: skip

    def _write(self, content: Any) -> list[int]:
        data = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)
        start = self._out.tell()
        self._out.write(data)
        return [start, len(data)]

    def _finish(self) -> None:
        outline = self._source.outline
        for sheet, exact, count in zip(
            outline["sheets"], self._exact, self._unstored, strict=True
        ):
            sheet["uncalculated"] = count
            top, bottom, left, right = exact
            sheet["used"] = [top, left, bottom, right] if top else None
        start, length = self._write({"outline": outline, "blocks": self._blocks})
        self._out.write(start.to_bytes(8, "little") + length.to_bytes(8, "little") + _MAGIC)
        self._out.close()
        if digest(self._file) != self._digest:  # it changed while it was read
            self.abandon()
            return
        os.rename(self._beside, self._path)
        self.done = self.kept = True

    def abandon(self) -> None:
        """Gives up; nothing is kept."""
        self.done = True
        self._out.close()
        try:
            os.unlink(self._beside)
        except FileNotFoundError:
            pass
