"""Probe: pass rates of the starting model, tried by `agl check --attempts` and kept in its run, which training reads again.

The training loop asks for it before the first draw of tasks, and writes down which one it took: a run that resumes takes the
same, whatever was checked meanwhile.
"""

from __future__ import annotations

from typing import Any

from agentlightning.records import JSON, Run
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_rollouts
from agentlightning.store.summaries import task_key
from agentlightning.trainer.serving import CHECK
from agentlightning.trainer.task_sampler import earned, is_try

TAKEN = "probe"
"""Key of a run's summary: the id of the run with its probe, '' where there was none."""
SAME = (
    ("model", "path"),
    ("agent", "run"),
    ("agent", "command"),
    ("agent", "reward"),
)
"""Settings that a probe must have in common with the run that takes it; its tasks are found by their content."""


async def probe_tries(store: LightningStore, run_id: str) -> list[tuple[str, float | None]]:
    """Task key and reward of each try of the run's probe, the newest of the same model, agent and rewards; none without."""
    run = await find_run(store, run_id)
    taken = run.summary.get(TAKEN)
    if taken is None:
        taken = next((one.id for one in await store.runs() if one.name == CHECK and _alike(one, run)), "")
        await store.update_run(run_id, summary={TAKEN: taken})
    found: list[tuple[str, float | None]] = []
    if taken:
        async for page in read_rollouts(store, RolloutQuery(run_id=taken, mode="eval", states=["succeeded", "failed"])):
            found += [(task_key(one.task), earned(one)) for one in page if is_try(one)]
    return found


def _alike(one: Run, other: Run) -> bool:
    return one.created_ns < other.created_ns and all(
        _setting(one.config, *name) == _setting(other.config, *name) for name in SAME
    )


def _setting(config: JSON, table: str, name: str) -> Any:
    found = config.get(table)
    return found.get(name) if isinstance(found, dict) else None
