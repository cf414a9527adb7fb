"""A headless Chromium, driven over its DevTools pipe: no driver program, no package, no port.

Messages of the DevTools protocol are JSON texts that end in a zero byte, on the file descriptors
3 (to the browser) and 4 (from it).  One page; commands wait for their answers; what scripts threw
is kept.  Left out: everything else that a browser can do.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--mute-audio",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
    # Nothing but this machine can be asked for anything.
    "--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=127.0.0.1;localhost",
)  # fmt: skip
_KEYS = {
    "Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
}  # fmt: skip


def find_chromium() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser refused a command, ended, or didn't answer in time."""


class Browser:
    """One page of a fresh profile.  A context manager.

    size: width and height of the page, in CSS pixels.  dark: what the page takes as the person's
    preference.  `problems`: what scripts threw, and what the console told as error.
    """

    def __init__(self, path: str, size: tuple[int, int] = (1280, 860), timeout: float = 30) -> None:
        self._timeout, self._count, self._buffer = timeout, 0, b""
        self.problems: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Out of the way of 3 and 4, which are the browser's ends.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)
        quiet = os.open(os.devnull, os.O_RDWR)
        try:
            self._pid: int | None = os.posix_spawn(
                path,
                [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                dict(os.environ),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, ends[0], 3),
                    (os.POSIX_SPAWN_DUP2, ends[1], 4),
                    *((os.POSIX_SPAWN_DUP2, quiet, stream) for stream in (0, 1, 2)),
                ],
                setpgroup=0,
            )
        finally:
            for end in (*ends, quiet):
                os.close(end)
        try:
            self._session = self._attach()
            for domain in ("Page", "Runtime"):
                self.call(f"{domain}.enable")
            self.resize(*size)
        except BaseException:
            self.close()
            raise

    def _attach(self) -> str | None:
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        return self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser with all its processes, and forgets its profile."""
        if self._pid is not None:
            try:
                os.killpg(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.waitpid(self._pid, 0)
            self._pid = None
            os.close(self._write)
            os.close(self._read)
        for _ in range(20):  # its last processes may still write
            shutil.rmtree(self._profile, ignore_errors=True)
            if not os.path.exists(self._profile):
                break
            time.sleep(0.05)

    # -- the protocol -------------------------------------------------------------------------

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command.  Raises BrowserError where there is none."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except BrokenPipeError:
            raise BrowserError(f"{method}: the browser has ended") from None
        deadline = time.monotonic() + self._timeout
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise BrowserError(f"{what}: no answer in {self._timeout:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"{what}: the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            found = parameters["exceptionDetails"]
            self.problems.append(found.get("exception", {}).get("description") or found["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(" ".join(str(a.get("value")) for a in parameters["args"]))

    # -- what a person does ---------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Goes to an address; waits until the document is there."""
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, as JSON; promises are waited for."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            found = result["exceptionDetails"]
            raise BrowserError(found.get("exception", {}).get("description") or found["text"])
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 10.0) -> None:
        """Waits until an expression holds; BrowserError if it doesn't in time."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"{condition} isn't so after {seconds:g} s")
            time.sleep(0.01)

    def press(self, *keys: str) -> None:
        for key in keys:
            name, code, text = _KEYS.get(key, (key, ord(key.upper()[0]), key))
            common = {"key": name, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """A click into the middle of the first element of a selector."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return"
            " null; e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        if box is None:
            raise BrowserError(f"nothing on the page is {selector}")
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def resize(self, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, clip: Sequence[float] | None = None) -> None:
        """A PNG of what is in sight; clip: x, y, width, height of a part of the whole page."""
        more: dict[str, Any] = {}
        if clip is not None:
            box = dict(zip(("x", "y", "width", "height"), clip, strict=True))
            more = {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        Path(path).write_bytes(base64.b64decode(data))


def version(path: str) -> str:
    """What the program calls itself."""
    found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    return found.stdout.strip()
