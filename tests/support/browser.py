"""A headless Chromium, driven by its own DevTools protocol over a pair of pipes.

https://chromedevtools.github.io/devtools-protocol: JSON objects, each followed by a nul byte.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it needs privileges that containers lack; all that is loaded is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
)


# The protocol wants its pipes to be descriptors 3 and 4.
_START = """
import os, sys
ends = [os.dup(int(fd)) for fd in sys.argv[1:3]]
pipes = [os.dup(fd) if fd in (3, 4) else fd for fd in ends]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests: list[str] = []
        """The address of everything that it has loaded or tried to."""
        self.problems: list[str] = []
        """Exceptions, and errors on its console."""
        self._reader = reader
        self._writer = writer
        self._session: str | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read_forever(self) -> None:
        while message := await self._reader.readuntil(b"\0"):
            event = json.loads(message[:-1])
            if reply := self._replies.pop(event.get("id"), None):
                reply.set_result(event)
            else:
                self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"]["exception"]["description"])
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.problems.append(details["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        answer = await asyncio.wait_for(reply, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def open(self, url: str) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """What a JavaScript expression comes to."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    async def text(self, selector: str) -> str:
        return await self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    async def until(self, script: str, timeout_s: float = 60.0) -> None:
        """Wait until a JavaScript expression is true. Raises `TimeoutError`."""
        condition = f"new Promise(done => {{ const look = () => ({script}) ? done() : "
        condition += "setTimeout(look, 20); look(); })"
        await asyncio.wait_for(self.run(condition), timeout_s)

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Show the page on a screen of this size, in light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": scheme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """A browser with a fresh profile in `profile`, until the block ends."""
    binary = find_browser()
    assert binary is not None, "no browser"
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _START,
        str(from_us),
        str(to_us),
        binary,
        *FLAGS,
        f"--user-data-dir={profile}",
        pass_fds=(from_us, to_us),
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    reader, writer = await _streams(from_browser, to_browser)
    page = Page(reader, writer)
    reading = asyncio.create_task(page.read_forever())
    try:
        yield page
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if process.returncode is None:
            process.terminate()
        await process.wait()
        writer.close()


async def _streams(
    read_end: int, write_end: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(write_end, "wb")
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
