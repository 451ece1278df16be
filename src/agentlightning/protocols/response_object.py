"""The response object of OpenAI Responses, with every field that OpenAI's specification and Open Responses require. Pure.

Driven by responses.py and response_items.py. What a request did not say has OpenAI's default, except where that would claim
something which this server does not do: tools are `strict` only where the request says so, and the service tier is always
the default one.
"""

from __future__ import annotations

from typing import Any

from agentlightning.protocols.base import Completion
from agentlightning.records import JSON

ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "presence_penalty",
    "frequency_penalty", "previous_response_id", "prompt_cache_key", "prompt_cache_retention", "reasoning",
    "safety_identifier", "store", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation",
    "user",
)  # fmt: skip
"""Fields of the request that its response repeats, and that are recorded with a call, so that it can be fetched."""

DEFAULTS: JSON = {
    "background": False,
    "error": None,
    "frequency_penalty": 0.0,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
}


def echoed(data: JSON) -> JSON:
    """The fields of a request that its response repeats, in the form in which responses have them."""
    echo = {name: data[name] for name in ECHOED if data.get(name) is not None}
    if "reasoning" in echo:
        echo["reasoning"] = {"effort": None, "summary": None, **echo["reasoning"]}
    if "text" in echo:
        echo["text"] = _text(echo["text"])
    if "tools" in echo:
        echo["tools"] = [_tool(tool) for tool in echo["tools"]]
    return echo


def response(response_id: str, model: str, created_s: int, echo: JSON, status: str, output: list[JSON]) -> JSON:
    """A response object; the caller adds usage, error and details."""
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": status,
        "model": model,
        "output": output,
        **DEFAULTS,
        **{name: value for name, value in echo.items() if name in ECHOED},
    }


def finished(completion: Completion, echo: JSON, output: list[JSON]) -> JSON:
    """The response object of a finished completion."""
    cut = completion.choices[0].finish_reason == "length"
    status = "incomplete" if cut else "completed"
    return {
        **response(completion.call_id, completion.model, completion.created_s, echo, status, output),
        "completed_at": None if cut else completion.completed_s,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": usage(completion),
    }


def usage(completion: Completion) -> JSON:
    """The token counts of a completion, as Responses has them."""
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": completion.prompt_tokens + completion.sampled_tokens,
    }


def _text(given: JSON) -> JSON:
    """The text settings with a whole format; a verbosity that was not given is left out, since it may not be null."""
    whole: JSON = {name: value for name, value in given.items() if value is not None}
    form = dict(whole.get("format") or {"type": "text"})
    if form.get("type") == "json_schema":
        form = {"description": None, **form, "strict": bool(form.get("strict"))}
    return {**whole, "format": form}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
