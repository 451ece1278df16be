"""Ranks, the processes that train one model together, each with its part of the weights (FSDP2) and a share of the
sequences.

Rank 0 is the process that the engine starts. It starts the others, passes every operation on to them, and ends with the
first that ends. Every forward and every update is a collective, so all ranks carry out the same operations in the same
order.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, EngineError, ModelError
from agentlightning.runtime.children import listen
from agentlightning.runtime.watchdog import HangLimits, Watchdog

T = TypeVar("T")
LOOPBACK = "127.0.0.1"

log = logging.getLogger("agentlightning.learner")


class Ranks:
    """All ranks, as number `rank` of `count` sees them."""

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
                f"engine.learner.processes: {self.count} need engine.device 'cpu', or 'cuda' with as many GPUs; got "
                f"{device!r}, with {there}"
            )
        return f"cuda:{self.rank}"

    def meet(self, device: str, limits: HangLimits, port: int, listener: socket.socket | None = None) -> None:
        """Within start_timeout_s; rank 0 brings the listener. A collective then waits as long as a learner may make no
        progress."""
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
        """Keeps an error of this rank for `gather`: until then the others count on it in every collective."""
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


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """[B, T, X]: the pass through all of a Llama-shaped model but its head; a method of the model, once bound to it."""
    states: Tensor = model.model(**inputs).last_hidden_state
    return states


def shard(model: Any, folder: Path, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Split a model's parameters over the mesh, layer by layer: no device ever holds them all. ModelError without layers.

    bfloat16: a layer's weights are gathered, and their gradients computed, in bfloat16; what is kept, and the sum over
    ranks, is float32, and so are embedding and head: the head's gradient is a sum over many pieces of logits. Gradients are
    added over the ranks, not averaged: the loss is a SUM.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"model {folder}: {type(model).__name__} has no layers to split over engine.learner.processes")
    # Inputs of a layer stay as they are: the residual stream is float32, as autocast leaves it on one device.
    rough = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in found:
        fully_shard(layer, mesh=mesh, mp_policy=rough if bfloat16 else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    if hasattr(model, "hidden_states"):
        register_fsdp_forward_method(model, "hidden_states")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # The head has no gradient on a rank without tokens of its own: it then counts as 0 instead of being left out.
    model.set_reduce_scatter_unused_params(True)


def reshard(model: Any) -> None:
    """Drop the whole embedding and head that a pass without a backward one leaves, so that the next gathers new ones."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(value: Any, keep: bool = True) -> Any:
    """The union of a tensor's parts, on the CPU; all ranks call it together. Without `keep` this rank forgets it."""
    if not isinstance(value, DTensor):
        return value
    union = value.full_tensor()
    return union.cpu() if keep else value


def whole_state(model: torch.nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights of a model by name, as `whole`; tied ones are one tensor."""
    unions: dict[int, Tensor] = {}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in unions:
            unions[id(value)] = whole(value.detach(), keep)
        found[name] = unions[id(value)]
    return found


def part(value: Any, like: Tensor) -> Any:
    """This rank's part of a whole tensor, split as `like` is; another shape, as of a count of steps, stays whole."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    # Without a source every rank takes its part of what it read itself: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy whole tensors over those of the same names; RuntimeError where names or shapes differ."""
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (targets, values)]
    if shapes[0] != shapes[1]:
        differ = sorted(name for name in {*targets, *values} if shapes[0].get(name) != shapes[1].get(name))
        raise RuntimeError(f"weights differ in name or shape, {differ[0]} first")
    for name, target in targets.items():
        target.copy_(part(values[name], target))
