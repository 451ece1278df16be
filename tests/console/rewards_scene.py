"""A run whose reward is hacked: longer rollouts earn more, another reward and the held-out one fall; its names attack."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from console_scene import ATTACK, GROUP, SECOND, a_call

import build
from agentlightning.config.run import parse_config, run_record
from agentlightning.records import (
    Call,
    CallCredit,
    Claim,
    Consumed,
    ConsumedInputs,
    Finish,
    Metric,
    NewRollout,
    Reward,
    Rollout,
    VersionSpan,
    WorkerStatus,
)
from agentlightning.store.base import LightningStore

RUN = "hacked"
STEPS = 6
GROUPS = 2
STYLE = f"style {ATTACK}"
"""Name of the second reward."""


def record(**algorithm: Any) -> dict[str, Any]:
    """A configuration as the store of a run has it."""
    table = {
        "model": {"path": "m"},
        "agent": {"run": "agent.py:solve"},
        "data": {"train": "tasks.jsonl", "val": "held-out.jsonl"},
        "algorithm": {"group_size": GROUP, **algorithm},
    }
    return run_record(parse_config(table))


async def fill_rewards(store: LightningStore, config: dict[str, Any] | None = None) -> None:
    """Six steps of two groups of four rollouts of two calls, consumed, with the credit that the run's GRPO gave."""
    await store.create_run(ATTACK, record() if config is None else config, RUN)
    for step in range(1, STEPS + 1):
        await _step(store, step)
        values = {"train/reward_mean": 0.1 * step, "eval/greedy/reward_mean": 0.9 - 0.1 * step}
        values |= {f"rewards/{STYLE}/mean": 1.0 - 0.1 * step, "train/tokens_sampled": 80.0, "rollout/count": 8.0}
        await store.log_metrics(
            [Metric(run_id=RUN, step=step, name=name, value=value) for name, value in values.items()]
        )
    await store.update_run(RUN, state="finished", summary={"step": STEPS})


async def _step(store: LightningStore, step: int) -> None:
    await store.enqueue(
        [
            NewRollout(run_id=RUN, task={"question": ATTACK}, group_id=f"{step}-{group}", replica=replica, step=step)
            for group in range(GROUPS)
            for replica in range(GROUP)
        ]
    )
    worker = WorkerStatus(id="w", run_id=RUN, host="h", pid=1, running=0, seen_ns=0)
    claims = await store.claim(worker, limit=GROUPS * GROUP)
    consumed, credit = [], list[CallCredit]()
    for claim in claims:
        calls = [a_long_call(claim, number) for number in range(2)]
        value = earned(claim.rollout)
        rewards = [
            a_final(claim, STYLE, 1.0 - value),
            a_final(claim, "reward", value),
        ]  # the last one is the rollout's own
        await store.append_calls(calls)
        await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=tuple(rewards))])
        inputs = ConsumedInputs(attempt=1, calls=[call.id for call in calls], rewards=[one.id for one in rewards])
        consumed.append(Consumed(rollout_id=claim.rollout.id, outcome="trained", inputs=inputs))
        credit += [_credit(claim.rollout, call) for call in calls]
    await store.open_step(RUN, step, consumed)
    await store.record_credit(credit)
    await store.close_step(RUN, step, step)


def earned(rollout: Rollout) -> float:
    """The reward of a rollout: by the length of its second call alone."""
    return rollout.replica / (GROUP - 1)


def a_long_call(claim: Claim, number: int) -> Call:
    length = 4 + 4 * claim.rollout.replica if number else 4
    call = a_call(claim, number, ATTACK, 1_800_000_000 * SECOND)
    return replace(
        call,
        sampled_ids=[4] * length,
        logprobs=[-0.5] * length,
        versions=[VersionSpan(version=claim.rollout.step, start=0, end=length)],
        prompt_tokens=3 + 7 * number,
        decoding={},
    )


def a_final(claim: Claim, name: str, value: float) -> Reward:
    return build.reward(claim, value, f"{claim.rollout.id} {name}", name=name, source="function")


def _credit(rollout: Rollout, call: Call) -> CallCredit:
    advantage = grpo([place / (GROUP - 1) for place in range(GROUP)], rollout.replica)
    count = len(call.sampled_ids)
    return CallCredit(
        run_id=RUN,
        step=rollout.step,
        rollout_id=rollout.id,
        call_id=call.id,
        policy="default",
        credit=earned(rollout),
        advantage=advantage,
        return_=None,
        weight=0.125,
        trained_tokens=count,
        token_advantages=[advantage] * count,
        token_ratios=[1.0, 1.25, 0.75, *[1.0] * (count - 3)],
        clip_share=1 / count,
        token_entropies=[0.0, 1.0, 3.0, *[0.5] * (count - 3)],
    )


def grpo(rewards: Sequence[float], place: int) -> float:
    return (rewards[place] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)
