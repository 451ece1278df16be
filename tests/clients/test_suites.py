"""Suites that others wrote pass against the gateway, but for what `expected/` lists with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_house import open_house
from suites import Suite, check_results, expected_failures, run_suite

pytestmark = pytest.mark.slow

SUITES = [
    Suite("langchain", "langchain", options=("--benchmark-disable", "-p", "no:codspeed"), least=140),
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
async def test_a_suite_passes_but_for_what_is_listed(suite: Suite, tmp_path: Path) -> None:
    suite.need()
    async with open_house(tmp_path) as house:
        results = await run_suite(suite, await house.variables(), tmp_path)
    check_results(results, expected_failures(suite), suite.least)
