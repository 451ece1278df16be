"""The pages of frameworks that stand in environments of their own or come by npm: their programs, on a real gateway."""

from __future__ import annotations

import pytest
from apart import NODE, need_node, stand_apart
from command_line import Folder
from pages import page
from stage import Played, Speaker, open_stage, tool_call
from test_installed_frameworks import check_population, speaker

pytestmark = pytest.mark.slow

LOOK_UP = 'Thought: I look it up.\n<code>\ncount = population("Oslo")\nprint(count)\n</code>'
FIX = tool_call("bash", command="sed -i 's|/ 3|/ len(ages)|' ages.py && cat ages.py")
SUBMIT = tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


async def play(folder: Folder, name: str, speaker: Speaker, changed: dict[str, str] | None = None) -> Played:
    """The page's program, or what is changed of it, with a model that speaks like this."""
    (need_node if name in NODE else stand_apart)(folder.path, name)
    async with open_stage(folder, speaker) as stage:
        return await stage.play(page(name), changed)


LONG = (
    "llamaindex",
    "crewai",
    "litellm",
    "strands",
    "agno",
    "haystack",
    "agent-framework",
    "adk",
    "mcp",
    "camel",
    *NODE,
)


@pytest.mark.parametrize("name", ["pydantic-ai", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
async def test_the_program_of_the_page_is_recorded_and_rewarded(folder: Folder, name: str) -> None:
    check_population(await play(folder, name, speaker))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("openai-agents", "agent.py", "OpenAIChatCompletionsModel", "OpenAIResponsesModel"),
        ("ai-sdk", "agent.mjs", "gateway(process", "openai(process"),
    ],
)
async def test_the_responses_api_leaves_the_same_record(
    folder: Folder, name: str, file: str, old: str, new: str
) -> None:
    changed = (
        page(name).files[file].replace("// agent.mjs\n", 'import { openai } from "@ai-sdk/openai";\n').replace(old, new)
    )
    if name in NODE:
        need_node(folder.path, name)
    async with open_stage(folder, speaker) as stage:
        played = await stage.play(page(name), {file: changed})
    check_population(played)
    assert {call.protocol for call in played.calls} == {"responses"}


@pytest.mark.long
async def test_tools_of_semantic_kernel_have_the_names_of_their_plugins(folder: Folder) -> None:
    def speak(role: str, text: str) -> str:
        return speaker(role, text).replace('"population"', '"Cities-population"')

    check_population(await play(folder, "semantic-kernel", speak))


def reason_and_act(role: str, text: str) -> str:
    """Speaks as the signatures of DSPy's ReAct ask for, and looks the city up in between."""
    if "next_tool_name" not in text:
        return "[[ ## reasoning ## ]]\nIt was looked up.\n\n[[ ## answer ## ]]\n717710\n\n[[ ## completed ## ]]"
    tool, arguments = ("finish", "{}") if "717710" in text else ("population", '{"city": "Oslo"}')
    fields = {"next_thought": "I look.", "next_tool_name": tool, "next_tool_args": arguments}
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


@pytest.mark.long
async def test_dspy_renders_every_call_anew_as_its_page_says(folder: Folder) -> None:
    played = await play(folder, "dspy", reason_and_act)
    assert (played.rollout.state, played.rollout.reward, played.rollout.warning) == ("succeeded", 1.0, None)
    assert len(played.calls) == 3
    assert "continued" not in [call.continuation for call in played.calls]


@pytest.mark.long
async def test_the_tool_that_instructor_forces_is_called_under_its_schema(folder: Folder) -> None:
    played = await play(folder, "instructor", lambda role, text: tool_call("City", name="Oslo", people=717710))
    played.check("first_turn")


def coder(role: str, text: str) -> str:
    """Forgets the code once, then looks the city up, then says what it read."""
    if "717710" in text:
        return "Thought: I know.\n<code>\nfinal_answer(count)\n</code>"
    return LOOK_UP if "Error" in text else "Thought: I wonder."


async def test_smolagents_continues_exactly_also_after_a_step_without_code(folder: Folder) -> None:
    played = await play(folder, "smolagents", coder)
    played.check("first_turn", "continued", "continued")
    assert "717710" in str(played.messages[-1]), "the tool was called"


@pytest.mark.long
async def test_smolagents_forks_without_the_additions_of_its_page(folder: Folder) -> None:
    printed = page("smolagents").files["agent.py"]
    plain = printed.replace(", stop=REMOVE_PARAMETER", "").replace(", step_callbacks={ActionStep: keep_as_said}", "")
    assert "REMOVE_PARAMETER)" not in plain
    assert "step_callbacks" not in plain
    played = await play(folder, "smolagents", coder, {"agent.py": plain})
    played.check("first_turn", "assistant_message_edited", "assistant_message_edited")


@pytest.mark.long
async def test_mini_swe_agent_mends_its_repository(folder: Folder) -> None:
    played = await play(folder, "mini-swe-agent", lambda role, text: FIX if role == "user" else SUBMIT)
    played.check("first_turn", "continued")
    assert "return sum(ages) / len(ages)" in str(played.messages[-1]), "what the command printed was read"


@pytest.mark.long
async def test_mini_swe_agent_leaves_out_an_answer_without_a_tool_call(folder: Folder) -> None:
    def speaker(role: str, text: str) -> str:
        if role == "tool":
            return SUBMIT
        return FIX if "Tool call error" in text else "I think about it."

    played = await play(folder, "mini-swe-agent", speaker)
    played.check("first_turn", "history_cut", "continued")
