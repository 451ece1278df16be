"""An attempt's spans at its end: what the store does not take is lost, which the record says, and the attempt is not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import InputError
from agentlightning.records import NewRollout, Span, WorkerStatus
from agentlightning.runner.__main__ import current_spans
from agentlightning.runner.attempt import AttemptContext
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.store.base import RolloutQuery
from agentlightning.store.gateway_events import BROKEN, BROKEN_SPANS
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.templates import TemplateReader
from agentlightning.tracing.tracer import Tracer


class Picky(InMemoryLightningStore):
    """Refuses spans named "bad"."""

    async def append_spans(self, spans: Sequence[Span]) -> None:
        if any(span.name == "bad" for span in spans):
            raise InputError("bad")
        await super().append_spans(spans)


async def test_spans_that_the_store_refuses_at_the_end_of_an_attempt_are_counted_in_its_warning() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(current_spans))

    def solve(task: Any, llm: Any) -> float:
        for name in ("good", "bad", "also good"):
            provider.get_tracer("agent").start_span(name).end()
        return 1.0

    async with Picky() as store:
        run_id = (await store.create_run("traced", {})).id
        await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g")])
        [claim] = await store.claim(WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0))
        with ThreadPoolExecutor(1) as threads:
            execution = Execution(
                store=store,
                server_url="http://127.0.0.1:9",
                model="policy",
                runner=FunctionRunner(solve, threads),
                reward=None,
                abandon_s=1.0,
                templates=TemplateReader(store),
                traced=True,
            )
            finish = await execution.execute(AttemptContext(claim, time.monotonic()))
        execution.connections.close()
        await store.finish([finish])
        spans = await store.spans([claim.rollout.id])
        [rollout] = await store.rollouts(RolloutQuery(ids=[claim.rollout.id]))
    assert sorted(span.name for span in spans if span.name != BROKEN_SPANS) == ["also good", "good"]
    assert (rollout.state, rollout.reward) == ("succeeded", 1.0)
    assert BROKEN in (rollout.warning or "")
    assert (rollout.warning or "").endswith("undelivered 1")
