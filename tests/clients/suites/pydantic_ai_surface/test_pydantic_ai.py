"""What Pydantic AI offers, through its OpenAI Chat, OpenAI Responses and Anthropic models, which read the environment."""

from __future__ import annotations

import os

import pytest
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
)
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

NAME = os.environ["AGL_MODEL"]
KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    return KINDS[request.param](NAME)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


async def test_a_run_answers(model: Model) -> None:
    assert "hello there" in (await Agent(model).run("hello there")).output


async def test_instructions_and_a_history_are_read(model: Model) -> None:
    agent = Agent(model, instructions="Be brief.")
    first = await agent.run("my name is Ada")
    second = await agent.run("what is it?", message_history=first.all_messages())
    assert "what is it?" in second.output
    assert len(second.all_messages()) == 4


async def test_a_run_streams_its_text(model: Model) -> None:
    async with Agent(model).run_stream("hello there") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "hello there" in "".join(pieces)


async def test_a_tool_is_called_and_its_result_read(model: Model) -> None:
    result = await Agent(model, tools=[weather]).run("the weather in Paris?")
    assert "sunny" in result.output
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.tool_name for part in parts if isinstance(part, ToolCallPart)] == ["weather"]
    assert len([part for part in parts if isinstance(part, ToolReturnPart)]) == 1


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput], ids=["tool", "native", "prompted"])
async def test_an_output_has_its_type(model: Model, kind: type) -> None:
    result = await Agent(model, output_type=kind(City)).run("Oslo has 717710 people")
    assert result.output.people == 717710


async def test_settings_of_the_model_are_taken(model: Model) -> None:
    result = await Agent(model, model_settings={"max_tokens": 5, "temperature": 0.2}).run(
        "hello there, you who hear me"
    )
    response = result.all_messages()[-1]
    assert isinstance(response, ModelResponse)
    assert response.usage.output_tokens == 5
    assert response.finish_reason == "length"


async def test_an_unknown_model_is_an_error_of_http() -> None:
    for kind in KINDS.values():
        with pytest.raises(ModelHTTPError) as raised:
            await Agent(kind("nobody")).run("hello")
        assert raised.value.status_code == 404


async def test_the_messages_survive_json(model: Model) -> None:
    from pydantic_ai import ModelMessagesTypeAdapter

    result = await Agent(model, tools=[weather]).run("the weather in Paris?")
    kept = ModelMessagesTypeAdapter.validate_json(result.all_messages_json())
    again = await Agent(model, tools=[weather]).run("and in Oslo, the weather?", message_history=kept)
    assert isinstance(kept[0], ModelRequest)
    assert "sunny" in again.output
