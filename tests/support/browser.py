"""A real headless Chromium over its debugging pipe: navigate, press keys, evaluate, look at errors."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needs import where

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--mute-audio")


class Tab:
    """One page. `errors` gathers what its console, its exceptions and its content policy complain about."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._held, self._number = send, receive, b"", 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send a command and wait for what it returns."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                found: dict[str, Any] = heard["result"]
                return found

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            self._held += os.read(self._receive, 1 << 20)
        line, _, self._held = self._held.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        if "method" in heard:
            self._events.append(heard)
            self._note(heard["method"], heard.get("params", {}))
        return heard

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(json.dumps(about["args"]))
        if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])

    def open(self, url: str) -> None:
        """Go there and wait until the page has loaded."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._hear()
        self._events.clear()

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait for an expression to be true."""
        ends = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < ends, f"waited in vain for {expression}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and what its user prefers."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextmanager
def browsing(folder: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, whose profile lies in `folder`."""
    (there_in, send), (receive, there_out) = os.pipe(), os.pipe()
    words = [where("chromium"), *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]

    def attach() -> None:
        one, other = os.dup(there_in), os.dup(there_out)
        os.dup2(one, 3)
        os.dup2(other, 4)

    process = subprocess.Popen(
        words, pass_fds=(3, 4), preexec_fn=attach, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(there_in)
    os.close(there_out)
    try:
        yield Tab(send, receive)
    finally:
        process.terminate()
        process.wait(30)
        os.close(send)
        os.close(receive)
