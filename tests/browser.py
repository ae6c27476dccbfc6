"""Headless Chromium, driven through the pipe of its DevTools.

with Browser.started(folder) as browser:
    browser.open(path, width=360)
    browser.run("document.title")
    assert browser.complaints == []
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", "--no-first-run", "--disable-extensions")  # fmt: skip


class Browser:
    """A browser with one tab. `complaints`: what is in the console of all pages so far."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers, self._number, self._session = commands, answers, 0, ""
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[Browser]:
        """Start it, with its profile in a folder."""
        to, commands = os.pipe()
        answers, back = os.pipe()
        command = f'exec "$0" "$@" 3<&{to} 4>&{back}'
        own = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={folder / 'profile'}"]
        with (
            open(commands, "wb") as given,
            open(answers, "rb") as got,
            open(folder / "stderr", "wb") as stderr,
        ):
            process = subprocess.Popen(["bash", "-c", command, *own], pass_fds=(to, back),
                                       stdout=stderr, stderr=stderr)  # fmt: skip
            os.close(to)
            os.close(back)
            try:
                yield cls(given, got)
            finally:
                process.kill()
                process.wait()

    def open(self, page: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Load a page, and wait for its script."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=800,
                   deviceScaleFactor=1, mobile=width < 640)  # fmt: skip
        self.media("screen", dark=dark)
        self._call("Page.navigate", url=page.resolve().as_uri())
        self.run("""new Promise(done => {
            const look = () => document.readyState === "complete" && (document.body.dataset.ready
                || !document.querySelector("script")) ? done(1) : setTimeout(look, 5);
            look();
        })""")

    def media(self, media: str, *, dark: bool = False) -> None:
        """Show the page as on this medium."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of the first element."""
        x, y = self.run(f"""(() => {{ const place = document.querySelector({selector!r});
            place.scrollIntoView({{block: "center"}});
            const box = place.getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self._call("Page.printToPDF", printBackground=False)["data"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _call(self, method: str, **given: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown",
                                    "Log.entryAdded"):  # fmt: skip
                self.complaints.append(json.dumps(answer["params"]))

    def _message(self) -> Any:
        found = bytearray()
        while (letter := self._answers.read(1)) != b"\0":
            assert letter, "the browser ended"
            found += letter
        return json.loads(found)
