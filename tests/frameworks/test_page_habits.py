"""What makes calls of a framework forks, and what does not: programs of the pages with one thing changed, on a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from apart import NODE, need_node, stand_apart
from command_line import Folder
from pages import page
from stage import Speaker, open_stage, tool_call
from test_installed_frameworks import speaker

pytestmark = [pytest.mark.slow, pytest.mark.long]


@dataclass(frozen=True)
class Habit:
    """A page's program with lines of it changed, and how its calls then stand to each other."""

    page: str
    said: str
    changes: dict[str, str]
    continuations: list[str]
    speaker: Speaker = field(default=speaker)

    def program(self) -> dict[str, str]:
        """The changed file, by name; fails where the page has not the lines."""
        (name, text), *_ = [(name, text) for name, text in page(self.page).files.items() if name.startswith("agent.")]
        for old, new in self.changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return {name: text}


def look_up(role: str, text: str) -> str:
    """Never has enough of a tool."""
    return tool_call("population", city="Oslo")


def correct(role: str, text: str) -> str:
    """Gives a count that the program's own check does not take until it is told."""
    return tool_call("City", name="Oslo", people=717710 if "too few" in text else 7)


def delegate(role: str, text: str) -> str:
    """Hands the question to another agent, which answers it."""
    return "717710" if role == "tool" else tool_call("transfer_to_agent", agent_name="helper")


def two_cities(role: str, text: str) -> str:
    """Looks up one city after another."""
    if role == "tool":
        return f"{text} people" if "717710" in text else tool_call("population", city="Oslo")
    return tool_call("population", city="Bergen")


LITELLM = 'litellm.completion("openai/" + os.environ["AGL_MODEL"], messages, tools=TOOLS)'
TWICE = ["first_turn", "continued"]
HABITS = [
    Habit(
        "litellm",
        "streamed",
        {LITELLM: f"litellm.stream_chunk_builder(list({LITELLM[:-1]}, stream=True)))"},
        TWICE,
    ),
    Habit(
        "litellm",
        "anthropic",
        {LITELLM: LITELLM.replace("openai/", "anthropic/")},
        TWICE,
    ),
    Habit(
        "strands",
        "structured output",
        {
            "import json\n": "import json\nfrom pydantic import BaseModel\nclass City(BaseModel):\n    people: int\n",
            'limits={"turns": 4})': 'limits={"turns": 4}, structured_output_model=City)',
        },
        ["first_turn", "continued", "system_or_tools_changed"],
        lambda role, text: tool_call("City", people=3) if "structured" in text else speaker(role, text),
    ),
    Habit(
        "adk",
        "sub-agent",
        {
            "    tools=[population],\n": '    sub_agents=[LlmAgent(name="helper", description="Helps.", '
            'model=LiteLlm("openai/" + os.environ["AGL_MODEL"]))],\n'
        },
        ["first_turn", "first_turn"],
        delegate,
    ),
    Habit(
        "semantic-kernel",
        "limit",
        {},
        ["first_turn", "continued", "continued", "system_or_tools_changed"],
        lambda role, text: tool_call("Cities-population", city="Oslo"),
    ),
    Habit("agent-framework", "limit", {}, ["first_turn", *["continued"] * 3], look_up),
    Habit(
        "agent-framework",
        "responses",
        {
            "import OpenAIChatCompletionClient": "import OpenAIChatClient as OpenAIChatCompletionClient",
        },
        TWICE,
    ),
    Habit(
        "instructor",
        "retry",
        {
            "from pydantic import BaseModel": "from pydantic import BaseModel, field_validator",
            "    people: int\n": "    people: int\n\n    @field_validator('people')\n    def enough(cls, people):\n"
            "        if people < 100:\n            raise ValueError('too few')\n        return people\n",
        },
        TWICE,
        correct,
    ),
    Habit(
        "ai-sdk",
        "streamed",
        {
            "import { generateText,": "import { streamText,",
            "const { text } = await generateText({": "const streamed = streamText({",
            "console.log(": "const text = await streamed.text;\nconsole.log(",
        },
        TWICE,
    ),
    Habit(
        "langchain-js",
        "response format",
        {
            "  tools: [population],": "  tools: [population],\n  responseFormat: z.object({ people: z.string() }),",
            "answer = end.messages.at(-1).text;": "answer = end.structuredResponse.people;",
        },
        ["first_turn", "system_or_tools_changed"],
        lambda role, text: tool_call("extract-2", people="717710") if role == "tool" else look_up(role, text),
    ),
    Habit(
        "langchain-js",
        "titled",
        {
            "  tools: [population],": "  tools: [population],\n"
            '  responseFormat: z.object({ people: z.string() }).meta({ title: "Count" }),',
            "answer = end.messages.at(-1).text;": "answer = end.structuredResponse.people;",
        },
        TWICE,
        lambda role, text: tool_call("Count", people="717710") if role == "tool" else look_up(role, text),
    ),
    Habit("mastra", "tool after tool", {}, [*TWICE, "continued"], two_cities),
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: f"{habit.page}, {habit.said}")
async def test_a_changed_program_forks_where_its_page_says_so(folder: Folder, habit: Habit) -> None:
    (need_node if habit.page in NODE else stand_apart)(folder.path, habit.page)
    async with open_stage(folder, habit.speaker) as stage:
        played = await stage.play(page(habit.page), habit.program())
    assert (played.rollout.state, played.rollout.error) == ("succeeded", None)
    assert [call.continuation for call in played.calls] == habit.continuations, str(played.messages)
