"""The engine on verl beyond the contract of all engines: it comes back by itself, and leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from verl_house import verl_settings

from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, Engine, make_engine
from agentlightning.errors import LearnerLostError
from agentlightning.testing.contract_model import write_contract_model
from agentlightning.testing.engine_contract import BACK_S, SFT, LiveEndpoints, contract_setup, conversation

GONE_S = 120.0
"""Seconds: agents of Ray's own notice within a minute that it was killed."""


def processes_of(engine: Engine) -> list[psutil.Process]:
    """The driver's and all below it."""
    driver = psutil.Process(engine.pids()["driver"])
    return [driver, *driver.children(recursive=True)]


async def all_end(processes: list[psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, GONE_S)
    return not alive


async def sample_when_it_serves(served: Endpoints, prompt: list[int]):
    async with aiohttp.ClientSession() as http, asyncio.timeout(BACK_S):
        while True:
            with suppress(aiohttp.ClientError):
                return await LiveEndpoints(served, http).sample(prompt, temperature=0, max_tokens=8)
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.long  # verl starts twice, and Ray's agents take a minute to end
async def test_verl_that_ends_between_operations_serves_the_saved_weights_again_and_leaves_no_process(
    verl_environment: None, tmp_path: Path
) -> None:
    engine = make_engine(contract_setup(verl_settings(1), write_contract_model(tmp_path / "model"), tmp_path / "work"))
    served = (await engine.start())[DEFAULT_POLICY]
    try:
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-2, 1.0)
        await engine.publish(3)
        await engine.save(tmp_path / "saved")
        before = await sample_when_it_serves(served, [4, 5, 6])
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-2, 1.0)
        await engine.publish(4)

        killed = processes_of(engine)
        assert len(killed) > 4
        os.kill(killed[0].pid, signal.SIGKILL)
        after = await sample_when_it_serves(served, [4, 5, 6])
        assert after.ids == before.ids
        assert {span.version for span in after.versions} == {3}
        with pytest.raises(LearnerLostError, match="resume from the last checkpoint"):
            await engine.forward_backward([conversation()[0]], SFT)
        closed = processes_of(engine)
    finally:
        await engine.close()
    assert await all_end(closed)
    assert await all_end(killed)
