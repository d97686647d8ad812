"""A headless Chromium, driven over its DevTools protocol with nothing but the standard library."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `requests` and `complaints` (console errors, exceptions, violations) gather as they happen."""

    def __init__(self, send: int, receive: int, timeout: float) -> None:
        self._send, self._receive, self._timeout = send, receive, timeout
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.events: list[str] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, file: Path, width: int, height: int = 800, *, dark: bool = False) -> None:
        """Loads a local file in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._read()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which runs outside the page's content security policy."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Moves the pointer to the middle of the first part of an element, scrolled into view."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        parameters: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            parameters["clip"] = {**size, "scale": 1}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"]))

    def close_browser(self) -> None:
        """Asks the browser itself, not the tab, to end."""
        self._session = None
        with contextlib.suppress(RuntimeError):  # it may be gone before it answers
            self.call("Browser.close")

    def _read(self) -> dict[str, Any]:
        """The next message; what happened is noted on the way."""
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._unread:
            if not select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self._timeout} s")
            piece = os.read(self._receive, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._unread += piece
        line, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method is None:
            return
        self.events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append("a dialog was opened")
            raise RuntimeError("a dialog was opened")


@contextlib.contextmanager
def chromium(path: str, timeout: float = 60.0) -> Iterator[Page]:
    """Starts the browser with a profile of its own and stops it afterwards."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            path,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # for root, in a container; the pages are our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        # The browser reads commands from descriptor 3 and answers on 4.
        wrapper = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", wrapper, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(send, receive, timeout)
            yield page
            page.close_browser()
        finally:
            os.close(send)
            os.close(receive)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
