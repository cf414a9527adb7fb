"""The block store: what comes back is what was read; nothing half-written, broken or foreign."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import openpyxl
import pytest

from envs.workbook import (
    Area,
    BlockStore,
    Sheet,
    Workbook,
    WorkbookError,
    read_workbook,
    write_xlsx,
)
from envs.workbook.opened import OpenedWorkbook
from envs.workbook.reader import Worker


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough to be kept: 6,000 rows of five kinds, gaps, and a second sheet."""
    path = tmp_path_factory.mktemp("large") / "large.xlsx"
    day = dt.date(2024, 1, 1)
    rows = {
        r: (f"text {r} & more", r, r / 4, day + dt.timedelta(days=r % 900), None, r % 2 == 0)
        for r in range(3, 12_003, 2)
    }
    write_xlsx(Workbook([Sheet("Data", rows, "FACADE"), Sheet("Few", {2: (None, "x")})]), path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "kept")


def is_kept(book: Workbook) -> bool:
    assert isinstance(book, OpenedWorkbook)
    return not isinstance(book.feed, Worker)


def keep(path: Path, store: BlockStore) -> Workbook:
    """Reads a file and waits until it is kept."""
    book = read_workbook(path, store=store)
    assert isinstance(book, OpenedWorkbook) and isinstance(book.feed, Worker)
    assert book.feed.keep()
    return book


def facts(book: Workbook) -> list:
    return [(s.name, s.tab_color, str(s.used()), s.rows, s.marks) for s in book.sheets]


def test_a_kept_book_is_the_one_that_was_read(large: Path, store: BlockStore) -> None:
    first = keep(large, store)
    again = read_workbook(large, store=store)
    assert not is_kept(first) and is_kept(again)
    assert facts(again) == facts(first)
    area = Area(5000, 1, 5049, 6)
    assert list(again["Data"].cells(area)) == list(first["Data"].cells(area))
    assert list(again["Data"].block(area)) == list(first["Data"].block(area))


def test_another_name_is_known_and_other_bytes_are_not(
    large: Path, store: BlockStore, tmp_path: Path
) -> None:
    keep(large, store).close()
    copy = tmp_path / "copy.xlsx"
    copy.write_bytes(large.read_bytes())
    assert is_kept(read_workbook(copy, store=store))
    book = openpyxl.load_workbook(large)
    book["Data"]["A3"] = "other"
    book.save(copy)
    found = read_workbook(copy, store=store)
    assert not is_kept(found) and found["Data"].rows[3][0] == "other"


def test_small_books_are_not_kept(store: BlockStore, tmp_path: Path) -> None:
    path = tmp_path / "small.xlsx"
    write_xlsx(Workbook([Sheet("S", {1: (1,)})]), path)
    read_workbook(path, store=store)
    assert list(store.folder.iterdir()) == []


def test_the_worker_finishes_after_its_host_hung_up(large: Path, store: BlockStore) -> None:
    import time

    read_workbook(large, store=store).close()
    deadline = time.monotonic() + 60
    while not list(store.folder.glob("*.book")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_kept(read_workbook(large, store=store))


@pytest.mark.parametrize("damage", ["cut", "footer", "empty", "middle"])
def test_a_broken_book_in_the_store_is_read_anew(
    large: Path, store: BlockStore, damage: str
) -> None:
    keep(large, store).close()
    (path,) = store.folder.iterdir()
    data = path.read_bytes()
    broken = {
        "cut": data[: len(data) // 2],
        "footer": data[:-8] + b"something",
        "empty": b"",
        "middle": data[:-400] + bytes(300) + data[-100:],
    }[damage]
    path.write_bytes(broken)
    book = read_workbook(large, store=store)
    assert not is_kept(book) and book["Few"].rows == {2: (None, "x")}


def test_the_oldest_go_where_there_are_too_many(large: Path, tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "kept", most=1000)
    for age, name in enumerate(("a", "b", "c")):
        path = store.folder / f"{name}.book"
        path.write_bytes(bytes(600))
        os.utime(path, (1000 + age, 1000 + age))
    keep(large, store)
    names = {p.name for p in store.folder.iterdir()}
    assert "c.book" in names and not {"a.book", "b.book"} & names and len(names) == 2


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="isn't private"):
        BlockStore(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't keep workbooks in"):
        BlockStore(tmp_path / "file")


def test_what_is_kept_is_private(large: Path, store: BlockStore) -> None:
    keep(large, store)
    (path,) = store.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.folder.stat().st_mode & 0o077 == 0


def test_a_closed_book_says_so(large: Path) -> None:
    book = read_workbook(large)
    book.close()
    with pytest.raises(WorkbookError, match="is closed; read it again"):
        list(book["Data"].block(Area(5000, 1, 5001, 2)))
