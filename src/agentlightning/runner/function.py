"""The runner for agents that are Python callables: coroutines on the worker's event loop, plain functions in threads.

Also what both runners have in common: the `AgentRunner` protocol and `invoke`. Driven by the worker, which owns time limits,
rewards and reports; refuses to know about stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.errors import AgentError
from agentlightning.records import Claim, RewardSource
from agentlightning.runner.agent import LLM
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.shared_process import alarms_told, forks_ended

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutput:
    """Outcome of one run of an agent."""

    output: object = None
    """The return value, or the tail of the standard output: what a reward function sees."""
    reward: object = None
    """The final reward as the agent gave it, not yet checked; None where it gave none."""
    reward_source: RewardSource = "return"
    feedback: object = None
    """Words of the agent about its reward, not yet checked."""
    printed: str | None = None
    """Tail of what a program printed, to be kept with the attempt."""


class AgentRunner(Protocol):
    """Runs one kind of agent. Cancelling `run` stops the agent; it returns only when nothing of it runs any more."""

    async def run(self, claim: Claim, llm: LLM) -> AgentOutput: ...


class FunctionRunner:
    """Runs a callable. `threads` must have a thread for each attempt of the worker."""

    def __init__(self, agent: Callable[..., Any], threads: Executor, *, scored: bool = False) -> None:
        self._agent = agent
        self._threads = threads
        self._scored = scored
        """With a reward function, what the agent returns is its output unless it is a number."""

    def close(self) -> None:
        """Ends what the agent started for all its attempts, where it has a `close`. What that raises is logged."""
        close = getattr(self._agent, "close", None)
        if callable(close):
            try:
                close()
            except Exception:
                log.exception("the agent could not be closed")

    async def run(self, claim: Claim, llm: LLM) -> AgentOutput:
        output = await invoke(self._agent, self._threads, claim.rollout.task, llm)
        is_output = self._scored and (isinstance(output, str | bytes) or not hasattr(output, "__float__"))
        if isinstance(output, Mapping) and not self._scored and {"feedback", "reward"} & output.keys():
            reward = output.get("reward", output.get("score"))
            return AgentOutput(output=output, reward=reward, feedback=output.get("feedback"))
        return AgentOutput(output=output, reward=None if is_output else output)


async def invoke(function: Callable[..., Any], threads: Executor, *arguments: Any, what: str = "the agent") -> Any:
    """Call a user's function: awaited where it is asynchronous, else in a thread that sees the attempt. AgentError where it
    would end what it runs in; else it raises what the function does.

    Cancelling waits for the thread, which nothing can stop: whoever cancels decides how long to wait for that.
    """
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            with forks_ended():
                return await function(*arguments)
        result = await _in_thread(function, threads, arguments)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as cause:  # would end the worker and every sibling
        raise AgentError(f"{what} ended its process: {type(cause).__name__}({cause})") from cause
    except asyncio.CancelledError as cause:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise AgentError(f"{what} cancelled its own attempt") from cause


async def _in_thread(function: Callable[..., Any], threads: Executor, arguments: tuple[Any, ...]) -> Any:
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(threads, context.run, _call, function, arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        future.exception()
        raise


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    attempt = CURRENT.get(None)
    if attempt is not None:
        attempt.thread = threading.get_ident()
    try:
        with forks_ended(), alarms_told():
            return function(*arguments)
    except StopIteration as cause:  # a future cannot carry it
        raise AgentError("StopIteration was raised") from cause
    finally:
        if attempt is not None:
            attempt.thread = None
