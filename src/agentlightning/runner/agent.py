"""What an agent is written against: `LLM`, `emit_reward`, `rollout`, `PromptTemplate`.

An agent is any callable ``solve(task: dict, llm: LLM) -> float | int | bool | None``, synchronous or not; a number is
the rollout's final reward, None leaves it to the reward function (`result.py`) or to rewards that were emitted or
posted. Loads nothing but the standard library and our types.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from agentlightning.errors import AgentError, ConfigError
from agentlightning.protocols import neutral
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.connections import Connections
from agentlightning.store.base import reward_number
from agentlightning.types import Claim, Sampling

Agent = TypeVar("Agent", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class LLM:
    """The model as an agent sees it: give these to any SDK."""

    base_url: str
    """For OpenAI clients; ends in /v1."""
    anthropic_base_url: str
    """For Anthropic clients, which add /v1 themselves."""
    api_key: str
    """Opens the gateway for this attempt only."""
    model: str
    sampling: Sampling = field(default_factory=Sampling)
    """What the gateway samples with, whatever the agent asks for."""
    connections: Connections = field(default_factory=Connections, repr=False, compare=False)

    @property
    def http_client(self) -> Any:
        """``AsyncOpenAI(http_client=llm.http_client)``: one connection pool for a worker's event loop. Do not close it."""
        return self.connections.asynchronous()

    @property
    def sync_http_client(self) -> Any:
        """``OpenAI(http_client=llm.sync_http_client)``: one connection pool for a worker's threads. Do not close it."""
        return self.connections.synchronous()


def llm_for(claim: Claim, server_url: str, model: str, connections: Connections) -> LLM:
    """The LLM of one claim: URLs built from the server's address, as this machine reaches it."""
    root = f"{server_url.rstrip('/')}/r/{claim.rollout.id}/{claim.lease.attempt}"
    return LLM(
        base_url=f"{root}/v1",
        anthropic_base_url=root,
        api_key=claim.key,
        model=model,
        sampling=claim.rollout.sampling,
        connections=connections,
    )


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A named text with ``{fields}``, in the style of str.format.

    >>> PromptTemplate("greet", "Hello {name}").render(name="Ada")
    'Hello Ada'
    """

    name: str
    template: str

    def render(self, /, **fields: object) -> str:
        """The text with its fields filled in; ConfigError names a field that is missing or cannot be read."""
        try:
            wanted = {field for _, field, _, _ in string.Formatter().parse(self.template) if field is not None}
            return self.template.format(**fields)
        except KeyError as missing:
            raise ConfigError(
                f"prompt template {self.name!r}: field {missing} was not given; it has "
                f"{', '.join(sorted(wanted))}, and got {', '.join(sorted(fields)) or 'none'}"
            ) from None
        except (ValueError, IndexError, AttributeError) as cause:
            raise ConfigError(
                f"prompt template {self.name!r} cannot be rendered: {cause} (a literal brace is written twice)"
            ) from cause


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
    """Whether `rollout` marked it."""
    return getattr(value, "__agl_rollout__", False) is True


def emit_reward(value: float, name: str = "reward", call_id: str | None = None) -> None:
    """Record a reward for the attempt that this code runs in.

    Without `call_id` it is a final reward, of which the last one counts; with one (the `id` of the model's answer) it is a
    step reward of that call. Works in coroutines, tasks, synchronous agents and in threads started by asyncio.to_thread.
    RewardError where `value` is not a finite number, AgentError outside an attempt.
    """
    attempt = CURRENT.get(None)
    if attempt is None:
        raise AgentError(
            f"emit_reward({value!r}) was called outside an attempt: call it from an agent that a worker runs; a thread "
            "of your own sees its attempt when started by asyncio.to_thread or contextvars.copy_context().run"
        )
    call = neutral.call_id(call_id) if call_id is not None else None
    attempt.emit(attempt.reward(reward_number(value, name), "emitted", name, call))
