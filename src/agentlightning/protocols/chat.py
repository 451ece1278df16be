"""OpenAI Chat Completions: JSON <-> Request, Answer, Refusal. Pure.

Driven by the gateway, which chooses the protocol by route. A field that would change the distribution tokens are drawn
from, and that the trained policy's sampler does not have, is refused; it is never passed over in silence. `temperature` and
`top_p` are accepted and overridden by the rollout's own sampling, which is recorded with the call. Unknown fields are passed
over.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols import sse
from agentlightning.protocols.neutral import Answer, Delta, Refusal, Request, TokenLogprob
from agentlightning.types import JSON

NAME = "chat"

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
}
"""Fields that change what is sampled, and the values (beside null) with which they do not."""


def parse(body: bytes) -> Request:
    """The request in `body`. Raises Refusal, naming the field and what was expected."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise Refusal(f"the body is not valid JSON: {cause}") from None
    if not isinstance(data, dict):
        raise Refusal(f"the body: expected a JSON object, got {type(data).__name__}")
    for name in data.keys() & NEUTRAL.keys():
        value = data[name]
        if value is not None and not _is_neutral(value, NEUTRAL[name]):
            raise Refusal(
                f"{name}: {_short(value)} is not supported, because it would change what the trained policy samples; "
                f"leave it out" + (f" or set it to {_short(NEUTRAL[name][0])}" if NEUTRAL[name] else ""),
                param=name,
                code="unsupported_value",
            )
    _check_response_format(data.get("response_format"))
    tools = _tools(data.get("tools"))
    stream = _boolean(data, "stream")
    options = data.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise Refusal(f"stream_options: expected an object, got {_short(options)}", param="stream_options")
    return Request(
        model=_model(data.get("model")),
        messages=_messages(data.get("messages")),
        tools=tools,
        parse_tools=_tool_choice(data.get("tool_choice"), tools),
        max_tokens=_max_tokens(data),
        stop=_stop(data.get("stop")),
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        logprobs=_boolean(data, "logprobs"),
    )


def message(answer: Answer) -> JSON:
    """The assistant message of an answer, as the agent receives it and sends it back."""
    result: JSON = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        result["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return result


def body(answer: Answer) -> bytes:
    """The whole response of a call that is not streamed."""
    return orjson.dumps(
        {
            "id": answer_id(answer.call_id),
            "object": "chat.completion",
            "created": answer.created_s,
            "model": answer.model,
            "choices": [
                {
                    "index": 0,
                    "message": {**message(answer), "refusal": None},
                    "logprobs": _logprobs(answer.logprobs),
                    "finish_reason": answer.finish_reason,
                }
            ],
            "usage": _usage(answer),
        }
    )


class Stream:
    """The events of one streamed answer: `first`, any number of `delta`, then `last`, which only a durable call may send."""

    def __init__(self, request: Request, call_id: str, model: str, created_s: int) -> None:
        self._usage = request.include_usage
        self._frame: JSON = {
            "id": answer_id(call_id),
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        if self._usage:
            self._frame["usage"] = None

    def first(self) -> bytes:
        """Opens the message."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta, logprobs: tuple[TokenLogprob, ...] | None = None) -> bytes:
        """More text."""
        fields: JSON = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content or not fields:
            fields["content"] = delta.content
        return self._chunk(fields, logprobs=_logprobs(logprobs))

    def last(self, answer: Answer) -> bytes:
        """Tool calls, the finish reason, the usage where asked for, and the end mark."""
        parts: list[bytes] = []
        if answer.tool_calls:
            calls = message(answer)["tool_calls"]
            parts.append(self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
        parts.append(self._chunk({}, finish_reason=answer.finish_reason))
        if self._usage:
            parts.append(sse.event({**self._frame, "choices": [], "usage": _usage(answer)}))
        parts.append(sse.DONE)
        return b"".join(parts)

    def failed(self, refusal: Refusal) -> bytes:
        """Ends a stream that cannot go on; SDKs raise the error that it carries."""
        return b"data: " + error(refusal) + b"\n\n"

    def _chunk(self, delta: JSON, finish_reason: str | None = None, logprobs: JSON | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.event({**self._frame, "choices": [choice]})


def error(refusal: Refusal) -> bytes:
    """An error in the protocol's own shape."""
    return orjson.dumps(
        {
            "error": {
                "message": refusal.message,
                "type": refusal.type,
                "param": refusal.param,
                "code": refusal.code,
            }
        }
    )


def models(names: list[str]) -> bytes:
    """The body of GET models."""
    entries = [{"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"} for name in names]
    return orjson.dumps({"object": "list", "data": entries})


def answer_id(call_id: str) -> str:
    """The id that an agent sees for a recorded call."""
    return f"chatcmpl-{call_id}"


def call_id(answer_id: str) -> str:
    """The recorded call behind an id that an agent saw."""
    return answer_id.removeprefix("chatcmpl-")


# --- parsing --------------------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _boolean(data: JSON, name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{name}: expected true or false, got {_short(value)}", param=name)
    return bool(value)


def _model(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise Refusal(f"model: expected a string, got {_short(value)}", param="model")
    return value or ""


def _check_response_format(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or value.get("type") != "text":
        raise Refusal(
            'response_format: only {"type": "text"} is supported, because the trained policy is sampled without a grammar',
            param="response_format",
            code="unsupported_value",
        )


def _max_tokens(data: JSON) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(f"{name}: expected a whole number of at least 1, got {_short(value)}", param=name)
        return value
    return None


def _stop(value: Any) -> tuple[str, ...]:
    if value is None or value == []:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise Refusal(f"stop: expected a string or a list of strings, none empty, got {_short(value)}", param="stop")
    return tuple(values)


def _tools(value: Any) -> list[JSON] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise Refusal(f"tools: expected a list, got {_short(value)}", param="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(
                f'tools[{index}]: expected {{"type": "function", "function": {{"name": …}}}}, got {_short(tool)}',
                param=f"tools[{index}]",
            )
    return value


def _tool_choice(value: Any, tools: list[JSON] | None) -> bool:
    if value is None or value == "auto":
        return tools is not None
    if value == "none":
        return False
    raise Refusal(
        f'tool_choice: only "auto" and "none" are supported, because a call cannot be forced on the policy '
        f"that is trained; got {_short(value)}",
        param="tool_choice",
        code="unsupported_value",
    )


def _messages(value: Any) -> list[JSON]:
    if not isinstance(value, list) or not value:
        raise Refusal(f"messages: expected a list of at least one message, got {_short(value)}", param="messages")
    for index, one in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(one, dict):
            raise Refusal(f"{where}: expected an object, got {_short(one)}", param=where)
        role = one.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise Refusal(f"{where}.role: expected one of {', '.join(sorted(ROLES))}, got {_short(role)}", param=where)
        _check_content(one.get("content"), f"{where}.content")
        for name in ("tool_call_id", "reasoning_content", "name"):
            if not isinstance(one.get(name), str | None):
                raise Refusal(f"{where}.{name}: expected a string, got {_short(one[name])}", param=where)
        if one.get("tool_calls") is not None:
            _check_tool_calls(one["tool_calls"], f"{where}.tool_calls")
    return value


def _check_content(value: Any, where: str) -> None:
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise Refusal(f"{where}: expected a string or a list of text parts, got {_short(value)}", param=where)
    for part in value:
        if (
            isinstance(part, dict)
            and part.get("type") in ("text", "refusal")
            and isinstance(part.get(part["type"]), str)
        ):
            continue
        raise Refusal(
            f"{where}: only text parts are supported, got {_short(part)}", param=where, code="unsupported_value"
        )


def _check_tool_calls(value: Any, where: str) -> None:
    if not isinstance(value, list):
        raise Refusal(f"{where}: expected a list, got {_short(value)}", param=where)
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        fields = function if isinstance(function, dict) else {}
        if not isinstance(fields.get("name"), str) or not isinstance(fields.get("arguments"), str):
            raise Refusal(
                f'{where}: expected a list of {{"id", "type": "function", "function": {{"name", "arguments"}}}} with '
                f"arguments as a JSON text, got {_short(call)}",
                param=where,
            )


# --- building -------------------------------------------------------------------------------------------------------


def _usage(answer: Answer) -> JSON:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def _logprobs(tokens: tuple[TokenLogprob, ...] | None) -> JSON | None:
    if tokens is None:
        return None
    return {
        "content": [
            {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode()), "top_logprobs": []}
            for one in tokens
        ],
        "refusal": None,
    }
