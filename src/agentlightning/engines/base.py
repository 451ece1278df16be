"""Engine: where weights live. Sampling is an endpoint, learning is this protocol; and how engines are described and made.

The trainer drives it. An engine computes one SUM over tokens of weight × loss, with every normalisation already in the
weights; it knows nothing of rewards or algorithms. One contract suite (agentlightning.testing.engine_contract) runs against
every engine, those of other packages too. Engines are found by entry point, or by ``package.module:Engine``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, cast

from pydantic import TypeAdapter

from agentlightning.config.engine import EngineConfig
from agentlightning.errors import ConfigError, EngineError, boundary
from agentlightning.runtime.code_loader import load_plugin
from agentlightning.runtime.watchdog import Watchdog
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TokenNumbers, TrainingSequence

Metrics = dict[str, float]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

DEFAULT_POLICY = "default"
SKIPPED: Mapping[str, float] = MappingProxyType({"skipped_updates": 1.0})
"""Metrics of an `optim_step` whose gradient was not finite."""


async def together(operations: Iterable[Awaitable[T]]) -> list[T]:
    """Results of all; the first error cancels the others, and is raised once they have ended."""
    tasks = [asyncio.ensure_future(one) for one in operations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Capabilities of one engine, as configured: a setting that it cannot carry out stops the run before it begins."""

    engine: str
    losses: frozenset[str] = frozenset({"ppo_clip", "reinforce", "sft"})
    terms: bool = False
    """Plug-in losses, corrections, ratios to old log-probabilities, entropy bonus, KL over the sequences' ref_logprobs."""
    preferences: frozenset[str] = field(default_factory=frozenset)
    reference: bool = False
    """reference_logprobs: a frozen copy of the first weights."""
    token_numbers: bool = False
    masks: bool = False
    """Log-probabilities under the grammars, penalties and cuts that sequences carry (`TrainingSequence.decodings`)."""
    images: bool = False
    """Calls with images, in its sampler and its learner; gateways refuse them otherwise."""
    values: bool = False
    """A value head: `values`, and losses that train it."""
    serves: bool = False
    """Sampling alone (`EngineSetup.learns` False): its first weights, or after `load` and `publish` saved ones."""


def check_loss(support: Support, loss: Loss, *, old_logprobs: bool = False) -> None:
    """ConfigError where the engine cannot compute it. old_logprobs: sequences carry the trainer's of before the step."""
    terms = loss.is_plugin or old_logprobs or loss.entropy or loss.kl or loss.importance or loss.ratio_mask
    terms = terms or loss.off_policy_kl is not None
    _expect(loss.is_plugin or loss.name in support.losses, support, f"the loss {loss.name!r}", _list(support.losses))
    _expect(support.terms or not terms, support, "plug-in losses, corrections, entropy or KL", "a plain loss")
    _expect(support.reference or not loss.kl, support, "a reference model as configured", "kl = 0, or a reference")
    _expect(support.values or loss.value is None, support, "a critic as configured", "an advantage other than 'gae'")


def check_preference_loss(support: Support, loss: PreferenceLoss) -> None:
    """ConfigError, as check_loss."""
    _expect(loss.name in support.preferences, support, f"the loss {loss.name!r}", _list(support.preferences))
    _expect(support.reference, support, "a reference model as configured", "a reference")


def _expect(holds: bool, support: Support, wanted: str, known: str) -> None:
    if not holds:
        raise ConfigError(f"the engine {support.engine!r} does not support {wanted}; expected {known}")


def _list(names: frozenset[str]) -> str:
    return "one of " + ", ".join(sorted(names)) if names else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The servers that sample one policy, as gateways need to know them."""

    urls: Sequence[str]
    """Base URLs of equal servers of /inference/v1/generate: an attempt stays with one as long as that answers."""
    served_model: str | None = None
    """Name by which the servers know the policy; None: its alias."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Log-probabilities of the distribution that was sampled from (processed), or of the bare logits (raw)."""
    seeded: bool = True
    """False: requests carry no seed, and sampling is not repeatable."""
    key_env: str | None = None
    """Variable of the gateways' environment with the key that the servers ask for."""


class Engine(Protocol):
    """The operations of learning. Each may raise EngineError; the policy's alias is `default` unless several are trained.

    LearnerLostError: what was learned since the last `save` is gone; `restart_learner`, then `load`.
    """

    @property
    def support(self) -> Support:
        """Known before `start`."""
        ...

    @property
    def device(self) -> str:
        """Torch device of the learner, once started; empty before."""
        ...

    async def start(self) -> Mapping[str, Endpoints]:
        """Start what serves and learns; returns each policy's endpoints, which a server keeps when it is started again."""
        ...

    async def watch(self) -> None:
        """Keep the parts that sample running; never returns. EngineError when they cannot be kept."""
        ...

    def pids(self) -> Mapping[str, int]:
        """Process ids of the parts on this machine, by names such as `sampler` and `learner`; none before start."""
        ...

    async def close(self) -> None:
        """Stop everything that `start` started; a second call does nothing."""
        ...

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str = DEFAULT_POLICY
    ) -> Metrics:
        """Add the gradient of SUM over tokens of weight × loss to what is accumulated since the last optim_step.

        Metrics are sums or means over the trained tokens of this call: loss, tokens, ratio_max (largest |ratio - 1|),
        clip_share, kl (k3 of sampler against trainer), entropy; with the settings they belong to masked_share, importance
        (mean weight), ref_kl and value_loss (a SUM like loss, in which it is not).
        """
        ...

    async def forward_backward_preferences(
        self,
        examples: Sequence[Preference],
        loss: PreferenceLoss,
        mismatched: Sequence[Sequence[TrainingSequence]] = (),
        policy: str = DEFAULT_POLICY,
    ) -> Metrics:
        """Add the gradient of SUM over examples of weight × loss, a loss of whole completions; all carry ref_logprobs.

        mismatched are completions beside prompts of others, each with all its rows, from which kto estimates its baseline.
        Metrics: loss, examples, tokens, margin; accuracy for dpo, baseline for kto.
        """
        ...

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY) -> list[list[float]]:
        """Log-probability of every token given those before it, at the sequence's temperature; 0 for the first."""
        ...

    async def reference_logprobs(
        self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY
    ) -> list[list[float]]:
        """The same under the frozen weights that the engine was made with, if it keeps them."""
        ...

    async def values(self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY) -> list[list[float]]:
        """The value head's estimate of the state before every token; 0 for the first."""
        ...

    async def token_numbers(self, policy: str = DEFAULT_POLICY) -> list[TokenNumbers]:
        """Ratios of the loss in this policy's last forward_backward and entropies of the policy, for every token of its
        sequences; 1 and 0 where their mask is False."""
        ...

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = DEFAULT_POLICY) -> Metrics:
        """Clip the accumulated gradient to the norm, update, zero it. Metrics: grad_norm (before clipping), and if the
        engine counts them learner_tokens, those computed since the last step (padding included, shared prefixes once).

        A gradient that is not finite is dropped and changes nothing: `SKIPPED` in place of grad_norm. An error instead would
        come again in each resumed run, whose step is the same step."""
        ...

    async def publish(self, version: int, policy: str = DEFAULT_POLICY) -> None:
        """The current weights serve from now on, stamped `version`; calls in flight go on over them."""
        ...

    async def save(self, path: Path, policy: str = DEFAULT_POLICY) -> None:
        """Write a sealed transformers folder with the learner's state (engines/folders.py), whole or not at all."""
        ...

    async def load(self, path: Path, policy: str = DEFAULT_POLICY) -> None:
        """Back to a saved state: the next update is bit for bit the one that would have followed the save."""
        ...

    async def restart_learner(self) -> None:
        """A fresh learner in place of one that was lost, with the weights that the engine was made with."""
        ...


def _operation(method: F) -> F:
    """The method as a call of `_operate`. Its last argument is the policy."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def operate(engine: ForwardingEngine, *args: Any, **named: Any) -> Any:
        given = signature.bind(engine, *args, **named)
        given.apply_defaults()
        _, *arguments, policy = given.arguments.values()
        return await engine._operate(policy, method.__name__, *arguments)

    return cast(F, operate)


class ForwardingEngine(Engine):
    """An engine that has its operations carried out elsewhere, all in one way."""

    @abstractmethod
    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        """Carries out an operation on this policy; returns its result."""

    forward_backward = _operation(Engine.forward_backward)
    forward_backward_preferences = _operation(Engine.forward_backward_preferences)
    logprobs = _operation(Engine.logprobs)
    reference_logprobs = _operation(Engine.reference_logprobs)
    values = _operation(Engine.values)
    token_numbers = _operation(Engine.token_numbers)
    optim_step = _operation(Engine.optim_step)
    publish = _operation(Engine.publish)
    save = _operation(Engine.save)
    load = _operation(Engine.load)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Parts that an engine keeps besides a policy's weights because the algorithm asks for them."""

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
    """CPU threads of the learner; None: `default_threads`. Another number gives another rounding."""
    turns: bool = False
    """Sampler and learner take turns, so that each may have every core."""

    def to_json(self) -> str:
        return TypeAdapter(LearnerSetup).dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> LearnerSetup:
        return TypeAdapter(LearnerSetup).validate_json(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup(LearnerSetup):
    """All that the engine of one policy is made of."""

    model: str | Path
    """Transformers folder or hub name; in place, or in the hub's cache, when the engine is started."""
    work_dir: Path
    """Folder of this machine for logs and what lives no longer than the run's processes."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    """Starts children that are killed when they hang; its limits are what anything may take."""
    learns: bool = True
    """False: the engine only serves; see `Support.serves`."""
    withhold: frozenset[str] = frozenset()
    """Variables of the environment that no process of the engine inherits: keys of others."""

    def expect_only(self, *read: str) -> None:
        """ConfigError where a setting of [engine] that this engine does not read differs from its default."""
        for name in sorted(self.config.model_fields_set - {"name", *read}):
            if getattr(self.config, name) != getattr(EngineConfig(), name):
                raise ConfigError(f"engine.{name} has no effect with the engine {self.config.name!r}; leave it out")


EngineMaker = Callable[[EngineSetup], Engine]
"""Makes an engine and starts nothing. Raises ConfigError, ModelError, MissingExtraError."""


def make_engine(setup: EngineSetup) -> Engine:
    """The engine that the setup names, not started. ConfigError where none has the name; EngineError where making it raises
    anything but our own errors."""
    maker: EngineMaker = load_plugin("engine", setup.config.name, ())
    with boundary(f"the engine {setup.config.name!r}", EngineError):
        return maker(setup)


class PolicyEngines(ForwardingEngine):
    """Several policies as one engine, each with an engine of its own, by alias; none where a run has no policy."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)

    @property
    def support(self) -> Support:
        """Capabilities that all of them have."""
        known = [engine.support for engine in self._engines.values()]
        first = asdict(known[0])
        for other in known[1:]:
            first = {name: value & getattr(other, name) for name, value in first.items() if name != "engine"}
        return Support(**{**first, "engine": " and ".join(sorted({one.engine for one in known}))})

    @property
    def device(self) -> str:
        return ", ".join(sorted({engine.device for engine in self._engines.values()} - {""}))

    async def start(self) -> dict[str, Endpoints]:
        """Start all of them, side by side. What one raises ends the others."""
        try:
            started = await together(engine.start() for engine in self._engines.values())
        except BaseException:
            await self.close()
            raise
        return {alias: own[DEFAULT_POLICY] for alias, own in zip(self._engines, started, strict=True)}

    async def watch(self) -> None:
        await together(engine.watch() for engine in self._engines.values())

    def pids(self) -> dict[str, int]:
        """Of all of them, each name after its policy's."""
        return {f"{alias} {name}": pid for alias, one in self._engines.items() for name, pid in one.pids().items()}

    async def close(self) -> None:
        await _all([engine.close() for engine in self._engines.values()])

    async def restart_learner(self) -> None:
        """All of them: whoever lost one goes back to a checkpoint, and the others with it."""
        await _all([engine.restart_learner() for engine in self._engines.values()])

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        engine = self._engines.get(policy)
        if engine is None:
            known = ", ".join(self._engines)
            raise EngineError(f"policy: {policy!r} is not known to the engine; expected one of {known}")
        return await getattr(engine, operation)(*arguments)


async def _all(operations: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them to their ends, then the first error."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
