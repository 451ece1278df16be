"""A console as a process, and Debian's Chromium before it, of which every request is written down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NODE = Path(__file__).parent / "node"
AXE = NODE / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = os.environ.get("SCREENSHOTS")
"""A folder for screenshots; none are made without it."""
TIMEOUT_MS = 200_000
"""Long: a page takes a second, and on a machine that does ten other things many."""


@contextmanager
def console(*arguments: str, **variables: str) -> Iterator[str]:
    """``agl console`` on a free port, with these variables; yields its URL, which has a token on loopback."""
    command = [sys.executable, "-m", "agentlightning", "console", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("console http://"), line
        yield line.split()[1]
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def page_at(address: str, page: str) -> str:
    """The URL of a page of the console at this address, with the address's token."""
    base, token = address.split("/?")
    return f"{base}{page}{'&' if '?' in page else '?'}{token}"


@dataclass
class Visitor:
    """A browser's page."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, url: str) -> str:
        """Goes there; returns the text of the page once it is rendered."""
        self.page.goto(url)
        self.page.wait_for_selector("h1")
        return str(self.page.inner_text("body"))

    def elsewhere(self) -> list[str]:
        """Requests that left this machine."""
        places = [urlsplit(url) for url in self.requests]
        return [
            place.geturl() for place in places if place.scheme in ("http", "https") and place.hostname != "127.0.0.1"
        ]

    def violations(self) -> list[str]:
        """What axe-core finds serious or critical."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("() => axe.run()")
        return [
            f"{one['id']}: {one['nodes'][0]['html']:.300}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def small_targets(self) -> list[str]:
        """Buttons, fields and links of the navigation that a thumb misses: less than 44 px high."""
        found = self.page.evaluate(
            """() => [...document.querySelectorAll("button, select, input:not([type=hidden]), nav a, .actions a, .links a")]
            .filter((one) => one.checkVisibility() && !one.matches("[type=checkbox], [type=range]"))
            .filter((one) => one.getBoundingClientRect().height < 44).map((one) => one.outerHTML.slice(0, 120))"""
        )
        return list(found)

    def picture(self, name: str) -> None:
        """A screenshot, where they are asked for."""
        if PICTURES:
            self.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def first_screen(folder: Path, call_at: int) -> None:
    """The README's picture: the curve of a run next to the tokens of one of its calls, cut from the pictures in `folder`.

    call_at: the pixel at which the call's card begins.
    """
    from PIL import Image

    run = Image.open(folder / "console-run.png").convert("RGB").crop((248, 105, 1260, 654)).resize((793, 430))
    replay = Image.open(folder / "console-replay.png").convert("RGB").crop((752, call_at - 10, 1258, call_at + 420))
    both = Image.new("RGB", (run.width + replay.width, 430))
    both.paste(run, (0, 0))
    both.paste(replay, (run.width, 0))
    both.save(folder / "first-screen.png", optimize=True)


@contextmanager
def visitor(scheme: str = "light", width: int = 1280, **options: Any) -> Iterator[Visitor]:
    """A new browser of a person who prefers a scheme of colours, on a screen of this width in CSS pixels."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, **options)
            yield Visitor(context.new_page())
        finally:
            browser.close()
