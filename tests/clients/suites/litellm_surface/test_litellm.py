"""What LiteLLM offers, through its OpenAI and Anthropic providers, which read the environment."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

NAME = os.environ["AGL_MODEL"]
HELLO = [{"role": "user", "content": "hello there"}]
WEATHER = [{"role": "user", "content": "the weather in Paris?"}]
FUNCTION = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(params=["openai", "anthropic"])
def model(request: pytest.FixtureRequest) -> str:
    return f"{request.param}/{NAME}"


def test_a_completion_has_text_usage_and_a_reason(model: str) -> None:
    reply = litellm.completion(model, HELLO, max_tokens=200)
    assert "hello there" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 10


async def test_an_asynchronous_stream(model: str) -> None:
    stream = await litellm.acompletion(model, HELLO, max_tokens=200, stream=True)
    assert "hello there" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_read(model: str, stream: bool) -> None:
    message = ask(model, WEATHER, stream)
    (call,) = message.tool_calls
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("weather", {"city"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert "sunny" in ask(model, [*WEATHER, message.model_dump(), result], stream).content


def ask(model: str, messages: list[Any], stream: bool) -> Any:
    """The message of a completion with tools."""
    reply = litellm.completion(model, messages, max_tokens=200, tools=TOOLS, stream=stream)
    return (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message


@pytest.mark.parametrize("choice", ["auto", "none", "required", "named"])
def test_a_choice_of_tools_is_honoured(model: str, choice: str) -> None:
    wanted: Any = {"type": "function", "function": {"name": "weather"}} if choice == "named" else choice
    reply = litellm.completion(model, WEATHER, max_tokens=200, tools=TOOLS, tool_choice=wanted)
    assert bool(reply.choices[0].message.tool_calls) == (choice != "none")


def test_a_schema_is_honoured(model: str) -> None:
    asked = [{"role": "user", "content": "Oslo has 717710 people"}]
    reply = litellm.completion(model, asked, max_tokens=200, response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content).people == 717710


def test_a_limit_of_tokens_ends_a_completion(model: str) -> None:
    reply = litellm.completion(model, HELLO, max_tokens=5)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 5)


def test_log_probabilities_come_along() -> None:
    reply = litellm.completion(f"openai/{NAME}", HELLO, logprobs=True, top_logprobs=0)
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens - 1  # the end is no text


def test_an_unknown_model_is_not_found() -> None:
    for provider in ("openai", "anthropic"):
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(f"{provider}/nobody", HELLO, num_retries=0)


def test_a_wrong_key_is_an_error_of_authentication() -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(f"openai/{NAME}", HELLO, api_key="sk-agl-" + "A" * 44)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_responses_api(stream: bool) -> None:
    reply = litellm.responses(input="hello there", model=f"openai/{NAME}", stream=stream)
    if stream:
        reply = next(event for event in reply if event.type == "response.completed").response
    assert "hello there" in reply.output[-1].content[0].text


async def test_the_messages_api(model: str) -> None:
    reply = await litellm.anthropic_messages(messages=HELLO, model=model, max_tokens=200)
    content = reply["content"] if isinstance(reply, dict) else reply.content
    assert "hello there" in (content[-1]["text"] if isinstance(content[-1], dict) else content[-1].text)
