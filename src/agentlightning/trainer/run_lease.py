"""RunLease: one trainer of a run at a time, also where hosts that share no folder share its store; and a process's work on
a run, begun, resumed and ended.

The lease is an entry of the run's summary that its trainer changes every few seconds; who wants to train the run looks
whether it changes, and who finds another's in its place ends. No host's clock is compared with another's.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from uuid import uuid4

from agentlightning.config.file import named_files
from agentlightning.config.run import Config, run_record, without_password
from agentlightning.errors import ConflictError, InputError, NotFoundError, RunTakenError, StoreError
from agentlightning.records import JSON, Run, RunState
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run
from agentlightning.trainer.checkpoint import FINGERPRINT, Fingerprint, RunFolder
from agentlightning.trainer.interrupts import run_watched
from agentlightning.trainer.progress import Progress

T = TypeVar("T")

LEASE = "trainer"
"""Name of the entry."""
RENEW_S = 10.0
WATCH_S = 30.0
"""Time without a change after which the trainer of a run counts as ended."""
LOOK_S = 0.5

log = logging.getLogger(__name__)


class RunLease:
    def __init__(
        self, folder: RunFolder, note: Callable[[str], None], *, renew_s: float = RENEW_S, watch_s: float = WATCH_S
    ) -> None:
        self._folder = folder
        self._run_id = folder.run_id
        self._place = _place(folder)
        self._id = uuid4().hex
        self._renewals = 0
        self._note = note
        self._renew_s = renew_s
        self._watch_s = watch_s
        self._keeping: asyncio.Task[None] | None = None

    async def take(self, store: LightningStore) -> None:
        """Take and keep it, with the folder's lock held. ConflictError where a trainer with another folder is at work."""
        run = await find_run(store, self._run_id)
        lease = _lease(run)
        # In the same folder it was killed, or this process would not hold the lock.
        if run.state == "running" and is_elsewhere(run, self._folder):
            self._note(
                f"run {run.id} is held by {lease['place']}; waiting {self._watch_s:g} s to see whether it works on"
            )
            await self._watch(store, lease)
        await self._renew(store)
        self._keeping = asyncio.create_task(self._keep(store), name="run lease")

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work. RunTakenError where another trainer took the run meanwhile, NotFoundError where it was deleted:
        the work is cancelled then."""
        assert self._keeping is not None
        return await run_watched(work, self._keeping)

    async def aclose(self) -> None:
        """Renew it no longer; the run's state says then whether somebody trains it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _watch(self, store: LightningStore, lease: JSON) -> None:
        deadline = time.monotonic() + self._watch_s
        while time.monotonic() < deadline:
            await asyncio.sleep(min(LOOK_S, self._watch_s))
            run = await find_run(store, self._run_id)
            if run.state != "running":
                return
            if _lease(run) != lease:
                raise ConflictError(f"{run.id}: {_lease(run).get('place')} is training this run; end that first")

    async def _keep(self, store: LightningStore) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                run = await find_run(store, self._run_id)
                if (lease := _lease(run)).get("id") == self._id:
                    await self._renew(store, run)
                    continue
            except NotFoundError:
                raise  # the run was deleted, and what it learns from here on could not be recorded
            except StoreError as away:  # whoever needs the store ends the run, if it stays away
                log.warning("the lease of run %s was not renewed: %s", self._run_id, away)
                continue
            raise RunTakenError(f"{self._run_id}: {lease.get('place')} trains this run now; this process ends")

    async def _renew(self, store: LightningStore, run: Run | None = None) -> None:
        self._renewals += 1
        lease = {"id": self._id, "place": self._place, "renewals": self._renewals}
        # One that lost the lease recorded its own end, which is not the run's.
        state: RunState | None = None if run is None or run.state == "running" else "running"
        await store.update_run(self._run_id, state=state, summary={LEASE: lease})


def is_elsewhere(run: Run, folder: RunFolder) -> bool:
    """Returns whether the last who trained the run did so in another folder than this."""
    return bool(_lease(run).get("place", _place(folder)) != _place(folder))


def _place(folder: RunFolder) -> str:
    return f"{platform.node()}:{folder.path.resolve()}"


def _lease(run: Run) -> JSON:
    return run.summary.get(LEASE) or {}


class Result(Protocol):
    @property
    def finished(self) -> bool: ...


R = TypeVar("R", bound=Result)


class RunSession(ABC, Generic[R]):
    """One process's work on a run: training, or a search for prompts."""

    command: ClassVar[str]
    """The command that goes on with it."""
    kept = "what was learned is kept"
    begun = "nothing was learned yet"
    """Sentences for a failure after the first checkpoint, and before it."""

    def __init__(self, config: Config, folder: RunFolder, progress: Progress) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress
        self._stopping = False
        self._lease = RunLease(folder, progress.note)

    async def run(self, *, resume: bool = False, name: str = "") -> R:
        """Work as configured; with `resume`, go on where the run was. Says how to go on with what did not end."""
        lasting = self._config.store.url != "memory://"
        line = f"go on with: {resume_line(self._folder.path, self.command)}"
        try:
            result = await self._work(resume, name)
        except (ConflictError, NotFoundError):
            raise
        except BaseException as error:
            learned, started = self._folder.has_checkpoint(), self._folder.has_config
            if lasting and (learned or (started and not isinstance(error, InputError))):
                self._progress.note(f"{self.kept if learned else self.begun}; {line}")
            raise
        if not result.finished:
            self._progress.note(
                f"{self._stopped(result)}; {line if lasting else 'its store was in memory and is gone'}"
            )
        return result

    def _stopped(self, result: R) -> str:
        return "stopped"

    @abstractmethod
    async def _work(self, resume: bool, name: str) -> R: ...

    async def _enter(self, store: LightningStore, resume: bool, name: str, summary: JSON) -> None:
        """The run as running in the store. A run that was killed before the store knew it is made when it is resumed."""
        run_id, url = self._folder.run_id, self._config.store.url
        for sentence in self._folder.changed_files(named_files(self._config)):
            self._progress.note(sentence)
        if FINGERPRINT in summary:
            self._folder.keep_fingerprint(Fingerprint.of_summary(summary))
        known = resume and bool(await store.runs(ids=[run_id]))
        if resume and not known and (self._folder.has_checkpoint() or url == "memory://"):
            why = "it ended with its process" if url == "memory://" else "name the one it was trained with: --store URL"
            raise NotFoundError(f"{run_id}: the store {without_password(url)} does not know this run; {why}")
        if not known:
            await store.create_run(name, run_record(self._config), run_id)
        await self._lease.take(store)
        await store.update_run(run_id, state="running", summary=summary)


def resume_line(folder: Path, command: str = "train") -> str:
    """The command that goes on with the run of this folder."""
    runs = [] if folder.parent == Path("runs") else ["--runs", str(folder.parent)]
    return shlex.join(["agl", command, "--resume", folder.name, *runs])
