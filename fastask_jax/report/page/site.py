"""The files of a page: its own, and those that hold the data of one or two runs.

A page that is opened from disk may load scripts but no JSON, so data are scripts too: each calls
`fastask.put(name, json)`.  What models and workbooks said is inside a JSON text inside a JavaScript
text, all of it ASCII with `<` escaped, and reaches the page as text alone.  As a second wall, the
page's content security policy runs no script that it didn't name itself.
"""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastask_jax.report.page.run import Run, changes, read_run

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "base.js", "charts.js", "overview.js", "compare.js", "list.js", "map.js", "trajectory.js",
    "main.js",
)  # fmt: skip
# Directories that `write_site` may write over have it in their index.html.
GENERATOR = '<meta name="generator" content="fastask view">'
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
COLUMNS = (
    "id", "split", "step", "group", "sample", "task", "type", "family", "difficulty", "outcome",
    "answer", "truth", "stop", "reward", "turns", "cells", "tokens", "question",
)  # fmt: skip


class Site:
    """The page of one run, or of two side by side: files by name.

    generation: a text that changes with the runs' files; a page only fits data of its own.
    Raises as `read_run`, and ValueError for a number of runs other than one or two.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        if not 1 <= len(runs) <= 2:
            raise ValueError(f"a page shows one run or two, not {len(runs)}")
        self._paths = [Path(run) for run in runs]
        self.runs: list[Run] = []
        self.generation = ""
        self.refresh()

    def refresh(self) -> None:
        """Reads the runs again where their files have changed."""
        now = "|".join(changes(path) for path in self._paths)
        generation = sha256(now.encode()).hexdigest()[:12]
        if generation != self.generation:
            self.runs = [
                read_run(path, name)
                for path, name in zip(self._paths, _names(self._paths), strict=True)
            ]
            self.generation = generation

    def names(self) -> list[str]:
        """The names of all files."""
        found = ["index.html", "assets/page.css", *(f"assets/{name}" for name in SCRIPTS)]
        found.append("data/runs.js")
        for i, run in enumerate(self.runs):
            found.append(f"data/r{i}-list.js")
            found += [f"data/r{i}-{chunk}.js" for chunk in range(len(run.chunks))]
        return found

    def file(self, name: str, live: bool = False) -> bytes:
        """A file's bytes; live: for a server, whose data may become another generation's.

        Raises KeyError for any name that isn't one of `names`.
        """
        if name == "index.html":
            return self._index(live)
        if name.startswith("assets/") and name.removeprefix("assets/") in (*SCRIPTS, "page.css"):
            return (ASSETS / name.removeprefix("assets/")).read_bytes()
        if name == "data/runs.js":
            return _script("runs", [self._run(run) for run in self.runs])
        for i, run in enumerate(self.runs):
            if name == f"data/r{i}-list.js":
                return _script(f"r{i}-list", _table(run.episodes))
            part = name.removeprefix(f"data/r{i}-").removesuffix(".js")
            if part.isascii() and part.isdigit() and name == f"data/r{i}-{int(part)}.js":
                if int(part) < len(run.chunks):
                    return _script(f"r{i}-{int(part)}", run.details(int(part)))
        raise KeyError(name)

    @staticmethod
    def _run(run: Run) -> dict[str, Any]:
        told = {"name": run.name, "episodes": len(run.episodes), "chunks": run.chunks}
        return told | run.overview

    def _index(self, live: bool) -> bytes:
        nonce = secrets.token_urlsafe(16)
        query = f"?g={self.generation}" if live else ""
        title = " and ".join(run.name for run in self.runs)
        scripts = [f"assets/{SCRIPTS[0]}", "data/runs.js", *(f"assets/{s}" for s in SCRIPTS[1:])]
        page = (ASSETS / "index.html").read_text("utf-8")
        values = {
            "GENERATOR": GENERATOR,
            "TITLE": html.escape(title),
            "NONCE": nonce,
            "QUERY": query,
            "SCRIPTS": "\n".join(
                f'<script nonce="{nonce}" src="{name}{query}"></script>' for name in scripts
            ),
        }
        # At once: a title may look like one of the marks.
        page = re.sub("%([A-Z]+)%", lambda mark: values[mark[1]], page)
        return page.encode("utf-8", "replace")


def write_site(runs: Sequence[Path], folder: Path) -> Path:
    """Writes the page of one run or two to `folder`; returns its index.html, which opens from disk.

    Raises FileExistsError where the folder holds anything but an earlier page.
    """
    folder, index = Path(folder), Path(folder) / "index.html"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give a folder to --export")
    if folder.is_dir() and any(folder.iterdir()):
        if not index.is_file() or GENERATOR not in index.read_text("utf-8", "replace"):
            raise FileExistsError(
                f"{folder} holds other files; give an empty folder, or one that doesn't exist yet"
            )
    site = Site(runs)
    (folder / "assets").mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    wanted = site.names()
    for name in wanted:  # index.html first: an export that was cut off can be made again
        (folder / name).write_bytes(site.file(name))
    for stale in (folder / "data").glob("r[01]-*.js"):
        if f"data/{stale.name}" not in wanted:
            stale.unlink()
    return index


def _names(paths: Sequence[Path]) -> list[str]:
    """What to call the runs: their folders' names, longer where those are alike."""
    found = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, found)) + 1):
        names = ["/".join(parts[-count:]) for parts in found]
        if len(set(names)) == len(names):
            return names
    return [f"{paths[0].name} ({i})" for i in range(1, len(paths) + 1)]  # a run beside itself


def _table(episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The list by columns; a text is its place among `texts`, which holds each once."""
    places: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for episode in episodes:
        for name in COLUMNS:
            value = episode[name]
            if isinstance(value, str):
                value = places.setdefault(value, len(places))
            columns[name].append(value)
    return {"count": len(episodes), "texts": list(places), "columns": columns}


def _script(name: str, value: Any) -> bytes:
    """A script that hands `value` to the page."""
    data = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\\", "\\\\").replace("'", "\\'")
    return f"fastask.put('{name}','{data}');\n".encode("ascii")
