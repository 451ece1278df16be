"""The interface that an agent is written against: `LLM`, `emit_reward`, `prompt`, `rollout`.

An agent is any callable ``solve(task: dict, llm: LLM) -> float | int | bool | None``, synchronous or not; a number is
the rollout's final reward, None leaves it to the reward function (`result.py`) or to rewards that were emitted or
posted. Loads nothing but the standard library and our types.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, overload

from agentlightning.errors import AgentError, ConfigError
from agentlightning.prompts.rollout_prompts import RolloutPrompts, variable_name
from agentlightning.prompts.templates import Message
from agentlightning.protocols.base import call_id as recorded_call_id
from agentlightning.records import Claim, Rollout, Sampling
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.connection_pool import ConnectionPool, Sdk
from agentlightning.store.rules import reward_name, reward_number

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

Agent = TypeVar("Agent", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class LLM:
    """The model as an agent sees it: a ready client of an SDK, or what any other SDK needs to make one."""

    base_url: str
    """For OpenAI clients; ends in /v1."""
    anthropic_base_url: str
    """For Anthropic clients, which add /v1 themselves."""
    api_key: str
    """Opens the gateway for this attempt only."""
    model: str
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling parameters of the gateway, whatever the agent asks for."""
    connections: ConnectionPool = field(default_factory=ConnectionPool, repr=False, compare=False)
    prompts: RolloutPrompts = field(default_factory=RolloutPrompts, repr=False, compare=False)
    """The run's prompt templates, in the versions of this rollout."""
    seed: int = 0
    """For what an agent draws by chance: 31 bits, the same in all attempts of a rollout and in its forks."""

    def prompt(self, name: str, /, **fields: object) -> str | list[Message]:
        """The text of a prompt template of the run, or its messages; placeholders that `fields` lack are the task's.

        InputError names a template that the run does not have, and a placeholder that nothing fills.
        """
        return self.prompts.render(name, **fields)

    @property
    def google_base_url(self) -> str:
        """For Google clients, which add /v1beta themselves."""
        return self.anthropic_base_url

    @property
    def http_client(self) -> Any:
        """``AsyncOpenAI(http_client=llm.http_client)``: one connection pool for a worker's event loop. Do not close it.

        Of the HTTP library that the installed openai stands on, else of anthropic's. Where the two differ, `async_anthropic`
        makes a client over a pool of its own library.
        """
        return self.connections.async_client()

    @property
    def sync_http_client(self) -> Any:
        """``OpenAI(http_client=llm.sync_http_client)``: one connection pool for a worker's threads. Do not close it."""
        return self.connections.sync_client()

    def openai(self, **options: Any) -> OpenAI:
        """A client of the OpenAI SDK over the worker's connection pool: do not close it. `options` go to its constructor."""
        return self._client("openai", "OpenAI", self.base_url, options)  # type: ignore[no-any-return]

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """The same for coroutines."""
        return self._client("openai", "AsyncOpenAI", self.base_url, options)  # type: ignore[no-any-return]

    def anthropic(self, **options: Any) -> Anthropic:
        """The same of the Anthropic SDK."""
        return self._client("anthropic", "Anthropic", self.anthropic_base_url, options)  # type: ignore[no-any-return]

    def async_anthropic(self, **options: Any) -> AsyncAnthropic:
        """The same of the Anthropic SDK, for coroutines."""
        return self._client("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)  # type: ignore[no-any-return]

    def _client(self, package: Sdk, kind: str, base_url: str, options: dict[str, Any]) -> Any:
        try:
            sdk = importlib.import_module(package)
        except ModuleNotFoundError as cause:
            raise ConfigError(f"llm: {kind} needs {cause.name}; install it with: pip install {package}") from cause
        pool = self.connections
        http_client = pool.async_client(package) if kind.startswith("Async") else pool.sync_client(package)
        given = {"base_url": base_url, "api_key": self.api_key, "http_client": http_client}
        return getattr(sdk, kind)(**(given | options))


def llm_for(
    claim: Claim,
    server_url: str,
    model: str,
    connections: ConnectionPool,
    prompts: RolloutPrompts = RolloutPrompts(),
) -> LLM:
    """The LLM of one claim: URLs built from the server's address, as this machine reaches it."""
    root = f"{server_url.rstrip('/')}/r/{claim.rollout.id}/{claim.lease.attempt}"
    return LLM(
        base_url=f"{root}/v1",
        anthropic_base_url=root,
        api_key=claim.key,
        model=model,
        sampling=claim.rollout.sampling,
        connections=connections,
        prompts=prompts,
        seed=_seed(claim.rollout),
    )


def _seed(rollout: Rollout) -> int:
    root_id = rollout.id if rollout.fork is None else rollout.fork.root_id
    return int.from_bytes(blake2b(root_id.encode(), digest_size=4).digest(), "big") >> 1


@overload
def rollout(agent: Agent) -> Agent: ...
@overload
def rollout(agent: None = None) -> Callable[[Agent], Agent]: ...
def rollout(agent: Agent | None = None) -> Agent | Callable[[Agent], Agent]:
    """Mark a callable as the agent of its file, so that ``agl worker agent.py`` finds it without a name. Optional.

    The callable is returned unchanged and can be called as before.
    """
    if agent is None:
        return rollout
    agent.__agl_rollout__ = True  # type: ignore[attr-defined]
    return agent


def is_marked(value: object) -> bool:
    """Returns whether `rollout` marked it."""
    return getattr(value, "__agl_rollout__", False) is True


def emit_reward(value: float, name: str = "reward", call_id: str | None = None) -> None:
    """Record a reward for the attempt that this code runs in.

    Without `call_id` it is a final reward, of which the last one counts; with one (the `id` of the model's completion) it is
    a step reward of that call. Works in coroutines, tasks, synchronous agents and in threads started by asyncio.to_thread.
    RewardError where `value` is not a finite number, AgentError outside an attempt.
    """
    attempt = CURRENT.get(None)
    if attempt is None:
        raise AgentError(
            f"emit_reward({value!r}) was called outside an attempt: call it from an agent that a worker runs; a thread "
            "of your own sees its attempt when started by asyncio.to_thread or contextvars.copy_context().run"
        )
    call = recorded_call_id(call_id) if call_id is not None else None
    attempt.emit(attempt.reward(reward_number(value, name), "emitted", reward_name(name), call))


def prompt(name: str, /, **fields: object) -> str | list[Message]:
    """`LLM.prompt` for code that has no LLM at hand. AgentError outside an attempt."""
    attempt = CURRENT.get(None)
    if attempt is None:
        raise AgentError(
            f"prompt({name!r}) was called outside an attempt: call it from an agent that a worker runs; a program finds its "
            f"prompts in the environment, as {variable_name(name)}"
        )
    return attempt.prompts.render(name, **fields)
