"""Run status: the end of the work on a run, recorded in the store whatever it was.

Training, evaluation and check wrap their work in it. It knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.types import RunState

UPDATE_TIMEOUT_S = 5.0
"""The server may be what failed: its client would try for half a minute to reach it."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def record_run_status(store: LightningStore, run_id: str) -> AsyncIterator[None]:
    """Work that raises leaves its run as failed, or interrupted where it was cancelled; that it is done, it says itself.

    What was raised goes on, even where the store cannot be told.
    """
    try:
        yield
    except BaseException as error:
        state: RunState = "interrupted" if isinstance(error, asyncio.CancelledError) else "failed"
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                await store.update_run(run_id, state=state)
        except (AgentLightningError, TimeoutError) as untold:
            log.warning("run %s is %s, which could not be recorded: %s", run_id, state, untold or "no answer")
        raise
