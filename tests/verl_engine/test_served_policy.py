"""The engine of a run whose policy another trainer serves and trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.config.run import EngineConfig
from agentlightning.engines.base import DEFAULT_POLICY, Engine, EngineSetup, make_engine
from agentlightning.errors import ConfigError, EngineError
from agentlightning.training_types import Loss


def engine(**options: str) -> Engine:
    config = EngineConfig(name="agentlightning.engines.verl.engine:ServedPolicy", options=options)
    return make_engine(EngineSetup(model="m", work_dir=Path("w"), config=config))


async def test_it_serves_at_its_url_and_leaves_learning_to_the_other_trainer() -> None:
    served = engine(url="http://127.0.0.1:1")
    endpoints = (await served.start())[DEFAULT_POLICY]
    assert (list(endpoints.urls), endpoints.seeded) == (["http://127.0.0.1:1"], False)
    await served.publish(1)
    with pytest.raises(EngineError, match=r"forward_backward: the trainer that serves http://127\.0\.0\.1:1 learns"):
        await served.forward_backward([], Loss(name="sft"))


def test_it_takes_a_url_and_no_other_option() -> None:
    with pytest.raises(ConfigError, match=r"engine\.options: expected the key url alone"):
        engine(url="http://127.0.0.1:1", python="python")
