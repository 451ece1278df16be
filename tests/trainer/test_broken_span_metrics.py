"""What was broken in spans, as numbers of a step."""

from __future__ import annotations

from loop_doubles import WORKER

import build
from agentlightning.records import Finish, NewRollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.trainer.load_trajectories import broken_spans


async def test_causes_are_summed_over_the_rollouts_of_a_step(store: LightningStore) -> None:
    await store.enqueue([NewRollout(run_id="run", task={}, group_id="g", replica=number) for number in range(3)])
    claims = await store.claim(WORKER, limit=3)
    causes: tuple[dict[str, int], ...] = ({"cycle": 2}, {"cycle": 1, "absent_id": 1})
    for number, (claim, own) in enumerate(zip(claims, causes, strict=False)):
        said = own | {"other": "text"}
        await store.append_spans([build.span(claim, BROKEN_SPANS, f"s{number}", attributes=said)])
    await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])
    rollouts = await store.rollouts(RolloutQuery(run_id="run"))
    assert await broken_spans(store, rollouts) == {"cycle": 3, "absent_id": 1}
    assert await broken_spans(store, rollouts[2:]) == {}
