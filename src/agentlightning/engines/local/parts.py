"""The parts of an engine on this machine, one that samples and one that learns, by their interfaces; and their workplace.

LocalEngine composes them. Refuses to know what either computes, and in which processes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentlightning.engines.base import Endpoints
from agentlightning.engines.local.options import LearnerOptions, SamplerOptions, WeightsForm
from agentlightning.engines.sampler_address import SamplerAddress
from agentlightning.errors import AgentLightningError, EngineError, ModelError
from agentlightning.runtime.watchdog import Watchdog

MODULES = {"sampler": "sampler", "learner": "learner_process"}
"""Of this package, by the names of the children that run them."""
WATCH_S = 0.1
"""Seconds between looks at whether a child still runs."""
MAX_KILLED_STARTS = 3
"""A child that a signal ends before it is ready is started again, this often."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A folder that is whole and does not change, and the version that its weights serve under."""

    folder: Path
    version: int


class SamplerPart(Protocol):
    """The servers that sample. `start` and `ready` come first, then `watch` runs beside everything else."""

    @property
    def form(self) -> WeightsForm: ...

    @property
    def endpoints(self) -> Endpoints:
        """Known once ready; a server that is started again has its old URL."""
        ...

    def start(self) -> None:
        """Start the processes, and wait for none."""
        ...

    async def ready(self) -> None:
        """Wait until all serve. EngineError or ModelError where one cannot."""
        ...

    async def publish(self, weights: PublishedWeights) -> None:
        """All servers sample with these weights from now on; so does any that is started again. The folder stays until the
        next call has returned. EngineError, naming who is late, where one does not take them in time."""
        ...

    async def watch(self) -> None:
        """Replace what died or hangs; never returns. EngineError where that does not help."""
        ...

    def pids(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplerChoice:
    """A kind of sampler part, and what has to be known of it before it is made."""

    make: Callable[[Workplace], SamplerPart]
    images: bool = True
    """It reads the images that the learner reads."""
    reads_work_dir: bool = False
    """Its servers may be elsewhere: weights are published in the run's folder, in place of this machine's memory."""


class LearnerPart(Protocol):
    """The process, or processes, with the weights that learn."""

    @property
    def device(self) -> str:
        """Empty before it is ready."""
        ...

    def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def operate(self, operation: str, *arguments: Any) -> Any:
        """Carry out an operation of the learner. Raises its errors, and LearnerLostError where it ended."""
        ...

    async def restart(self) -> None: ...

    def pids(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Folders and limits that both parts are started with, and how they speak of their processes."""

    model: Path
    work_dir: Path
    weights_folder: Path
    watchdog: Watchdog
    withhold: frozenset[str] = frozenset()
    """Variables of the environment that no process inherits."""
    address: SamplerAddress = field(default_factory=SamplerAddress)

    @property
    def start_timeout_s(self) -> float:
        return self.watchdog.limits.start_timeout_s

    def log_file(self, name: str) -> Path:
        return self.work_dir / "logs" / f"{name}.log"

    def start_child(
        self,
        name: str,
        descriptor: int,
        options: SamplerOptions | LearnerOptions,
        *more: str,
        secrets: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the process of a part of the local engine, with its end of a socket."""
        arguments = ["--model", str(self.model), "--fd", str(descriptor), "--options", json.dumps(asdict(options))]
        limits = self.watchdog.limits
        return self.watchdog.start(
            name,
            [f"agentlightning.engines.local.{MODULES[name]}", *arguments, *more],
            stall_timeout_s=max(limits.stall_timeout_s, limits.start_timeout_s),  # loading the model makes no progress
            secrets=secrets,
            withhold=self.withhold,
            pass_fds=[descriptor],
            env=_thread_bound(options.threads),
            log=self.log_file(name),
        )

    def late(self, name: str) -> EngineError:
        return EngineError(
            f"the {name} is not ready after {self.start_timeout_s:g} s; on a busy machine raise trainer.start_timeout_s, "
            f"else see why: {self.tail(name)}"
        )

    def ended_early(self, name: str, code: int) -> AgentLightningError:
        if code == ModelError.exit_code:
            lines = self.log_file(name).read_text(errors="replace").strip().splitlines()
            return ModelError(lines[-1] if lines else f"the {name} refused the model {self.model}")
        return EngineError(f"the {name} ended with code {code} before it was ready; {self.tail(name)}")

    def tail(self, name: str) -> str:
        path = self.log_file(name)
        lines = path.read_text(errors="replace").strip().splitlines()[-5:] if path.is_file() else []
        return f"its log {path} ends: {' | '.join(lines)}" if lines else f"its log {path} is empty"


def _thread_bound(threads: int | None) -> dict[str, str]:
    """OpenMP threads that wait for work must sleep: the machine's other core belongs to somebody else."""
    bound = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**bound, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
