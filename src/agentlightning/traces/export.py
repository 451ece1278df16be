"""Finished rollouts of a run in the forms of other projects, a JSON object each. Driven by ``agl runs export --as``."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.records import JSON, Call, Reward, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import by_attempt, find_run
from agentlightning.traces.atif import write_atif
from agentlightning.traces.training_trace import write_training_trace
from agentlightning.tracing.exporters import finished_rollouts

WRITERS: Mapping[str, Callable[[Rollout, Sequence[Call], Sequence[Reward]], JSON]] = MappingProxyType(
    {"training-trace": write_training_trace, "atif": write_atif}
)


@dataclass(kw_only=True)
class TokenTraceExport:
    """The rollouts of one run, by their latest attempts."""

    store: LightningStore
    run_id: str
    form: str
    """One of `WRITERS`."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that have no place in the form, by reason."""

    async def rows(self) -> AsyncIterator[JSON]:
        await find_run(self.store, self.run_id)
        async for part in finished_rollouts(self.store, self.run_id):
            ids = [rollout.id for rollout in part]
            calls, rewards = by_attempt(await self.store.calls(ids)), by_attempt(await self.store.rewards(ids))
            for rollout in part:
                latest = rollout.id, rollout.attempt
                own = [call for call in calls[latest] if call.agent != JUDGE]
                if any(call.images for call in own):
                    self.left_out["its calls have images, which the form does not hold"] += 1
                elif not any(call.sampled_ids or self.form == "atif" for call in own):
                    self.left_out["it has no call with tokens" if own else "it has no call"] += 1
                else:
                    yield WRITERS[self.form](rollout, own, rewards[latest])
