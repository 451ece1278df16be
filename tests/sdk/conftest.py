"""Fixtures of a real gateway for SDKs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sdk_house import SdkHouse, open_house


@pytest.fixture
async def sdk_house(tmp_path: Path) -> AsyncIterator[SdkHouse]:
    async with open_house(tmp_path) as house:
        yield house
