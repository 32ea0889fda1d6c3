"""Chromium without a screen, driven through its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "/": 191}
"""Virtual key codes; Enter also needs its text."""


@dataclass
class Page:
    """One tab."""

    browser: Browser
    session: str
    console: list[str] = field(default_factory=list)
    """What the page wrote to its console, and what it failed to load or run."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self.browser.call(method, self.session, **parameters)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression holds in the page, looked at with every frame."""
        look = f"if ({condition}) done(); else requestAnimationFrame(look);"
        await self.evaluate(
            f"new Promise((done) => {{ const look = () => {{ {look} }}; look(); }})"
        )

    async def press(self, key: str) -> None:
        told: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", "/": "/"}.get(key)
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {})
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move the mouse from one point of the window to another with its button down."""
        await self._mouse("Moved", start, button="none", buttons=0)
        await self._mouse("Pressed", start)
        for share in (0.5, 1.0):
            x, y = (one + share * (two - one) for one, two in zip(start, end, strict=True))
            await self._mouse("Moved", (x, y))
        await self._mouse("Released", end, buttons=0)

    async def _mouse(self, kind: str, at: tuple[float, float], **changes: Any) -> None:
        given = {"type": f"mouse{kind}", "x": at[0], "y": at[1], "clickCount": 1}
        await self.call(
            "Input.dispatchMouseEvent", **{**given, "button": "left", "buttons": 1, **changes}
        )

    async def names(self) -> list[tuple[str, str]]:
        """Role and name of all that a screen reader finds."""
        told = await self.call("Accessibility.getFullAXTree")
        return [
            (each["role"]["value"], each.get("name", {}).get("value", ""))
            for each in told["nodes"]
            if not each.get("ignored")
        ]

    async def picture(self, height: int | None = None) -> bytes:
        """The whole page, or its upper part, as a PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        told = await self.call(
            "Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True
        )
        return base64.b64decode(told["data"])


class Browser:
    """A running Chromium."""

    def __init__(self, reads: trio.lowlevel.FdStream, writes: trio.lowlevel.FdStream) -> None:
        self._reads, self._writes = reads, writes
        self._number = 0
        self._answers: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def listen(self) -> None:
        """Give answers to those who asked, and keep what consoles say; until cancelled."""
        held = b""
        async for part in self._reads:
            *messages, held = (held + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    await self._answers.pop(message["id"]).send(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    if message["method"] in ("Log.entryAdded", "Runtime.exceptionThrown"):
                        page.console.append(json.dumps(message["params"]))
                    if message["method"] == "Runtime.consoleAPICalled":
                        page.console.append(json.dumps(message["params"]["args"]))

    async def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        send, receive = trio.open_memory_channel[dict[str, Any]](1)
        self._answers[self._number] = send
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        await self._writes.send_all(json.dumps(message).encode() + b"\0")
        with trio.fail_after(60):
            told = await receive.receive()
        assert "error" not in told, (method, told)
        found: dict[str, Any] = told["result"]
        return found

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Page:
        """A page of this width in this colour scheme, once it has drawn its first state."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await page.call(f"{domain}.enable")
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelector('#link.on')")
        await page.until("new Promise(requestAnimationFrame)")
        return page


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """A browser with its profile in `folder`."""
    assert BROWSER is not None
    its_input, writes = os.pipe()
    reads, its_output = os.pipe()
    # It expects the pipes as its files 3 and 4.
    command = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", BROWSER, *FLAGS]
    process = await trio.lowlevel.open_process(
        [*command, f"--user-data-dir={folder}"],
        pass_fds=(its_input, its_output),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    # The nursery is inside: it is cancelled last, and a stream that closes in a cancelled scope
    # would replace the test's own failure.
    async with (
        trio.lowlevel.FdStream(reads) as from_it,
        trio.lowlevel.FdStream(writes) as to_it,
        trio.open_nursery() as nursery,
    ):
        browser = Browser(from_it, to_it)
        nursery.start_soon(browser.listen)
        try:
            yield browser
        finally:
            with trio.CancelScope(shield=True):
                with trio.move_on_after(5):
                    await browser.call("Browser.close")
                process.kill()
                await process.wait()
            nursery.cancel_scope.cancel()
