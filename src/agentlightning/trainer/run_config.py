"""run_config: the configuration of a run that is resumed or looked at, also on a host that has nothing of it yet."""

from __future__ import annotations

import os
from functools import partial

from agentlightning.config.run import Config, parse_config
from agentlightning.records import Run
from agentlightning.store.open import existing_store
from agentlightning.store.scan import find_run
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.interrupts import run_interruptible


def run_config(folder: RunFolder, store: str | None = None) -> Config:
    """The configuration in the run's folder, else that of the store's record; `store`: its URL, where it was moved or the
    folder is on another host (AGL_STORE does for that). NotFoundError where there is neither."""
    known = store or os.environ.get("AGL_STORE")
    if folder.has_config or known is None:
        return folder.config(store)
    return run_interruptible(partial(_recorded, folder.run_id, known))


async def _recorded(run_id: str, store: str) -> Config:
    async with existing_store(store) as opened:
        return recorded_config(await find_run(opened, run_id), store)


def recorded_config(run: Run, store: str | None = None) -> Config:
    """The configuration that a store keeps with the run; `store`: the URL in its place, since the record has no password."""
    table = {**run.config, "store": {} if store is None else {"url": store}}
    return parse_config(table, f"run {run.id}")
