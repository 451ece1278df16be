"""Agents that go on from a summary of their own, through the gateway's record to what is trained."""

from __future__ import annotations

from typing import Any

from gateway_house import House

import build
from agentlightning.adapters.sequences import merge
from agentlightning.adapters.trajectories import trajectories
from agentlightning.records import Claim, Finish
from agentlightning.store.base import RolloutQuery
from agentlightning.training_types import Trajectory

TASK = {"role": "user", "content": "hi"}
SUMMARY = "one word was said, and it was two"


async def recorded(house: House, claim: Claim) -> Trajectory:
    await house.store.finish([Finish(lease=claim.lease, state="succeeded", rewards=[build.reward(claim)])])
    [rollout] = await house.store.rollouts(RolloutQuery(ids=[claim.rollout.id]))
    [found], _ = trajectories([rollout], await house.store.calls([rollout.id]))
    return found


async def by_chat(house: House, claim: Claim) -> None:
    """The agent asks for a summary itself, and puts it into a message of its own."""
    client = house.openai(claim)

    async def ask(*messages: Any) -> Any:
        reply = await client.chat.completions.create(model="policy", messages=list(messages))
        return {"role": "assistant", "content": reply.choices[0].message.content}

    said = await ask(TASK)
    summary = await ask(TASK, said, {"role": "user", "content": "summarise"})
    await ask(TASK, {"role": "user", "content": f"so far: {summary['content']}"})


async def test_a_compacted_conversation_is_two_rows_in_which_each_token_is_trained_once(
    house: House,
) -> None:
    house.say("the first answer", SUMMARY, "the last answer")
    claim = await house.claim()
    await by_chat(house, claim)
    first, summary, last = (await recorded(house, claim)).transitions
    assert summary.parent is not None
    assert summary.parent.call_id == first.call_id
    assert last.parent is None
    rows = merge("r", [first, summary, last], [1.0] * 3, [1.0] * 3)
    assert [row.calls for row in rows] == [[first.call_id, summary.call_id], [last.call_id]]
    assert [sum(row.mask) for row in rows] == [
        len(first.sampled_ids) + len(summary.sampled_ids),
        len(last.sampled_ids),
    ]
