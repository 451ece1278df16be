"""ServerLock: an SQLite file has one server at a time.

Driven by servers, and by what replaces a whole store. Two servers on one file would each give up leases that the other
knows to be held, and tell nobody of the other what changed. Programs that only look or change something at once
(`agl runs list`, `agl runs delete`) need no lock: SQLite has its own for that. The kernel releases a lock when its process
ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from types import TracebackType
from typing import Self

from agentlightning.errors import ConflictError, StoreError
from agentlightning.runtime.children import SERVER_END_S
from agentlightning.store.sqlite_file import sqlite_file

PAUSE_S = 0.1
NOTICE_S = 5.0
"""Time for a server whose parent was killed to notice, and to say that it ends."""


class ServerLock:
    """``with`` around serving the store at `url`; does nothing for stores that several servers may use.

    ConflictError, with what to do, where another process serves the file. One that is about to end, as the server of a run
    that was killed is, is waited for.
    """

    def __init__(self, url: str) -> None:
        self._file = sqlite_file(url)
        self._held: int | None = None

    def __enter__(self) -> Self:
        if self._file is None:
            return self
        path = f"{self._file.resolve()}.server-lock"  # beside the file itself: links to it name the same store
        try:
            held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as cause:
            if not os.path.lexists(path):
                return self  # where no file can be made there is no store either: opening it says why
            raise StoreError(
                f"{path}: cannot be opened ({cause.strerror}), and tells whether another server serves the store; make it "
                "this user's"
            ) from cause
        try:
            self._wait(held)
        except BaseException:
            os.close(held)
            raise
        self._held = held
        self._say("serves")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)  # the file stays: one that is removed could be locked by two who opened it before and after

    def ending(self) -> None:
        """Tell who wants to serve the file next that it is worth waiting."""
        self._say("ends")

    def _wait(self, held: int) -> None:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pid, _, state = os.pread(held, 100, 0).decode(errors="replace").strip().partition(" ")
                if time.monotonic() - began > (NOTICE_S if state == "serves" else SERVER_END_S):
                    raise ConflictError(
                        f"{self._file}: process {pid} serves it already, and an SQLite file has one server; end that one, "
                        "or start `agl serve` once and give its URL to each run (--server http://127.0.0.1:8088), or give "
                        "this run a store of its own (--store sqlite:///OTHER.db)"
                    ) from None
            except OSError as cause:
                raise StoreError(
                    f"{self._file}: cannot be locked ({cause.strerror}); SQLite needs a local disk, so choose another path"
                ) from cause
            time.sleep(PAUSE_S)

    def _say(self, state: str) -> None:
        if self._held is not None:
            os.pwrite(self._held, f"{os.getpid()} {state:7}\n".encode().ljust(32), 0)
