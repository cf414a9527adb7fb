"""Where a server's key comes from: a file, or the variable that its vendor's own clients read.

A key is never printed, and one out of the environment goes over TLS or to this machine alone:
whoever set it may not know where this program sends it.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

VARIABLES = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def find_key(dialect: str, url: str, file: str | Path | None = None) -> str | None:
    """The key in `file`, else in the dialect's variable, else None.

    Raises ValueError where the file doesn't hold one, and for a key of the environment that
    would go to another machine unencrypted; OSError for a file that can't be read.
    """
    if file is not None:
        return _checked(Path(file).read_bytes(), str(file))
    name = VARIABLES[dialect]
    found = os.environ.get(name, "").strip()
    if not found:
        return None
    if urlsplit(url).scheme != "https" and not is_loopback(url):
        raise ValueError(
            f"{name} isn't sent to another machine without TLS: use an https address, or give "
            "--api-key-file FILE where that network is yours"
        )
    return _checked(found.encode(), name)


def _checked(data: bytes, where: str) -> str:
    text = data.decode("ascii", "replace").strip()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{where} must hold the key alone: one line of letters, digits and signs")
    return text


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
