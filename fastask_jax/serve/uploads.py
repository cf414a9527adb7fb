"""The body of /v1/ask: a form with one workbook and one question, read within limits.

The file goes to a folder of the server's own, which nobody else can look into, under a name made
of the one that the client gave: what is in a .csv file has that name.  Base64 in JSON isn't
taken: it would cost a third more, and the whole file in memory.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from fastask_jax.serve.bodies import Refused

_FORM = "send a form (multipart/form-data) with the fields file, a workbook, and question, a text"
# Beside the file: the question, and the form's own lines.
_BESIDE = 1 << 16
_NAME = 80


@dataclass(frozen=True)
class Upload:
    """name: that the client gave, made harmless.  question: with single spaces."""

    file: BinaryIO
    name: str
    question: str

    def save(self, folder: Path) -> Path:
        path = folder / self.name
        with path.open("xb") as out:
            shutil.copyfileobj(self.file, out, 1 << 20)
        return path


async def read_upload(request: Request, most: int, characters: int) -> Upload:
    """most: bytes of the file.  characters: of the question.  Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Refused(415, _FORM)
    form = await _form(request, most)
    try:
        return _checked(form, most, characters)
    except BaseException:
        await form.close()
        raise


async def _form(request: Request, most: int) -> FormData:
    left = most + _BESIDE

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _too_large(most)
        return message

    limited = Request(request.scope, receive)
    try:
        return await limited.form(max_files=1, max_fields=2, max_part_size=_BESIDE)
    except (Refused, ClientDisconnect):
        raise
    except HTTPException as error:
        reason = " ".join(str(error.detail).split())[:200]
        raise Refused(400, f"the form can't be read ({reason}): {_FORM}") from None
    except (ValueError, KeyError, LookupError, AttributeError, AssertionError) as error:
        # Headers of parts that no client writes break the parser in ways of their own.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Refused(400, f"the form can't be read ({reason}): {_FORM}") from None


def _checked(form: FormData, most: int, characters: int) -> Upload:
    found = dict(form.multi_items())
    if len(found) < len(form.multi_items()) or set(found) - {"file", "question"}:
        raise Refused(400, f"the form holds something else, or something twice: {_FORM}")
    file, question = found.get("file"), found.get("question")
    if not isinstance(file, UploadFile):
        raise Refused(400, f"file is missing: {_FORM}", "file")
    if not isinstance(question, str):
        raise Refused(400, f"question is missing: {_FORM}", "question")
    question = " ".join(question.split())
    if not question:
        raise Refused(400, "the question is empty; ask about one value in the workbook", "question")
    if len(question) > characters:
        raise Refused(400, f"the question has more than {characters:,} characters", "question")
    if (file.size or 0) > most:
        raise _too_large(most)
    return Upload(file.file, harmless(file.filename or ""), question)


def _too_large(most: int) -> Refused:
    text = f"the workbook is larger than {most:,} bytes: send a smaller one"
    return Refused(413, text, "file", Connection="close")


def harmless(name: str) -> str:
    """The last part of a file's name, of characters that no shell, terminal or path minds."""
    name = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c if c.isalnum() or c in " ._-()" else "_" for c in name).strip(" .")
    encoded = kept.encode("utf-8", "replace")[-_NAME:].decode("utf-8", "ignore")
    return encoded.strip(" .") or "workbook"
