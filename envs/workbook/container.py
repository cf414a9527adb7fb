"""The gate before a workbook file is read: what kind of file it is, and whether it is safe.

The kind comes from the content; the name only tells apart what content can't.  A zip archive
may unpack to gigabytes, so `Archive` bounds parts, bytes and ratio while it unpacks, whatever
sizes the archive declares, and finds parts whatever slashes and case their names are in.
"""

from __future__ import annotations

import os
import queue
import threading
import zipfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20
KINDS = "xlsx, xlsm, xlsb, xls, ods or csv"


class WorkbookError(ValueError):
    """The file isn't a workbook that can be read; the text says why and what to do."""


class Damaged(Exception):
    """What is wrong inside a file; `damaged` tells it to the user."""


def reason(error: BaseException) -> str:
    """The error in one short line."""
    kind = "" if isinstance(error, Damaged) else f"{type(error).__name__}: "
    return f"{kind}{error}".split("\n")[0][:200]


def damaged(path: Path, error: BaseException) -> WorkbookError:
    """What the user is told of a file that breaks the reader with `error`."""
    return WorkbookError(
        f"can't read {path}: the file is damaged ({reason(error)}); open it in a spreadsheet "
        "program and save it again"
    )


@dataclass(frozen=True)
class Limits:
    """What a file may hold, and what reading it may take.

    unpacked, free: bytes of all parts; the ratio counts once more than `free` are out.
    cells: filled cells of a workbook.
    slots: cells of a sheet's `rows`, counted from column A to each row's last cell.
    memory, seconds: of the process that reads it; seconds of one step, and thrice that in all.
    """

    entries: int = 10_000
    unpacked: int = 1024 * MIB
    free: int = 10 * MIB
    ratio: int = 200
    cells: int = 20_000_000
    slots: int = 10_000_000
    memory: int = 2048 * MIB
    seconds: int = 30


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading.  Raises FileNotFoundError, OSError or WorkbookError."""
    if not path.exists():
        raise FileNotFoundError(f"no such workbook: {path}")
    if path.is_dir():
        raise WorkbookError(f"{path} is a folder; give the path of a workbook: {KINDS}")
    if not path.is_file():  # opening a pipe waits for its other end
        raise WorkbookError(f"{path} isn't a file; give the path of a workbook: {KINDS}")
    return open(path, "rb")


def kind_of_file(file: BinaryIO, name: str) -> str:
    """xlsx, xlsb, ods, xls or csv, by content.

    Raises WorkbookError, with `name` in its text, for what is none of them.
    """
    head = file.read(1 << 16)
    size = file.seek(0, os.SEEK_END)
    if not head:
        raise WorkbookError(f"{name} is empty; give the path of a workbook: {KINDS}")
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            return _kind_of_zip(archive, name)
    if head.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        directory = head if size <= len(head) else head + _tail(file, size)
        if "EncryptedPackage".encode("utf-16-le") in directory:
            raise WorkbookError(
                f"{name} is password-protected; open it in a spreadsheet program and save it "
                "without the password"
            )
        return "xls"
    if head[:2] == b"\x09\x08" or head[:4] in (b"\x09\x00\x04\x00", b"\x09\x02\x06\x00"):
        return "xls"  # a bare stream of records, as Excel 2 to 5 wrote it
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:2000].lower()
    if begin[:1] == b"<":
        html = b"<html" in begin or b"<!doctype html" in begin or b"<table" in begin
        xml = "an XML spreadsheet of Excel 2003" if b"spreadsheet" in begin else "XML"
        raise WorkbookError(
            f"{name} is {'HTML' if html else xml}, not a workbook, whatever its name says; open "
            "it in a spreadsheet program and save it as xlsx"
        )
    if begin[:5] in (b"%pdf-", b"{\\rtf"):
        raise WorkbookError(f"{name} is a PDF or text document; give a workbook: {KINDS}")
    if b"\0" in head and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise WorkbookError(f"{name} isn't a workbook of a known kind; give {KINDS}")
    return "csv"


def _tail(file: BinaryIO, size: int) -> bytes:
    """The rest of a compound file, bounded: its directory may stand anywhere."""
    file.seek(1 << 16)
    return file.read(min(size, 64 * MIB))


def _kind_of_zip(archive: zipfile.ZipFile, name: str) -> str:
    names = {canonical(e) for e in archive.namelist()}
    if "mimetype" in archive.namelist():
        entry = archive.getinfo("mimetype")
        if entry.file_size < 200 and b"opendocument.spreadsheet" in archive.read(entry):
            return "ods"
    if any(n.endswith("workbook.bin") for n in names):
        return "xlsb"
    if "[content_types].xml" not in names and "xl/workbook.xml" not in names:
        raise WorkbookError(f"{name} is a zip file without a workbook; give {KINDS}")
    return "xlsx"


def canonical(name: str) -> str:
    """A part's name as it is looked up: slashes one way, no leading one, lower case."""
    return name.replace("\\", "/").lstrip("/").lower()


def _unpacker() -> Any:
    """The module that unpacks: isal does it in half of zlib's time, where it is installed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


class Archive:
    """The parts of a zip archive, unpacked within `limits`.

    Its errors are Damaged, WorkbookError without the file's name, and those of zipfile and zlib.
    """

    def __init__(self, file: BinaryIO, limits: Limits) -> None:
        self._zip = zipfile.ZipFile(file)
        self._file, self._limits = file, limits
        self._lock = threading.Lock()  # a part may be unpacked ahead while another is read
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            self._entries.setdefault(canonical(entry.filename), entry)
        size = file.seek(0, os.SEEK_END)
        self._packed, self._out = max(size, 1), 0
        if len(self._zip.infolist()) > limits.entries:
            raise WorkbookError(
                f"holds {len(self._zip.infolist()):,} parts; the limit is {limits.entries:,}. "
                "Save it anew from a spreadsheet program"
            )
        self._check(sum(entry.file_size for entry in self._entries.values()))

    def _at(self, place: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, place)

    def __contains__(self, name: str) -> bool:
        return canonical(name) in self._entries

    def names(self) -> list[str]:
        """The canonical names."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """The unpacked size that the archive declares."""
        return self._entries[canonical(name)].file_size

    def _check(self, out: int) -> None:
        if out > self._limits.unpacked:
            raise WorkbookError(
                f"unpacks to {out // MIB:,} MiB; the limit is {self._limits.unpacked // MIB:,} "
                "MiB. Split it into smaller workbooks"
            )
        if out > self._limits.free and out > self._limits.ratio * self._packed:
            raise WorkbookError(
                "isn't unpacked: the archive expands too much, to over "
                f"{out // self._packed:,} times its size, as zip bombs do; the limit is "
                f"{self._limits.ratio}. Save it anew from a spreadsheet program"
            )

    def chunks(self, name: str, size: int = MIB) -> Generator[bytes]:
        """The part's bytes, in pieces.  Raises Damaged where there is no such part, or where its
        bytes aren't those that were packed."""
        entry = self._entries.get(canonical(name))
        if entry is None:
            raise Damaged(f"part {name[:80]} is missing")
        if entry.flag_bits & 1:
            raise WorkbookError("holds encrypted parts; save it without the password")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Damaged(f"part {name[:80]} is packed in a way that workbooks don't use")
        header = self._at(entry.header_offset, 30)
        if header[:4] != b"PK\x03\x04":
            raise Damaged(f"part {name[:80]} isn't where the archive says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
        place = entry.header_offset + 30 + lengths
        left, crc, out = entry.compress_size, 0, 0
        unpacker = _unpacker()
        inflate = unpacker.decompressobj(-15) if entry.compress_type else None
        pending = b""
        while True:
            if inflate is None:
                data = self._at(place, min(size, left))
                place, left = place + len(data), left - len(data)
                done = not data
            else:
                if not pending and left:
                    pending = self._at(place, min(MIB, left))
                    place, left = place + len(pending), left - len(pending)
                    if not pending:
                        raise Damaged(f"part {name[:80]} is cut off")
                data = inflate.decompress(pending, size)
                pending = inflate.unconsumed_tail
                done = inflate.eof or not (data or pending or left)
            out += len(data)
            with self._lock:
                self._out += len(data)
            self._check(self._out)
            if out > entry.file_size:
                break
            crc = unpacker.crc32(data, crc)
            if data:
                yield data
            if done:
                break
        if out != entry.file_size or crc != entry.CRC or (inflate and not inflate.eof):
            raise Damaged(f"part {name[:80]} isn't what was packed")

    def read(self, name: str) -> bytes:
        """The part's bytes, whole."""
        return b"".join(self.chunks(name))


def ahead(chunks: Iterator[bytes], depth: int = 4) -> Generator[bytes]:
    """The chunks, made in a thread while those before are used; unpacking needs no Python lock.

    Closing it ends the thread before it returns.
    """
    made: queue.Queue[bytes | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def make() -> None:
        try:
            for chunk in chunks:
                made.put(chunk)
                if stop.is_set():
                    return
            made.put(None)
        except BaseException as error:
            made.put(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (chunk := made.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
    finally:
        stop.set()
        while thread.is_alive():
            try:
                made.get(timeout=0.01)
            except queue.Empty:
                pass
