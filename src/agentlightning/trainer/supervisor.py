"""Supervisor: starts the server, the workers and the console as child processes, and replaces the first two if they die.

Driven by the trainer, or by `agl serve --gateways`. The supervisor binds the server's socket itself and hands it down, so
that a restarted server keeps its address and calls that arrive meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agentlightning.errors import AgentError, AgentLightningError, GatewayError, InputError
from agentlightning.runtime.children import SERVER_END_S, listen, start_child, stop_child
from agentlightning.runtime.watchdog import Watchdog
from agentlightning.store.server_keys import client_key

log = logging.getLogger(__name__)

WORKER_STOP_TIMEOUT_S = 10.0
"""Seconds that a worker has to end its agents, before it is killed."""
MAX_RESTARTS = 5
"""Unexpected ends of one child within `RESTART_WINDOW_S` after which it is given up."""
RESTART_WINDOW_S = 60.0
SERVER_PAUSES_S = (0.0, 1.0, 3.0, 9.0, 27.0)
"""Before each start of a server that ended: where its database is away it cannot start, and that lasts up to a minute."""
EXIT_INPUT_ERROR = 2
TAIL_BYTES = 8192
"""Part of a log that is searched for a child's last words."""


@dataclass
class _Child:
    name: str
    arguments: list[str]
    log: Path | None = None
    """None: this process's own output."""
    pass_fds: tuple[int, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    process: subprocess.Popen[bytes] | None = None
    restartable: bool = True
    answered: bool = True
    """False for a server that has not answered yet: one that ends now says why it cannot start."""
    log_start: int = 0
    """Offset in the log at which the output of the present process begins."""
    serves: bool = False
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS))


class Supervisor:
    """Owns the server and worker processes of one run folder, or without one those of `agl serve`."""

    def __init__(
        self,
        folder: Path | None,
        store_url: str,
        server_key: str | None = None,
        watchdog: Watchdog | None = None,
        *,
        keys: Mapping[str, Mapping[str, str]] | None = None,
        withhold: Iterable[str] = (),
    ) -> None:
        """keys: further secrets for a kind of child, "server" or "worker"; withhold: variables that neither inherits."""
        self.server_key = server_key or client_key(store_url) or f"sk-agl-server-{secrets.token_urlsafe(24)}"
        self._folder = folder
        self._store_url = store_url
        self._watchdog = watchdog or Watchdog()
        self._start_timeout_s = self._watchdog.limits.start_timeout_s
        self._keys = {"server": {}, "worker": {}, **(keys or {})}
        self._withhold = set(withhold)
        self._children: dict[str, _Child] = {}
        self._descriptor: int | None = None
        """The servers' socket."""
        self._stopping = False
        self._failure: asyncio.Future[None] | None = None

    async def start_server(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        arguments: Sequence[str] = (),
        gateways: Sequence[Sequence[str]] = ((),),
    ) -> str:
        """Start the server process and wait until it answers; returns its URL. GatewayError where it cannot.

        `arguments`: further ones of ``python -m agentlightning.gateway``. `gateways`: those of each process alone; all of
        them accept from the one socket, so that nothing waits for one that was killed.
        """
        try:
            listener = listen(host, port)
        except OSError as cause:
            why = cause.strerror or cause
            raise GatewayError(f"port {port} on {host} cannot be used: {why}; choose another") from cause
        with listener:
            address = listener.getsockname()
            self._descriptor = os.dup(listener.fileno())
            os.set_inheritable(self._descriptor, True)
        for number, own in enumerate(gateways):
            name = "server" if len(gateways) == 1 else f"gateway-{number}"
            self._launch(self._server(name, self._descriptor, [*arguments, *own]))
        servers = [child for child in self._children.values() if child.serves]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"{'https' if '--tls-cert' in arguments else 'http'}://{shown}:{address[1]}"
        await self._ready(servers[0], f"{url}/healthz")
        for child in servers:
            child.answered = True
        return url

    def _server(self, name: str, descriptor: int, arguments: Sequence[str]) -> _Child:
        return _Child(
            name=name,
            arguments=["agentlightning.gateway", "--fd", str(descriptor), *arguments],
            # The store's URL may hold a password.
            secrets={**self._keys["server"], "AGL_SERVER_KEY": self.server_key, "AGL_STORE": self._store_url},
            pass_fds=(descriptor,),
            restartable=not self._store_url.startswith("memory:"),
            answered=False,
            serves=True,
        )

    def start_workers(self, count: int, arguments: Sequence[str], token: str, python: str = sys.executable) -> None:
        """Start `count` workers, each ``python -m agentlightning.runner --child … arguments``.

        token: their key; python: what they run on."""
        for number in range(count):
            name = f"worker-{number}"
            self._launch(
                _Child(
                    name=name,
                    arguments=["agentlightning.runner", "--child", "--worker-id", name, *arguments],
                    secrets={**self._keys["worker"], "AGL_SERVER_KEY": token},
                    python=python,
                )
            )

    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {child.name: child.process.pid for child in self._children.values() if child.process is not None}

    async def watch(self) -> None:
        """Never returns; raises when a child cannot be kept running. Run it beside the work."""
        await asyncio.shield(self._failed())  # a watch that is no longer needed is cancelled, the next one watches on

    async def stop_workers(self) -> None:
        """End the workers, before everything ends: from now on nothing is started again."""
        self._stopping = True
        workers = [child for child in self._children.values() if not child.serves]
        await asyncio.gather(*(asyncio.to_thread(_end, child) for child in workers))

    async def stop(self) -> None:
        """End the workers first, then the server, which finishes what it accepted."""
        await self.stop_workers()
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # seen, even if it came when nobody was watching
        servers = [child for child in self._children.values() if child.serves]
        await asyncio.gather(*(asyncio.to_thread(_end, child) for child in servers))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._children.clear()

    def _failed(self) -> asyncio.Future[None]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    def _launch(self, child: _Child) -> None:
        if self._folder is not None:
            child.log = self._folder / "logs" / f"{child.name}.log"
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.log_start = child.log.stat().st_size if child.log.exists() else 0
        child.process = self._watchdog.start(
            child.name,
            child.arguments,
            stall_timeout_s=self._watchdog.limits.hang_timeout_s,
            secrets=child.secrets,
            withhold=self._withhold,
            pass_fds=child.pass_fds,
            env={"PYTHONUNBUFFERED": "1"},
            log=child.log,
            python=child.python,
        )
        self._children[child.name] = child
        loop = asyncio.get_running_loop()
        _on_exit(child.process, lambda code: loop.call_soon_threadsafe(self._ended, child, code))

    def _ended(self, child: _Child, code: int) -> None:
        if self._stopping or self._children.get(child.name) is not child:
            return
        if code == EXIT_INPUT_ERROR or (code > 0 and not child.answered):
            error = InputError if code == EXIT_INPUT_ERROR else GatewayError
            self._give_up(error(f"{child.name} could not start: {_tail(child)}"))
            return
        now = time.monotonic()
        recent = [end for end in child.ends if now - end < RESTART_WINDOW_S]
        child.ends.append(now)
        if not child.restartable:
            self._give_up(GatewayError(f"{child.name} ended with exit code {code} and its memory:// store with it"))
        elif len(recent) >= MAX_RESTARTS:
            kind = GatewayError if child.serves else AgentError
            self._give_up(kind(f"{child.name} ended {len(recent) + 1} times in a minute: {_tail(child)}"))
        else:
            log.warning("%s ended with exit code %s; starting it again", child.name, code)
            pause_s = SERVER_PAUSES_S[len(recent)] if child.serves else 0.0
            asyncio.get_running_loop().call_later(pause_s, self._launch_again, child)

    def _launch_again(self, child: _Child) -> None:
        try:
            if not self._stopping:
                self._launch(child)
        except OSError as cause:
            self._give_up(AgentLightningError(f"{child.name} ended and cannot be started again: {cause}"))

    def _give_up(self, error: AgentLightningError) -> None:
        failure = self._failed()
        if not failure.done():
            failure.set_exception(error)

    async def _ready(self, child: _Child, url: str) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        failure = self._failed()
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if failure.done():
                    failure.result()
                # The socket is bound already: the request waits in its queue until the child accepts.
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url, timeout=aiohttp.ClientTimeout(total=5), ssl=False) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        raise GatewayError(
            f"the {child.name} did not answer within {self._start_timeout_s:g} s; on a busy machine raise "
            f"trainer.start_timeout_s. {_tail(child)}"
        )


def _on_exit(process: subprocess.Popen[bytes], call: Callable[[int], object]) -> None:
    """Call from a thread of its own when the process ends: pushed by the kernel, nothing polls."""

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            call(code)

    threading.Thread(target=wait, name=f"exit-of-{process.pid}", daemon=True).start()


def _end(child: _Child) -> None:
    if child.process is not None:
        stop_child(child.process, SERVER_END_S if child.serves else WORKER_STOP_TIMEOUT_S)


def _tail(child: _Child, lines: int = 6) -> str:
    """The last words of a child's present process."""
    if child.log is None:
        return "its own words are above"
    try:
        with child.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(child.log_start, end - TAIL_BYTES))
            words = file.read()
    except OSError:
        words = b""
    return " | ".join(words.decode(errors="replace").strip().splitlines()[-lines:]) or f"see {child.log}"


END_S = 5.0
"""Seconds that it gets to end: nothing is lost with it."""


@asynccontextmanager
async def console_process(url: str, key: str, log: Path, withhold: Iterable[str]) -> AsyncIterator[str]:
    """Starts the console of the store at `url` on a free port of this machine; yields its own URL. It answers some seconds
    later. `key`: of the server at `url`; `withhold`: variables that it does not inherit."""
    token = secrets.token_urlsafe(24)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        child = start_child(
            ["agentlightning.console", "--fd", str(listener.fileno())],
            secrets={"AGL_STORE": url, "AGL_SERVER_KEY": key, "AGL_CONSOLE_TOKEN": token},
            withhold=withhold,
            pass_fds=(listener.fileno(),),
            log=log,
        )
    try:
        yield f"http://127.0.0.1:{port}/?token={token}"
    finally:
        await asyncio.to_thread(stop_child, child, END_S)
