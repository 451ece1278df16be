"""What was broken in spans, as numbers of a step."""

from __future__ import annotations

from agentlightning.records import Finish, NewRollout, Span, WorkerStatus
from agentlightning.store.base import RolloutQuery
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.load_trajectories import broken_spans


async def test_causes_are_summed_over_the_rollouts_of_a_step() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {})).id
        await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g", replica=number) for number in range(3)])
        claims = await store.claim(WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0), limit=3)
        for number, (claim, causes) in enumerate(
            zip(claims, ({"cycle": 2}, {"cycle": 1, "absent_id": 1}), strict=False)
        ):
            place = {"run_id": run_id, "rollout_id": claim.rollout.id, "attempt": 1}
            said = causes | {"other": "text"}
            await store.append_spans([Span(id=f"s{number}", name=BROKEN_SPANS, attributes=said, **place)])
        await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])
        rollouts = await store.rollouts(RolloutQuery(run_id=run_id))
        assert await broken_spans(store, rollouts) == {"cycle": 3, "absent_id": 1}
        assert await broken_spans(store, rollouts[2:]) == {}
