"""What is the local engine's own where its learner is several processes: they end together, and are replaced together."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentlightning.engines.local.engine import LocalEngine
from agentlightning.errors import LearnerLostError
from agentlightning.runtime.watchdog import HangLimits, Watchdog
from agentlightning.testing.engine_contract import SFT, conversation
from build import engine_setup

pytestmark = pytest.mark.slow


@pytest.fixture
async def engine(llama: Path, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    watchdog = Watchdog(HangLimits(hang_timeout_s=15))  # a rank that a test stops is to be missed soon
    setup = engine_setup(llama, tmp_path / "work", learner={"type": "fsdp", "processes": 2})
    engine = LocalEngine(replace(setup, watchdog=watchdog))
    await engine.start()
    yield engine
    await engine.close()


async def test_a_killed_rank_takes_the_learner_with_it_and_all_are_replaced(
    engine: LocalEngine, tmp_path: Path
) -> None:
    await engine.save(tmp_path / "checkpoint")
    for kill in (signal.SIGKILL, signal.SIGSTOP):  # a hung one is killed, and then the others
        ranks = psutil.Process(engine.pids()["learner"]).children()
        os.kill(ranks[0].pid, kill)
        with pytest.raises(LearnerLostError, match="the learner ended during forward_backward; resume"):
            await engine.forward_backward([conversation()[0]], SFT)
        assert psutil.wait_procs(ranks, timeout=60)[1] == []
        await engine.restart_learner()
    await engine.load(tmp_path / "checkpoint")
    assert (await engine.forward_backward([conversation()[0]], SFT))["tokens"] == 9
    await engine.optim_step(0.0, 1.0)


async def test_no_rank_outlives_the_first(engine: LocalEngine) -> None:
    first = psutil.Process(engine.pids()["learner"])
    ranks = first.children()
    assert ranks
    first.kill()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
