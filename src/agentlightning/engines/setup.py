"""EngineSetup: all that an engine is made of; and the engines that are installed, by name.

The trainer makes setups; every engine reads what it needs of one and refuses settings that it would ignore. Knows no engine:
they are found by entry point, or by ``package.module:Engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import Engine
from agentlightning.errors import ConfigError, EngineError, boundary
from agentlightning.runtime.code_loader import load_plugin
from agentlightning.runtime.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Parts that an engine keeps beside a policy's weights because the algorithm asks for them."""

    reference: bool = False
    """The weights it was made with, for reference_logprobs."""
    critic_learning_rate: float | None = None
    """A value head, for values, that learns at this rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """All that a learner is made of but its model; also what a child process is started with, as JSON."""

    config: EngineConfig = field(default_factory=EngineConfig)
    needs: EngineNeeds = EngineNeeds()
    learning_rate: float = 1e-6
    """The one that `optim_step` is given before any schedule: others of an optimizer are ratios of it."""
    seed: int = 0
    threads: int | None = None
    """CPU threads; None: those of OMP_NUM_THREADS, else as many as there are idle cores, looked at between micro-batches.
    Another number gives another rounding."""

    def to_json(self) -> str:
        return TypeAdapter(LearnerSetup).dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> LearnerSetup:
        return TypeAdapter(LearnerSetup).validate_json(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup(LearnerSetup):
    """All that the engine of one policy is made of."""

    model: str | Path
    """Transformers folder or hub name; it is there, or in the hub's cache, when the engine is started."""
    work_dir: Path
    """Folder of this machine for logs and what lives no longer than the run's processes."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    """Starts children that are killed when they hang; its limits are what anything may take."""
    learns: bool = True
    """False: the model is served as it is, or with saved weights that it is given by `load` and `publish`, and the engine
    keeps nothing that learns. Engines that read it say so in `support.serves`."""
    withhold: frozenset[str] = frozenset()
    """Variables of the environment that no process of the engine inherits: keys of others."""

    def expect_only(self, *read: str) -> None:
        """ConfigError where a setting of the table [engine] differs from its default and is none of those that this engine
        reads: it would have no effect."""
        for name in sorted(self.config.model_fields_set - {"name", *read}):
            if getattr(self.config, name) != getattr(EngineConfig(), name):
                raise ConfigError(f"engine.{name} has no effect with the engine {self.config.name!r}; leave it out")


EngineMaker = Callable[[EngineSetup], Engine]
"""Makes an engine and starts nothing. Raises ConfigError, ModelError, MissingExtraError."""


def make_engine(setup: EngineSetup) -> Engine:
    """The engine that the setup names, made and not started.

    ConfigError where none has the name; EngineError where making it raises anything but our own errors.
    """
    maker: EngineMaker = load_plugin("engine", setup.config.name, ())
    with boundary(f"the engine {setup.config.name!r}", EngineError):
        return maker(setup)
