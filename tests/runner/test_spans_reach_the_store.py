"""An attempt's spans at its end: what the store does not take is lost, which the record says, and the attempt is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import InputError, StoreError
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
    """Fails spans named "bad"; without a failure it is away for them, and answers never."""

    def __init__(self, failure: Exception | None) -> None:
        super().__init__()
        self._failure = failure

    async def append_spans(self, spans: Sequence[Span]) -> None:
        if any(span.name == "bad" for span in spans):
            if self._failure is None:
                await asyncio.Event().wait()
            else:
                raise self._failure
        await super().append_spans(spans)


@pytest.mark.parametrize(
    "failure", [InputError("bad"), StoreError("away"), KeyError("a fault of our own"), None], ids=str
)
async def test_spans_that_the_store_does_not_take_are_counted_in_the_warning_of_their_attempt(
    failure: Exception | None,
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(current_spans))

    def solve(task: Any, llm: Any) -> float:
        for name in ("good", "bad", "also good"):
            provider.get_tracer("agent").start_span(name).end()
        return 1.0

    async with Picky(failure) as store:
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
                delivery_timeout_s=5.0 if failure else 0.5,
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
