"""One conversation through each API of the Python SDKs, streamed or not: every driver returns what it heard by turns."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from sdk_house import PARAMETERS, QUESTION, RESULT, THANKS, Place

Turn = dict[str, Any]

FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}


def turn(text: str | None, reasoning: str | None, tools: list[tuple[str, str]]) -> Turn:
    named = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in tools]
    return {"text": text or "", "reasoning": reasoning or "", "tools": named}


async def chat(place: Place, stream: bool) -> list[Turn]:
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        heard: list[Turn] = []
        for _ in range(3):
            if stream:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                    async for _ in events:
                        pass
                    completion: Any = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = completion.choices[0].message
            calls = message.tool_calls or []
            assert completion.choices[0].finish_reason == ("tool_calls" if calls else "stop")
            heard.append(
                turn(
                    message.content,
                    getattr(message, "reasoning_content", None),
                    [(call.function.name, call.function.arguments) for call in calls],
                )
            )
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}, warnings=False))
            results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]
            messages += results or [{"role": "user", "content": THANKS}]
        return heard


async def responses(place: Place, stream: bool, stored: bool = False) -> list[Turn]:
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key, max_retries=0) as client:
        tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        new = history
        previous: str | None = None
        heard: list[Turn] = []
        for _ in range(3):
            given: dict[str, Any] = {"model": "policy", "tools": tools, "input": new if stored else history}
            if stored and previous is not None:
                given["previous_response_id"] = previous
            if stream:
                async with client.responses.stream(**given) as events:
                    async for _ in events:
                        pass
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(**given)
            assert response.status == "completed"
            previous = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            thoughts = [item for item in response.output if item.type == "reasoning"]
            heard.append(
                turn(
                    response.output_text,
                    "".join(part.text for item in thoughts for part in item.content or []),
                    [(call.name, call.arguments) for call in calls],
                )
            )
            history += [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}, warnings=False)
                for item in response.output
            ]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
            if not calls:
                new = [{"role": "user", "content": THANKS}]
            history += new
        return heard


async def messages(place: Place, stream: bool) -> list[Turn]:
    async with anthropic.AsyncAnthropic(base_url=place.anthropic_base_url, api_key=place.key, max_retries=0) as client:
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        tools: Any = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
        heard: list[Turn] = []
        for _ in range(3):
            given: dict[str, Any] = {"model": "policy", "max_tokens": 200, "messages": history, "tools": tools}
            given["thinking"] = {"type": "adaptive"}
            if stream:
                async with client.messages.stream(**given) as events:
                    async for _ in events:
                        pass
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(**given)
            heard.append(message_turn(message))
            calls = [block for block in message.content if block.type == "tool_use"]
            history.append({"role": "assistant", "content": message.content})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
            history.append({"role": "user", "content": results or THANKS})
        return heard


async def threads(place: Place, stream: bool) -> list[Turn]:
    """The SDK's own loop over tools, whose requests continue a thread that the server holds, and one turn more."""
    async with anthropic.AsyncAnthropic(base_url=place.anthropic_base_url, api_key=place.key, max_retries=0) as client:

        @anthropic.beta_async_tool
        async def weather(city: str, days: list[int]) -> str:
            """The weather."""
            assert (city, days) == ("Paris", [1, 2, 3])
            return RESULT

        given: dict[str, Any] = {"model": "policy", "max_tokens": 200, "thinking": {"type": "adaptive"}}
        thread = client.beta.messages.thread(**given, tools=[weather], messages=[{"role": "user", "content": QUESTION}])
        heard: list[Turn] = []
        async for one in thread.tool_runner(stream=stream):
            heard.append(message_turn(await one.get_final_message() if stream else one))
        assert thread.previous_message_id is not None
        heard.append(message_turn(await thread.send({"role": "user", "content": THANKS})))
        return heard


def message_turn(message: Any) -> Turn:
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    return turn(
        "".join(block.text for block in message.content if block.type == "text"),
        "".join(block.thinking for block in message.content if block.type == "thinking"),
        [(call.name, json.dumps(call.input)) for call in calls],
    )


async def completions(place: Place, stream: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key, max_retries=0) as client:
        text = "the weather is"
        heard: list[str] = []
        for _ in range(2):
            if stream:
                said = ""
                async for chunk in await client.completions.create(
                    model="policy", prompt=text, stream=True, max_tokens=50
                ):
                    said += chunk.choices[0].text if chunk.choices else ""
            else:
                said = (await client.completions.create(model="policy", prompt=text, max_tokens=50)).choices[0].text
            heard.append(said)
            text += said + " And the weather is"
        return heard
