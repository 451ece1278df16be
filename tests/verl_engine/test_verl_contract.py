"""The contract of engines on verl: FSDP2 with one worker and with two, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from verl_house import verl_settings

from agentlightning.testing.engine_contract import *  # noqa: F403


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, marks=pytest.mark.slow, id="two-workers"),
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long], id="one-worker"),
    ],
)
def engine_settings(request: pytest.FixtureRequest, verl_environment: None) -> dict[str, Any]:
    return verl_settings(request.param)
