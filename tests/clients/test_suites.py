"""Suites that others wrote pass against the gateway, but for what `expected/` lists with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_house import MODEL, open_house
from suites import SourceTests, Suite, check_results, expected_failures, run_program, run_suite, unlisted_files

pytestmark = pytest.mark.slow

LANGCHAIN = ("--benchmark-disable", "-p", "no:codspeed")
SUITES = [
    Suite("langchain", "clients-langchain", options=(*LANGCHAIN, "-k", "not TestChat"), least=156),
    Suite("openai", "clients-sdks", source=SourceTests("openai", "OPENAI_BASE_URL", "gpt-6-astra"), least=110),
    Suite("anthropic", "clients-sdks", source=SourceTests("anthropic", "ANTHROPIC_BASE_URL", "model_id"), least=150),
    Suite("pydantic_ai_surface", "clients-sdks", least=24),
    Suite("litellm_surface", "frameworks-agents", least=14),
]


async def test_the_standard_tests_of_langchain_pass_on_chat_completions(tmp_path: Path) -> None:
    await check_suite(
        Suite("langchain", "clients-langchain", options=(*LANGCHAIN, "-k", "TestChat"), least=52), tmp_path
    )


@pytest.mark.long
async def test_an_evaluation_of_verifiers_is_recorded_and_rewarded(tmp_path: Path) -> None:
    suite = Suite("verifiers", "clients-verifiers")
    suite.need()
    out = tmp_path / "outputs"
    how = ("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess", "--no-push")
    async with open_house(tmp_path) as house:
        variables = await house.variables()
        client = ("--client.base-url", variables["OPENAI_BASE_URL"], "--client.api-key-var", "OPENAI_API_KEY")
        words = ["vf-eval", "capitals", "-r", "2", "-o", str(out), "-m", MODEL, *how, *client]
        output = await run_program(suite, words, variables, tmp_path)
        calls = await house.calls()
    episodes = [json.loads(line) for path in out.rglob("traces.jsonl") for line in path.read_text().splitlines()]
    assert [episode["ok"] for episode in episodes] == [True] * 4, output
    assert len(calls) == 4, output


@pytest.mark.long
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
async def test_a_suite_passes_but_for_what_is_listed(suite: Suite, tmp_path: Path) -> None:
    await check_suite(suite, tmp_path)


async def check_suite(suite: Suite, tmp_path: Path) -> None:
    """Runs a suite against a gateway of its own, and compares what became of its tests with the list."""
    suite.need()
    assert suite.source is None or unlisted_files(suite) == []
    async with open_house(tmp_path, suite.source.model if suite.source else MODEL) as house:
        results = await run_suite(suite, await house.variables(), tmp_path)
    check_results(results, expected_failures(suite), suite.least)
