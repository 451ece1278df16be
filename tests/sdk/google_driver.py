"""One conversation through google-genai, streamed and not; prints what was heard as JSON. Imports nothing of ours."""

from __future__ import annotations

import json
import sys
from typing import Any

from google import genai  # type: ignore[import-not-found,unused-ignore]
from google.genai import errors, types  # type: ignore[import-not-found,unused-ignore]

GIVEN = json.load(sys.stdin)


def converse(place: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    client = genai.Client(api_key=place["key"], http_options={"base_url": place["anthropic_base_url"]})
    weather = {"name": "weather", "description": "The weather.", "parameters_json_schema": GIVEN["parameters"]}
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[weather])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        max_output_tokens=200,
    )
    chat = client.chats.create(model="policy", config=config)
    said: Any = GIVEN["question"]
    heard: list[dict[str, Any]] = []
    for _ in range(3):
        replies = list(chat.send_message_stream(said)) if stream else [chat.send_message(said)]
        parts = [part for reply in replies for part in reply.candidates[0].content.parts]
        calls = [part.function_call for part in parts if part.function_call]
        heard.append(
            {
                "text": "".join(part.text for part in parts if part.text and not part.thought),
                "reasoning": "".join(part.text for part in parts if part.text and part.thought),
                "tools": [{"name": call.name, "arguments": call.args} for call in calls],
            }
        )
        results = [
            types.Part(function_response={"id": call.id, "name": call.name, "response": {"output": GIVEN["result"]}})
            for call in calls
        ]
        said = results or GIVEN["thanks"]
    return heard


def failing(place: dict[str, Any]) -> str:
    client = genai.Client(api_key="sk-agl-" + "A" * 44, http_options={"base_url": place["anthropic_base_url"]})
    try:
        client.models.generate_content(model="policy", contents="hi")
    except errors.ClientError as error:
        return str(error.status)
    return "answered"


places = GIVEN["places"]
whole = genai.Client(api_key=places["whole"]["key"], http_options={"base_url": places["whole"]["anthropic_base_url"]})
print(
    json.dumps(
        {
            "whole": converse(places["whole"], False),
            "streamed": converse(places["streamed"], True),
            "error": failing(places["whole"]),
            "models": [model.name for model in whole.models.list()],
            "counted": whole.models.count_tokens(model="policy", contents=GIVEN["question"]).total_tokens,
        }
    )
)
