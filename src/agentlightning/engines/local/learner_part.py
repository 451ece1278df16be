"""LearnerProcess: the learner part that is a process of ours (learner_process.py), driven over a socket pair.

LocalEngine drives it, one operation at a time. Refuses to know what an operation does.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from agentlightning.engines.local.options import LearnerOptions
from agentlightning.engines.local.parts import MAX_KILLED_STARTS, LearnerPart, Workplace
from agentlightning.engines.pipe import ChildPipe, PipeEndedError
from agentlightning.errors import LearnerLostError
from agentlightning.runtime.children import stop_child


class LearnerProcess(LearnerPart):
    def __init__(self, place: Workplace, options: LearnerOptions) -> None:
        self._place = place
        self._options = options
        self._device = ""
        self._learner: ChildPipe | None = None

    @property
    def device(self) -> str:
        return self._device

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = json.dumps(asdict(self._place.watchdog.limits))
            child = self._place.start_child("learner", theirs.fileno(), self._options, "--limits", limits)
        self._learner = ChildPipe(child, Connection(ours.detach()))

    async def ready(self) -> None:
        for killed in range(MAX_KILLED_STARTS + 1):
            assert self._learner is not None
            learner = self._learner
            try:
                self._device = await asyncio.wait_for(asyncio.to_thread(learner.receive), self._place.start_timeout_s)
                return
            except TimeoutError as late:
                # Its end of the pipe closes with it, which ends the thread that waits.
                learner.child.kill()
                raise self._place.late("learner") from late
            except PipeEndedError as ended:
                code = await asyncio.to_thread(learner.child.wait)
                if code >= 0 or killed == MAX_KILLED_STARTS:
                    raise self._place.ended_early("learner", code) from ended
                stop_child(learner.child)
                learner.close()
                self.start()

    async def operate(self, operation: str, *arguments: Any) -> Any:
        assert self._learner is not None
        try:
            return await asyncio.to_thread(self._learner.call, operation, *arguments)
        except PipeEndedError as ended:
            raise LearnerLostError(
                f"the learner ended during {operation}; resume from the last checkpoint ({self._place.tail('learner')})"
            ) from ended

    async def restart(self) -> None:
        await self._stop()
        self.start()
        await self.ready()

    def pids(self) -> dict[str, int]:
        return {} if self._learner is None else {"learner": self._learner.child.pid}

    async def close(self) -> None:
        await self._stop()
        self._learner = None

    async def _stop(self) -> None:
        if self._learner is not None:
            await asyncio.to_thread(stop_child, self._learner.child)
            self._learner.close()
