"""What the suite of the Kubernetes runner needs of a cluster beside the runner's own view of it: to play its node."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Protocol

from memory_cluster import MemoryCluster

from agentlightning.kubernetes.cluster import Cluster
from agentlightning.records import JSON

DEADLINE_S = 60.0
"""Matters only where a test fails: the slowest machine has its time."""


class Lab(Protocol):
    """A cluster whose node a test plays."""

    cluster: Cluster
    workers: Cluster
    """The same, as a worker's account may use it."""
    pending_s: float
    """Long enough for its controllers."""

    async def report(self, pod: str, status: JSON) -> None:
        """The node reports a pod's status."""

    async def remove(self, pod: str) -> None:
        """Somebody else deletes a pod, at once."""

    def prints(self, pod: str, text: str) -> None:
        """The node has this log of a pod."""

    async def go_away(self) -> None:
        """The API server ends."""

    async def come_back(self) -> None:
        """It is started again, with what it knew."""

    async def limit_pods(self, most: int) -> None:
        """A quota allows so many pods."""


class MemoryLab:
    """The one in memory."""

    def __init__(self) -> None:
        self.memory = MemoryCluster()
        self.pending_s = 0.5
        self.cluster: Cluster = self.memory
        self.workers: Cluster = self.memory

    async def report(self, pod: str, status: JSON) -> None:
        found = copy.deepcopy(self.memory.objects["Pod"][pod])
        self.memory.change("Pod", found | {"status": status})

    async def remove(self, pod: str) -> None:
        self.memory.change("Pod", self.memory.objects["Pod"][pod], "DELETED")

    def prints(self, pod: str, text: str) -> None:
        self.memory.logs[pod] = text

    async def go_away(self) -> None:
        self.memory.lie_down()

    async def come_back(self) -> None:
        self.memory.away = False

    async def limit_pods(self, most: int) -> None:
        self.memory.max_pods = most


async def until(found: Callable[[], Awaitable[object]]) -> None:
    """Returns once it is true."""
    async with asyncio.timeout(DEADLINE_S):
        while not await found():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def running() -> JSON:
    return {"phase": "Running", "containerStatuses": [_container({"running": {}})]}


def exited(code: int, reason: str = "", message: str = "") -> JSON:
    why = {"reason": reason or ("Error" if code else "Completed"), "message": message}
    state = {"terminated": {"exitCode": code, **why}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [_container(state)]}


def waiting(reason: str, message: str) -> JSON:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [_container(state)]}


def unschedulable(message: str) -> JSON:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def evicted(message: str) -> JSON:
    return {"phase": "Failed", "reason": "Evicted", "message": message}


def _container(state: JSON) -> JSON:
    return {"name": "agent", "state": state, "ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
