"""Samplers of the local engine that do not get the learner's weights are found within one step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.local.engine import LocalEngine
from agentlightning.errors import EngineError
from agentlightning.testing.engine_contract import SFT, conversation
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.weight_probe import WeightProbe
from build import engine_setup

ROWS = {DEFAULT_POLICY: [[conversation()[0]]]}


def weights(folder: str | Path) -> Path:
    [file] = Path(folder).glob("*.safetensors")
    return file


class Unmerged(LocalEngine):
    """Exports the weights below its adapter."""

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        found = await super()._operate(policy, operation, *arguments)
        if operation == "export":
            shutil.copy(*(weights(folder) for folder in (self._setup.model, arguments[0])))
        return found


class HalfExporting(LocalEngine):
    """Exports the second layer as it was before training."""

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        found = await super()._operate(policy, operation, *arguments)
        if operation == "export":
            first, file = (weights(folder) for folder in (self._setup.model, arguments[0]))
            old = {name: tensor for name, tensor in load_file(first).items() if ".layers.1." in name}
            save_file({**load_file(file), **old}, file, {"format": "pt"})
        return found


async def learn(engine: Engine, learning_rate: float) -> None:
    await engine.forward_backward([conversation()[0]], SFT)
    await engine.optim_step(learning_rate, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [(Unmerged, {"lora_rank": 4}), (HalfExporting, {})])
@pytest.mark.parametrize("exact", [True, False])
async def test_weights_that_reach_the_sampler_in_part_or_not_at_all_are_found_within_a_step(
    llama: Path, tmp_path: Path, kind: type[LocalEngine], settings: dict[str, Any], exact: bool
) -> None:
    engine = kind(engine_setup(llama, tmp_path, **settings))
    try:
        served = (await engine.start())[DEFAULT_POLICY]
        values = {DEFAULT_POLICY: {"endpoints": list(served.urls)}}
        probe = WeightProbe(engine=engine, values=values, exact=exact, progress=Silent())
        await engine.publish(0)
        before = await probe.before(ROWS)
        await learn(engine, 3e-2)
        await engine.publish(1)
        with pytest.raises(EngineError, match="does not have the weights published as version 1"):
            await probe.after(before, 1)
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_replica_that_kept_its_weights_is_named(llama: Path, tmp_path: Path) -> None:
    engine = LocalEngine(engine_setup(llama, tmp_path / "one"))
    stale = LocalEngine(engine_setup(llama, tmp_path / "other", learns=False))
    try:
        urls = [(await one.start())[DEFAULT_POLICY].urls[0] for one in (engine, stale)]
        values = {DEFAULT_POLICY: {"endpoints": urls}}
        probe = WeightProbe(engine=engine, values=values, exact=False, progress=Silent())
        for one in (engine, stale):
            await one.publish(0)
        before = await probe.before(ROWS)
        await learn(engine, 1e-5)  # far below the tolerance
        await engine.publish(1)
        with pytest.raises(EngineError, match=rf"'default' at {urls[1]} does not .* and the sampler by 0;"):
            await probe.after(before, 1)
    finally:
        await engine.close()
        await stale.close()
