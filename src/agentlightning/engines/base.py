"""Engine: where weights live. Sampling is an endpoint, learning is this protocol.

The trainer drives it; it knows nothing of rollouts' origins, rewards or algorithms: it computes one SUM over tokens of
weight × loss, and every normalisation is already in the weights. One contract suite (agentlightning.testing.engine_contract)
runs against every engine, those of other packages too.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from agentlightning.engines.support import Support
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TokenNumbers, TrainingSequence

Metrics = dict[str, float]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

DEFAULT_POLICY = "default"


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
class Endpoints:
    """The servers that sample one policy, and what gateways have to know of them."""

    urls: Sequence[str]
    """Base URLs, whose servers are equals: an attempt stays with one of them as long as that answers."""
    api: Literal["generate", "completions"] = "generate"
    """Route of the token path: /inference/v1/generate, or /v1/completions with return_token_ids."""
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
        """Capabilities as configured; known before `start`, so that other settings stop a run before it begins."""
        ...

    @property
    def device(self) -> str:
        """Torch device of the learner, once started: also where the settings say "auto"; empty before."""
        ...

    async def start(self) -> Mapping[str, Endpoints]:
        """Start what serves and learns; returns the endpoints of each policy by its alias. They do not change: a server that
        is started again has its old URL."""
        ...

    async def watch(self) -> None:
        """Keep the parts that sample running, beside the work; never returns. EngineError when they cannot be kept."""
        ...

    def pids(self) -> Mapping[str, int]:
        """Process ids of the parts that run on this machine, by names such as `sampler` and `learner`; none before start."""
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
        mismatched: Sequence[TrainingSequence] = (),
        policy: str = DEFAULT_POLICY,
    ) -> Metrics:
        """Add the gradient of SUM over examples of weight × loss, a loss of whole completions; see engines/preferences.py.

        mismatched are completions beside prompts of others, from which kto estimates its baseline. All sequences carry
        ref_logprobs. Metrics: loss, examples, tokens, margin; accuracy for dpo, baseline for kto.
        """
        ...

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY) -> list[list[float]]:
        """Log-probability of every token given those before it, at the sequence's temperature; 0 for the first."""
        ...

    async def reference_logprobs(
        self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY
    ) -> list[list[float]]:
        """The same under the frozen weights that the engine was made with, where it keeps them."""
        ...

    async def values(self, sequences: Sequence[TrainingSequence], policy: str = DEFAULT_POLICY) -> list[list[float]]:
        """Values of the state before every token, by the value head where there is one; 0 for the first token."""
        ...

    async def token_numbers(self, policy: str = DEFAULT_POLICY) -> list[TokenNumbers]:
        """Ratios of the loss in the last forward_backward of this policy, policy / old_logprobs where sequences had them,
        else policy / sampler, and entropies of the policy, for every token of its sequences; 1 and 0 where their mask is
        False."""
        ...

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = DEFAULT_POLICY) -> Metrics:
        """Clip the accumulated gradient to the norm, update, zero it. Metrics: grad_norm (before clipping), and where the
        engine counts them learner_tokens: those that it computed since the last one, padding among them, a beginning that
        it shares once."""
        ...

    async def publish(self, version: int, policy: str = DEFAULT_POLICY) -> None:
        """The current weights serve from now on, stamped `version`; calls in flight go on over them."""
        ...

    async def save(self, path: Path, policy: str = DEFAULT_POLICY) -> None:
        """Write a transformers folder (weights, config, tokenizer) with the learner's state, whole or not at all.

        It is sealed; see engines/saved_folders.py for that, and for the state's name.
        """
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
