"""The local engine has its sampler score as its learner does once it has published, and is stopped where it has not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning.engines.local.engine import LocalEngine
from agentlightning.errors import EngineError
from agentlightning.testing.engine_contract import conversation
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.weight_probe import WeightProbe
from agentlightning.training_types import Loss
from build import engine_setup


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"weights": "lora"}])
async def test_the_local_engine_passes_once_it_has_published_and_is_stopped_where_it_has_not(
    llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    engine = LocalEngine(engine_setup(llama, tmp_path, **settings))
    try:
        served = (await engine.start())["default"]
        checked = WeightProbe(
            engine=engine, values={"default": {"endpoints": list(served.urls)}}, exact=True, progress=Silent()
        )
        await engine.publish(0)
        [before] = await engine.logprobs([conversation()[0]])
        sampled = replace(conversation()[0], logprobs=before)
        for version in range(1, 4):
            await engine.forward_backward([sampled], Loss(name="sft"))
            await engine.optim_step(1e-2, 1.0)
            with pytest.raises(EngineError, match=f"does not have the weights published as version {version}"):
                await checked.check({"default": [[sampled]]}, version)
            await engine.publish(version)
            found = await checked.check({"default": [[sampled]]}, version)
            assert found["policy/weight_gap"] < 1e-3
            [now] = await engine.logprobs([conversation()[0]])
            sampled = replace(conversation()[0], logprobs=now)
    finally:
        await engine.close()
