"""Fixture of a gateway for coding agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_house import AgentHouse, open_agent_house


@pytest.fixture
async def agent_house(tmp_path: Path) -> AsyncIterator[AgentHouse]:
    async with open_agent_house(tmp_path) as house:
        yield house
