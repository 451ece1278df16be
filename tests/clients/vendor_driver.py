"""Two turns with a tool through the client of a model vendor, streamed or not; prints the texts. Imports nothing of ours.

Standard input: ``{"client", "stream", "base_url", "root", "key", "question", "result", "thanks", "parameters"}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

GIVEN = json.load(sys.stdin)
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": GIVEN["parameters"]}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def converse(ask: Callable[[list[Any]], tuple[Any, str, list[Any]]], result: Callable[[Any], Any]) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": GIVEN["question"]}]
    heard = []
    for _ in range(3):
        message, text, calls = ask(messages)
        heard.append(text)
        messages += [message, *(map(result, calls) if calls else [{"role": "user", "content": GIVEN["thanks"]}])]
    return heard


def tool_result(call_id: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": GIVEN["result"]}


def chat(create: Callable[..., Any]) -> list[str]:
    """A client in OpenAI's form: its own messages go back as they came, those of a stream as they add up."""

    def ask(messages: list[Any]) -> tuple[Any, str, list[Any]]:
        reply = create(model="policy", messages=messages, tools=TOOLS, stream=GIVEN["stream"])
        if GIVEN["stream"]:
            return added(reply)
        message = reply.choices[0].message
        ids = [call.id for call in message.tool_calls or []]
        whole = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
        return whole, message.content or "", ids

    return converse(ask, tool_result)


def added(chunks: Iterable[Any]) -> tuple[Any, str, list[str]]:
    text, calls = "", {}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        text += delta.content or ""
        for call in delta.tool_calls or []:
            function = {"name": call.function.name, "arguments": ""}
            known = calls.setdefault(call.index, {"id": call.id, "type": "function", "function": function})
            known["function"]["arguments"] += call.function.arguments or ""
    made = list(calls.values())
    message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
    return message, text, [call["id"] for call in made]


def groq() -> list[str]:
    from groq import Groq  # type: ignore[import-not-found,unused-ignore]

    return chat(Groq(api_key=GIVEN["key"], base_url=GIVEN["root"]).chat.completions.create)


def hugging_face() -> list[str]:
    from huggingface_hub import InferenceClient

    return chat(InferenceClient(base_url=GIVEN["base_url"], api_key=GIVEN["key"]).chat_completion)


def together() -> list[str]:
    from together import Together  # type: ignore[import-not-found,unused-ignore]

    return chat(Together(api_key=GIVEN["key"], base_url=GIVEN["base_url"]).chat.completions.create)


def mistral() -> list[str]:
    from mistralai.client import Mistral  # type: ignore[import-not-found,unused-ignore]

    client = Mistral(api_key=GIVEN["key"], server_url=GIVEN["root"])
    return chat(lambda stream, **given: client.chat.complete(**given))


if __name__ == "__main__":
    print(json.dumps(globals()[GIVEN["client"]]()))
