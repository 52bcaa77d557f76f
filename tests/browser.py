"""Headless Chromium, driven over a pipe by its DevTools protocol. Tests that need it skip if it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
PROGRAM = next(filter(None, map(shutil.which, PROGRAMS)), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=f"needs a browser: one of {', '.join(PROGRAMS)}")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
# Becomes the browser, which reads file 3 and writes file 4.
CONNECT = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
DEADLINE_SECONDS = 60.0


class Browser:
    """One page of a browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._number, self._rest, self._session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        """Events of the page so far."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._reader, 1 << 20)
            assert received, "the browser has ended"
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, in CSS pixels, and wait until it is drawn."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < deadline
            self.evaluate("1")
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, in which observers of sizes have drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of a JavaScript expression."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    @property
    def errors(self) -> list[str]:
        """Errors and warnings of the page since it was opened: exceptions, blocked content."""
        logged = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in logged]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page requested since it was opened."""
        sent = (event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [each["request"]["url"] for each in sent]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser without network and profile; end it after the block."""
    assert PROGRAM is not None
    their_input, our_output = os.pipe()
    our_input, their_output = os.pipe()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ends = (their_input, their_output)
        command = [sys.executable, "-c", CONNECT, *map(str, ends), PROGRAM, *FLAGS, f"--user-data-dir={profile}"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=ends)
        os.close(their_input)
        os.close(their_output)
        try:
            yield Browser(our_input, our_output)
        finally:
            process.kill()
            process.wait()
            os.close(our_input)
            os.close(our_output)
