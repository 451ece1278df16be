"""Ranks: the processes that train one model together, each with its part of the weights and its share of the sequences.

Rank 0 is the process that the engine starts. It starts the others, hands every operation on to them, and ends with the first
of them that ends: half a learner is none. Each carries out the same operations in the same order, since every forward and
every update is a collective. Refuses to know models and losses.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, EngineError
from agentlightning.runtime.children import listen
from agentlightning.runtime.watchdog import HangLimits, Watchdog

T = TypeVar("T")
LOOPBACK = "127.0.0.1"

log = logging.getLogger("agentlightning.learner")


class Ranks:
    """All of them, as number `rank` of `count` sees them. One alone shares with nobody."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank = rank
        self.count = count
        self._error: tuple[str, str] | None = None

    def device(self, device: str) -> str:
        """This rank's own device of a kind. ConfigError where the machine has none for each."""
        if self.count == 1 or device == "cpu":
            return device
        there = torch.cuda.device_count()
        if device != "cuda" or there < self.count:
            raise ConfigError(
                f"engine.learner_processes: {self.count} need engine.device 'cpu', or 'cuda' with as many GPUs; got "
                f"{device!r}, with {there}"
            )
        return f"cuda:{self.rank}"

    def meet(self, device: str, limits: HangLimits, port: int, listener: socket.socket | None = None) -> None:
        """Within start_timeout_s; rank 0 brings the listener. From then on a collective waits for the slowest rank as long
        as a learner may make no progress."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        if device != "cpu":
            torch.cuda.set_device(device)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            port,
            self.count,
            is_master=listener is not None,
            timeout=timedelta(seconds=limits.start_timeout_s),
            master_listen_fd=None if listener is None else listener.detach(),
        )
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=max(limits.stall_timeout_s, limits.start_timeout_s)),
        )

    def mesh(self, device: str) -> DeviceMesh:
        return init_device_mesh(torch.device(device).type, (self.count,))

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in their order. The first error that one of them kept is raised by all."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        kept, self._error = self._error, None
        dist.all_gather_object(found, (value, kept))
        for _, error in found:
            if error is not None:
                raise getattr(errors, error[0], EngineError)(error[1])
        return [value for value, _ in found]

    @contextmanager
    def keep_errors(self) -> Iterator[None]:
        """Keeps an error of this rank alone for `gather`: until then the others count on it in every collective."""
        try:
            yield
        except AgentLightningError as error:
            if self.count == 1:
                raise
            self._error = self._error or (type(error).__name__, str(error))

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of parameters that every rank holds whole."""
        parameters = list(parameters)
        if self.count == 1 or not any(self.gather(any(p.grad is not None for p in parameters))):
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


class Lead:
    """Rank 0's pipe: what comes from the engine goes to the other ranks, too; it alone answers."""

    def __init__(self, pipe: Connection, followers: Sequence[Connection]) -> None:
        self._pipe = pipe
        self._followers = followers

    def recv(self) -> Any:
        message = self._pipe.recv()
        for follower in self._followers:
            follower.send(message)
        return message

    def send(self, answer: Any) -> None:
        self._pipe.send(answer)


class Follow:
    """Any other rank's pipe: it gets what rank 0 gets, and answers nobody."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def recv(self) -> Any:
        return self._pipe.recv()

    def send(self, answer: Any) -> None:
        pass


def lead(ranks: Ranks, pipe: Connection, device: str, limits: HangLimits, arguments: Sequence[str]) -> Lead:
    """Start the other ranks, as `python -m arguments… --fd N --rank K --port P`, and meet them."""
    watchdog = Watchdog(limits)
    listener = listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    followers = []
    for rank in range(1, ranks.count):
        ours, theirs = socket.socketpair()
        with theirs:
            child = watchdog.start(
                f"learner rank {rank}",
                [*arguments, "--fd", str(theirs.fileno()), "--rank", str(rank), "--port", str(port)],
                stall_timeout_s=max(limits.stall_timeout_s, limits.start_timeout_s),
                pass_fds=[theirs.fileno()],
            )
        followers.append(Connection(ours.detach()))
        threading.Thread(target=_end_with, args=(child, rank), name=f"rank-{rank}", daemon=True).start()
    ranks.meet(device, limits, port, listener)
    return Lead(pipe, followers)


def _end_with(child: subprocess.Popen[bytes], rank: int) -> None:
    """End this process as that one ended, at once: it may be waiting for it in a collective."""
    code = child.wait()
    if code < 0:  # others said why, in the log's last line
        log.error("signal %d ended rank %d (process %d), and rank 0 ends with it", -code, rank, child.pid)
        os.kill(os.getpid(), -code)
    os._exit(code or 1)
