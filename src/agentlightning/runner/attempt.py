"""The attempt that a piece of agent code belongs to, wherever that code runs.

A worker opens one `AttemptContext` for each claim; the agent's code, its tasks and its threads find it by context variable.
Knows nothing of stores or HTTP.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import uuid_utils

from agentlightning.errors import AgentError
from agentlightning.prompts.rollout_prompts import RolloutPrompts
from agentlightning.records import Claim, Finish, Lease, Reward, RewardSource, WorkerStatus
from agentlightning.store.rules import MAX_REWARDS
from agentlightning.tracing.buffer import SpanBuffer

CURRENT: ContextVar[AttemptContext] = ContextVar("agentlightning_attempt")

Interruption = Literal["timed_out", "lost", "expired", "revoked"]


@dataclass(eq=False, slots=True)
class AttemptContext:
    """One claim while its agent runs."""

    claim: Claim
    started: float
    """time.monotonic() of the claim."""
    lease_ends: float = math.inf
    """clock.elapsed_s() of the moment from which the server may give the rollout to another worker."""
    boots: frozenset[str] = frozenset()
    """Boot ids of the servers known when the claim was granted: a further one is that of a server that was restarted, or of
    a gateway not met before, which happens once."""
    rewards: list[Reward] = field(default_factory=list)
    open: bool = True
    """False once the attempt's end is decided; later rewards are refused."""
    interruption: Interruption | None = None
    """Reason why the worker interrupted it; expired: the lease could not be renewed; revoked: it is no
    longer held, so nothing is reported."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks started by the agent that run, to find out whose code blocks an event loop."""
    left_loop: BaseException | None = None
    """Raised by a task of the agent to end the process, or by its handler of signals amid somebody else's code."""
    thread: int | None = None
    """Identity of the thread that a synchronous agent runs in, while it does."""
    work: asyncio.Task[Finish] | None = None
    """The task that runs the agent."""
    spans: SpanBuffer | None = None
    """Spans of its agent's code that the store does not have yet; None where this worker does not trace."""
    delivering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while spans are on their way to the store."""
    prompts: RolloutPrompts = field(default_factory=RolloutPrompts)
    """The run's prompt templates, in the versions of the rollout."""
    hung: bool = False
    """The agent could not be interrupted: its thread or task still runs."""

    @property
    def lease(self) -> Lease:
        return self.claim.lease

    @property
    def deadline(self) -> float:
        return self.started + self.claim.rollout.retry.timeout_s

    def reward(self, value: float, source: RewardSource, name: str = "reward", call_id: str | None = None) -> Reward:
        """A reward record of this attempt; not yet added to `rewards`."""
        rollout = self.claim.rollout
        return Reward(
            id=str(uuid_utils.uuid7()),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=self.lease.attempt,
            value=value,
            name=name,
            call_id=call_id,
            source=source,
            created_ns=time.time_ns(),
        )

    def interrupt(self, why: Interruption) -> None:
        """Cancel the agent, unless it has ended or is being interrupted already."""
        if self.work is not None and not self.work.done() and self.interruption is None:
            self.interruption = why
            self.work.cancel()

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        """One of its tasks is done. What would have ended the process of an agent that runs alone ends the attempt."""
        self.tasks.discard(task)
        error = task._exception  # `exception()` would keep asyncio from logging one that nobody takes
        if isinstance(error, SystemExit | KeyboardInterrupt):
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End the attempt for what its agent raised where the agent's own coroutine does not see it."""
        if self.open and self.work is not None:
            self.left_loop = error
            self.work.cancel()

    def emit(self, reward: Reward) -> None:
        """Keep a reward until the attempt finishes. AgentError once it has ended or holds too many."""
        if not self.open:
            raise AgentError(f"reward {reward.name!r}: its attempt has ended; emit rewards before the agent returns")
        if len(self.rewards) >= MAX_REWARDS:
            raise AgentError(f"reward {reward.name!r}: an attempt can hold at most {MAX_REWARDS} rewards")
        self.rewards.append(reward)


def status_here(worker_id: str, run_id: str, running: int) -> WorkerStatus:
    """This process as a worker that holds so many attempts."""
    return WorkerStatus(
        id=worker_id,
        run_id=run_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        running=running,
        seen_ns=time.time_ns(),
    )


def attributed_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> asyncio.Task[Any]:
    """A task factory that notes which attempt started each task (Task.get_context exists only from Python 3.12)."""
    attempt = context.get(CURRENT) if context is not None else CURRENT.get(None)
    task = AttributedTask(coroutine, loop=loop, context=context, **options)
    task.attempt = attempt
    if attempt is not None:
        attempt.tasks.add(task)
        task.add_done_callback(attempt.task_ended)
    return task


class AttributedTask(asyncio.Task[Any]):
    """A task that the code of another attempt cannot cancel: agents that end all tasks of "their" loop are common."""

    attempt: AttemptContext | None = None
    """The attempt that started it; None for the worker's own."""

    def cancel(self, msg: Any | None = None) -> bool:
        caller = CURRENT.get(None)
        if caller is not None and caller.open and caller is not self.attempt:
            return False
        return super().cancel(msg)
