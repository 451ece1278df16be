"""ConsoleProcess: the web console of a run, a child that only reads. Knows nothing of what it shows."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from agentlightning.errors import MissingExtraError
from agentlightning.runtime.children import listen, start_child, stop_child

END_S = 5.0
"""Seconds that it gets to end: nothing is lost with it."""


def check_console() -> None:
    """MissingExtraError where the console cannot be started."""
    for package, extra in (("gradio", "console"), ("fastapi", "server")):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)


@asynccontextmanager
async def console_process(url: str, key: str, log: Path, withhold: Iterable[str]) -> AsyncIterator[str]:
    """Starts the console of the store at `url` on a free port of this machine; yields its own URL. It answers some seconds
    later. `key`: of the server at `url`; `withhold`: variables that it does not inherit."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        child = start_child(
            ["agentlightning.console", "--fd", str(listener.fileno())],
            secrets={"AGL_STORE": url, "AGL_SERVER_KEY": key},
            withhold=withhold,
            pass_fds=(listener.fileno(),),
            log=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await asyncio.to_thread(stop_child, child, END_S)
