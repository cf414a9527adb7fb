"""The folders whose workbooks a client may ask about, and nothing beside them.

A path is followed to its end, links included, before anything is opened, and has to end in one of
the folders.  What lies elsewhere is refused in the same words whether it is there or not.

Left out: whoever can write in these folders could still swap a file for a link between this look
and the opening; keep folders of strangers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class OutOfPlace(ValueError):
    """The path leads nowhere that may be read; the text says why, in the client's own words."""


class Places:
    """folders: at least one.  Raises ValueError for what isn't a folder."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        if not folders:
            raise ValueError("name at least one folder whose workbooks may be asked about")
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(f"{folder} isn't a folder: name those that hold workbooks")
        self.folders = tuple(Path(folder).resolve() for folder in folders)

    def __str__(self) -> str:
        return ", ".join(map(str, self.folders))

    def find(self, path: str) -> Path:
        """The file that a client means; relative paths are looked for in each folder in turn.

        Raises OutOfPlace.
        """
        shown = repr(path[:200])
        if not path.strip() or "\0" in path or len(path) > 4096:
            raise OutOfPlace(f"{shown} isn't a path: give that of a workbook in {self}")
        inside = False
        for folder in self.folders:
            try:
                found = (folder / path).resolve()
                fits = any(found.is_relative_to(place) for place in self.folders)
                if fits and found.exists():
                    return found
            except (OSError, RuntimeError, ValueError):  # loops of links, names too long
                raise OutOfPlace(f"{shown} can't be followed") from None
            inside = inside or fits
        if inside:
            raise OutOfPlace(f"no such workbook: {shown} in {self}; give its path from there on")
        raise OutOfPlace(f"{shown} lies outside of {self}: no other folder may be read")
