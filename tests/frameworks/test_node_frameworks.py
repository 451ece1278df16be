"""The pages of frameworks that come by npm: their programs, as printed, on a real gateway."""

from __future__ import annotations

import pytest
from apart import need_node
from command_line import Folder
from pages import page
from stage import open_stage
from test_installed_frameworks import check_population, speaker

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("name", ["ai-sdk", "langchain-js", "mastra"])
async def test_the_program_of_the_page_is_recorded_and_rewarded(folder: Folder, name: str) -> None:
    need_node(folder.path, name)
    async with open_stage(folder, speaker) as stage:
        check_population(await stage.play(page(name)))


async def test_the_responses_provider_of_the_ai_sdk_leaves_the_same_record(folder: Folder) -> None:
    need_node(folder.path, "ai-sdk")
    printed = page("ai-sdk").files["agent.mjs"]
    provider = 'import { openai } from "@ai-sdk/openai";\n' + printed.replace("gateway(process", "openai(process")
    changed = provider.replace("// agent.mjs\n", "")
    async with open_stage(folder, speaker) as stage:
        played = await stage.play(page("ai-sdk"), {"agent.mjs": changed})
    check_population(played)
    assert {call.protocol for call in played.calls} == {"responses"}
