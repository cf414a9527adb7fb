"""Serves the page of a run on loopback, and reads the run again when the page is loaded anew.

Only names that the site knows are answered: no path of a request ever reaches the file system.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any

from fastask_jax.report.page.site import TYPES, Site


class PageServer(ThreadingHTTPServer):
    """An HTTP server of one site.  port: 0 takes a free one; `url` says which."""

    daemon_threads = True

    def __init__(self, site: Site, host: str = "127.0.0.1", port: int = 0) -> None:
        self.site, self.lock = site, threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self._name}:{self.server_address[1]}/"

    @property
    def _name(self) -> str:
        """The address that it listens on, as addresses of pages have it."""
        host = str(self.server_address[0])
        return f"[{host}]" if ":" in host else host

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a browser that has gone before it had all; others are faults of ours."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def is_own_name(self, host: str) -> bool:
        """Whether a request's Host may be answered.  On loopback only its own names: a page of
        another site can't read a run by making its name point here."""
        if not ipaddress.ip_address(str(self.server_address[0])).is_loopback:
            return True
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name in ("localhost", self._name)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "fastask", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if not self.server.is_own_name(self.headers.get("Host", "")):
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, b"unknown host\n", "text/plain", body)
        site = self.server.site
        try:
            address = urllib.parse.urlsplit(self.path)
            name = address.path.removeprefix("/") or "index.html"
            asked = urllib.parse.parse_qs(address.query).get("g", [""])[0]
            with self.server.lock:
                if name == "index.html":
                    site.refresh()
                elif name.startswith("data/") and asked != site.generation:
                    raise ValueError("the run has changed; reload the page")
                data = site.file(name, live=True)
        except KeyError:
            return self._send(HTTPStatus.NOT_FOUND, b"no such file\n", "text/plain", body)
        except (OSError, ValueError) as error:
            text = f"{error}\n".encode("utf-8", "replace")
            return self._send(HTTPStatus.CONFLICT, text, "text/plain", body)
        self._send(HTTPStatus.OK, data, TYPES[PurePosixPath(name).suffix], body)

    def _send(self, status: HTTPStatus, data: bytes, kind: str, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal belongs to whoever started the server."""


def serve(site: Site, host: str, port: int, opens: bool = False) -> None:
    """Serves until Ctrl-C.  opens: shows the page in the browser of this machine."""
    with PageServer(site, host, port) as server:
        print(f"the page of {', '.join(run.name for run in site.runs)}: {server.url}", flush=True)
        print("Ctrl-C ends it", flush=True)
        if opens:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # how it is meant to end
            print()
