"""One attempt from its claim to its end: run the agent within its time, settle its rewards, tell what went wrong.

Driven by the worker, which claims, reports and decides what an end means for the process. Whatever user code does becomes a
`Finish`; nothing of it escapes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Sequence

from agentlightning.config.run import public_task
from agentlightning.errors import InfrastructureError, RewardError, VerifierError
from agentlightning.records import AttemptEnd, Cause, Finish, Reward
from agentlightning.runner.agent import llm_for
from agentlightning.runner.air import AttemptAir
from agentlightning.runner.attempt import CURRENT, AttemptContext
from agentlightning.runner.command import CommandFailed
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.runner.failure import bounded, describe, interrupted_at, origin, proxy_diagnosis, stack
from agentlightning.runner.function import AgentOutput, AgentRunner
from agentlightning.runner.result import result_of
from agentlightning.runner.scoring import Scorer
from agentlightning.store.base import LEASE_S, LightningStore
from agentlightning.store.rules import reward_number
from agentlightning.store.scan import feedback_span, feedback_text
from agentlightning.store.templates import TemplateReader
from agentlightning.tracing.buffer import SpanBuffer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Executes the attempts of one worker."""

    store: LightningStore
    server_url: str
    model: str
    runner: AgentRunner
    reward: Scorer | None
    """The reward function."""
    abandon_s: float
    """Time for an interrupted agent before it counts as hung."""
    templates: TemplateReader
    connections: ConnectionPool = dataclasses.field(default_factory=ConnectionPool)
    traced: bool = False
    """Agents of this process are traced: the store gets the spans that they make."""
    delivery_timeout_s: float = LEASE_S
    """Time for spans while the store is away; they are never worth an attempt's end."""
    private: Sequence[str] = ()
    """Fields of tasks that reward functions get and agents do not."""
    air: AttemptAir | None = None
    """AIR, over the record of each attempt; None where the run has no rules."""

    async def execute(self, attempt: AttemptContext) -> Finish:
        """Run the attempt to its end; marks it as hung where its agent cannot be interrupted."""
        CURRENT.set(attempt)
        if self.traced:
            rollout = attempt.claim.rollout
            attempt.spans = SpanBuffer(rollout.run_id, rollout.id, attempt.lease.attempt)
        attempt.work = work = asyncio.create_task(self._work(attempt))
        await asyncio.wait({work}, timeout=max(0.0, attempt.deadline - time.monotonic()))
        if not work.done():
            attempt.interrupt("timed_out")
            await asyncio.wait({work}, timeout=self.abandon_s)
        attempt.open = False
        if not work.done():
            attempt.hung = True
            finish = ended(attempt, "failed", f"could not be interrupted at:\n{stack(attempt.thread)}")
        elif work.cancelled():  # before its first step
            finish = ended(attempt, "failed", "")
        else:
            finish = work.result()
        finish = _interrupted(attempt, finish) if attempt.interruption is not None else finish
        if attempt.left_loop is not None and attempt.interruption is None:
            text = f"a task or a signal's handler of the agent raised:\n{describe(attempt.left_loop)}"
            finish = ended(attempt, "failed", bounded(text), exited=True)
        if attempt.spans is not None:
            attempt.spans.close()
            await self.deliver(attempt)
            if attempt.spans.pending:  # how many were lost on the way
                await self.deliver(attempt)
        return finish if self.air is None or attempt.hung else await self.air.add_rewards(finish)

    async def deliver(self, attempt: AttemptContext) -> None:
        """Bring the attempt's spans so far to the store; those that cannot be brought there are counted as lost, which the
        next delivery tells. Each by itself: the store's client sends as one request what is appended together."""
        if attempt.spans is None:
            return
        async with attempt.delivering:  # returns once what was taken before is delivered, too
            sending = [asyncio.ensure_future(self.store.append_spans([span])) for span in attempt.spans.take()]
            if not sending:
                return
            try:
                done, late = await asyncio.wait(sending, timeout=self.delivery_timeout_s)
            finally:
                for each in sending:
                    each.cancel()
            if lost := len(late) + sum(each.exception() is not None for each in done):
                attempt.spans.count_lost(lost)

    async def _work(self, attempt: AttemptContext) -> Finish:
        whose: Cause | None = None  # of the code that runs, where that is the user's
        try:
            rollout = attempt.claim.rollout
            shown = (
                dataclasses.replace(rollout, task=public_task(rollout.task, self.private)) if self.private else rollout
            )
            claim = dataclasses.replace(attempt.claim, rollout=shown)
            attempt.prompts = await self.templates.of(shown)
            llm = llm_for(claim, self.server_url, self.model, self.connections, attempt.prompts)
            whose = "agent"
            run = await self.runner.run(claim, llm)
            whose = None
            returned = self._returned(attempt, run)
            whose = "verifier"
            scored = await self._scored(self.reward, attempt, run) if self.reward is not None else None
            whose = None
            rewards = await self._settle(attempt, run, returned, scored)
        except asyncio.CancelledError as cause:
            if attempt.interruption is None:
                text = f"the agent's code cancelled its own attempt\n{describe(cause)}"
                return ended(attempt, "failed", bounded(text), exited=whose == "agent", cause=_known(whose))
            where = interrupted_at(cause)
            return ended(attempt, "failed", f"it was at:\n{where}" if where else "")
        except CommandFailed as failure:
            return ended(attempt, "failed", bounded(str(failure)), failure.output, exited=failure.exited)
        except BaseException as error:  # the agent's own code: whatever it raises ends its attempt only
            why = origin(error)
            if isinstance(why, InfrastructureError):
                return ended(attempt, "lost", describe(why), cause="infra")
            if isinstance(why, VerifierError):
                return ended(attempt, "failed", describe(why), cause="verifier")
            exited = whose == "agent" and not isinstance(error, RewardError)
            return ended(attempt, "failed", describe(error), exited=exited, cause=_known(whose))
        return Finish(
            lease=attempt.lease,
            state="succeeded",
            rewards=rewards,
            output=run.printed,
            diagnosis=proxy_diagnosis(self.server_url, os.environ),
        )

    def _returned(self, attempt: AttemptContext, run: AgentOutput) -> list[Reward]:
        """The reward that the agent returned or printed. RewardError where it is no number, or none was wanted."""
        if run.reward is None:
            return []
        name = "the agent's return value" if run.reward_source == "return" else "the printed reward"
        value = reward_number(run.reward, name)
        if self.reward is not None:
            raise RewardError(
                f"{name} ({value:g}) is a reward and a reward function is configured: give the reward in one way only"
            )
        return [attempt.reward(value, run.reward_source)]

    async def _settle(
        self,
        attempt: AttemptContext,
        run: AgentOutput,
        returned: list[Reward],
        scored: tuple[list[Reward], str] | None,
    ) -> tuple[Reward, ...]:
        """All rewards of the attempt. RewardError where the final one is missing."""
        feedback = feedback_text(run.feedback, "the agent's feedback")
        if scored is not None:
            returned, feedback = scored
        rewards = (*attempt.rewards, *returned)
        if all(reward.call_id is not None for reward in rewards) and not await self._was_posted(attempt):
            raise RewardError(
                "the attempt has no final reward: return a number, call emit_reward, POST one to the reward URL, "
                'print {"reward": …} as the last line, or configure a reward function'
            )
        if feedback:
            await self.store.append_spans([feedback_span(attempt.claim.rollout, attempt.lease.attempt, feedback)])
        return rewards

    async def _scored(self, scorer: Scorer, attempt: AttemptContext, run: AgentOutput) -> tuple[list[Reward], str]:
        """Returns the rewards of the reward function, of which the final one is the last, and its feedback."""
        await self.deliver(attempt)
        ids, number = [attempt.lease.rollout_id], attempt.lease.attempt
        calls, spans, told = await asyncio.gather(
            self.store.calls(ids, number), self.store.spans(ids), self.store.rewards(ids)
        )
        result = result_of(calls, spans, [*told, *attempt.rewards], number, run.output)
        score = await scorer.score(attempt.claim.rollout.task, result)
        steps = [
            attempt.reward(value, "function", name, call)
            for call, named in score.steps.items()
            for name, value in named.items()
        ]
        finals = [attempt.reward(value, "function", name) for name, value in score.finals.items()]
        return [*steps, *finals], score.feedback

    async def _was_posted(self, attempt: AttemptContext) -> bool:
        recorded = await self.store.rewards([attempt.lease.rollout_id])
        return any(reward.attempt == attempt.lease.attempt and reward.call_id is None for reward in recorded)


def ended(
    attempt: AttemptContext,
    state: AttemptEnd,
    error: str,
    output: str | None = None,
    *,
    exited: bool = False,
    cause: Cause | None = None,
) -> Finish:
    """A Finish other than succeeded; a lost attempt takes its rewards with it. exited: by the agent's own code. cause: where
    it is known here."""
    rewards = tuple(attempt.rewards) if state != "lost" else ()
    return Finish(
        lease=attempt.lease, state=state, rewards=rewards, error=error, exited=exited, output=output, cause=cause
    )


def _known(whose: Cause | None) -> Cause | None:
    """The cause of a failure of such code: the record says whether an agent was refused, or at its limit."""
    return whose if whose == "verifier" else None


def _interrupted(attempt: AttemptContext, finish: Finish) -> Finish:
    """The end of an interrupted attempt, whatever the agent made of the interruption."""
    limit = attempt.claim.rollout.retry.timeout_s
    late = attempt.interruption == "timed_out"
    text = f"the attempt took longer than its {limit:g} s" if late else "the worker was stopped"
    if attempt.interruption == "expired":
        text = "the worker could not renew its lease, and stopped the agent before another worker could get the rollout"
    if late and finish.error:
        text = bounded(f"{text}; {finish.error}")
    return ended(attempt, "timed_out" if late else "lost", text, finish.output)
