"""Items of OpenAI Responses: completions as items, and items as messages. Pure.

Every item of a response carries the id of its call (``rs_ID``, ``msg_ID``, ``fc_ID_0``), so that items which an agent sends
back are put together to the message that was recorded.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from agentlightning.protocols.base import (
    SSE_DONE,
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    Delta,
    TokenLogprob,
    ToolDelta,
    sse_event,
)
from agentlightning.protocols.chat import logprob_list
from agentlightning.records import JSON
from agentlightning.runtime import json_text

SEALED = "agl:"
"""Prefix of our encrypted_content; the rest is the reasoning in base64, no secret."""

SEALED_REASONING = "reasoning.encrypted_content"
"""The member of `include` that asks for the sealed reasoning."""

OUR_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12})(?:_\d+)?\Z")
"""Calls have a UUID of version 7, which says that an item with another is not ours."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def output_items(choice: Choice, response_id: str, echo: JSON) -> list[JSON]:
    """Reasoning, message, function calls; where the completion was cut, the last one is incomplete."""
    items: list[JSON] = []
    if choice.reasoning:
        items.append(reasoning_item(f"rs_{response_id}", choice.reasoning, echo, "completed"))
    if choice.content or not choice.tool_calls:
        tokens, text = choice.logprobs or (), choice.content or ""
        found = tokens[spoken(tokens, text, choice.reasoning or "")]
        items.append(message_item(f"msg_{response_id}", text, "completed", found))
    for index, call in enumerate(choice.tool_calls):
        item = call_item(f"fc_{response_id}_{index}", call.id, call.name, call.arguments, "completed")
        items.append(fold(item, echo.get(FOLDS, {})))
    if choice.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(item_id: str, text: str, echo: JSON, status: str) -> JSON:
    """A reasoning item, with what the request asked to have included."""
    item: JSON = {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if summarises(echo) else [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }
    if SEALED_REASONING in echo.get("include", ()):
        item["encrypted_content"] = SEALED + base64.b64encode(text.encode()).decode()
    return item


def summarises(echo: JSON) -> bool:
    """True where the request asked for summaries of the reasoning: they are the reasoning itself."""
    asked = echo.get("reasoning") or {}
    return any(asked.get(name) is not None for name in ("summary", "generate_summary"))


def message_item(item_id: str, text: str, status: str, logprobs: Sequence[TokenLogprob] = ()) -> JSON:
    """A message item."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_list(logprobs)}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> JSON:
    """A function call item."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def spoken(tokens: Sequence[TokenLogprob], text: str, before: str = "") -> slice:
    """The slice of tokens that wrote `text`, which followed `before`; all of them where the text was cut within a
    character."""
    written = "".join(one.text for one in tokens)
    start = written.find(text, max(written.find(before), 0) + len(before))
    if start < 0:
        return slice(0, len(tokens))
    ends = list(accumulate(len(one.text) for one in tokens))
    last = bisect_left(ends, start + len(text)) + 1 if text else 0
    return slice(bisect_right(ends, start), last)


class AssistantTurn:
    """Consecutive items of the assistant, put together to one message as far as they belong to one completion."""

    def __init__(self) -> None:
        self.message: JSON = {"role": "assistant", "content": None}
        self._origin = ""

    def takes(self, item: JSON) -> bool:
        """True where `item` belongs to the same response: by its id, else by the order of items in a response."""
        origin = _origin(item)
        if self._origin and origin:
            return origin == self._origin
        if "tool_calls" in self.message:
            return item.get("type") == "function_call"
        if self.message["content"] is not None:
            return item.get("type") == "function_call"
        return "reasoning_content" not in self.message or item.get("type") != "reasoning"

    def add(self, item: JSON) -> None:
        """Take in an item whose shape has been checked."""
        self._origin = self._origin or _origin(item)
        kind = item.get("type")
        if kind == "reasoning":
            text = reasoning_text(item)
            if text:
                self.message["reasoning_content"] = self.message.get("reasoning_content", "") + text
        elif kind == "function_call":
            arguments = item.get("arguments") or ""
            written = json_text.dumps(arguments).decode() if isinstance(arguments, dict) else str(arguments)
            function = {"name": str(item.get("name") or ""), "arguments": written}
            call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)
        else:
            content = plain(item.get("content"))
            before = self.message["content"]
            joined = isinstance(before, str) and isinstance(content, str)
            self.message["content"] = before + content if joined else content


def reasoning_text(item: JSON) -> str:
    """The reasoning that an item holds: its content, what is sealed in it, or its summary."""
    said = plain(item.get("content") or "")
    if isinstance(said, str) and said:
        return said
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        return _opened(sealed)
    summary = plain(item.get("summary") or "")
    return summary if isinstance(summary, str) else ""


def _opened(sealed: str) -> str:
    """The text in an encrypted_content of ours; empty where it was changed."""
    try:
        return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""


def plain(content: Any) -> Any:
    """Text parts as one text; other content as it is."""
    if not isinstance(content, list) or not all(is_text(part) for part in content):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def is_text(part: Any) -> bool:
    """True where a content part is text."""
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        return False
    return isinstance(part.get("refusal" if part["type"] == "refusal" else "text"), str)


def _origin(item: JSON) -> str:
    """The call behind an item's id; empty where it has none of ours. Other servers give each item an id of its own."""
    found = OUR_ID.match(str(item.get("id") or ""))
    return "" if found is None else found[1]


class ResponseReader(CompletionReader):
    """An external model's response, whole or event by event. Unknown fields are passed over."""

    def whole(self, body: JSON) -> None:
        turn = AssistantTurn()
        output = body.get("output")
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict) and item.get("type") in ("reasoning", "message", "function_call"):
                turn.add(item)
        self.message = turn.message
        if "tool_calls" in self.message:
            self.finish_reason = "tool_calls"
        if body.get("status") == "incomplete":
            self.finish_reason = "length"
        self.read_usage(body, "input_tokens", "output_tokens")

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream; the last one has everything."""
        kind, item = data.get("type"), data.get("item")
        if kind in ("response.completed", "response.incomplete") and isinstance(data.get("response"), dict):
            self.whole(data["response"])
        elif kind == "response.output_text.delta":
            self.add_text("content", data.get("delta"))
        elif kind == "response.reasoning_text.delta":
            self.add_text("reasoning_content", data.get("delta"))
        elif kind == "response.output_item.done" and isinstance(item, dict) and item.get("type") == "function_call":
            turn = AssistantTurn()
            turn.add(item)
            self.message.setdefault("tool_calls", []).extend(turn.message["tool_calls"])


# --- namespaces and freeform tools -----------------------------------------------------------------------------------


JOINT = "__"
INPUT = "input"

FOLDS = "_folds"
"""Key of `CompletionRequest.echo`: by the function's name, what it was in the request."""


def flatten(data: JSON) -> tuple[JSON, JSON]:
    """(the request with functions only, what they were by their names). What has another shape is left to the parser."""
    folds: JSON = {}
    tools = data.get("tools")
    if isinstance(tools, list) and any(_kind(tool) in ("namespace", "custom") for tool in tools):
        data = {**data, "tools": [flat for tool in tools for flat in _flat_tools(tool, folds)]}
    items = data.get("input")
    if isinstance(items, list) and any(_is_folded(item) for item in items):
        data = {**data, "input": [_flat_item(item) for item in items]}
    if isinstance(choice := data.get("tool_choice"), dict):
        data = {**data, "tool_choice": _flat_choice(choice)}
    return data, folds


def fold(item: JSON, folds: JSON) -> JSON:
    """A function call item as a call of the tool that the request had."""
    was = folds.get(item["name"])
    if was is None:
        return item
    folded = {**item, "name": was["name"]}
    if "namespace" in was:
        folded["namespace"] = was["namespace"]
    if was.get("custom"):
        folded["type"] = "custom_tool_call"
        folded[INPUT] = freeform(folded.pop("arguments"))
    return folded


def freeform(arguments: str) -> str:
    """The text that a call gives a freeform tool; arguments of another form are the text themselves.

    >>> freeform('{"input": "ls"}'), freeform("ls")
    ('ls', 'ls')
    """
    try:
        value: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def _flat_tools(tool: Any, folds: JSON, namespace: str = "") -> list[Any]:
    kind = _kind(tool)
    if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list) and _is_name(tool.get("name")):
        return [flat for one in tool["tools"] for flat in _flat_tools(one, folds, tool["name"])]
    if kind not in ("function", "custom") or not _is_name(tool.get("name")) or not (namespace or kind == "custom"):
        return [tool]
    flat = tool if kind == "function" else _function(tool)
    name = f"{namespace}{JOINT}{tool['name']}" if namespace else tool["name"]
    where = {"namespace": namespace} if namespace else {}
    folds[name] = {"name": tool["name"], **where, **({"custom": True} if kind == "custom" else {})}
    return [{**flat, "name": name}]


def _function(tool: JSON) -> JSON:
    """A freeform tool as a function; the grammar of its input, which is not enforced, stands in the description."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    said = f"Text in this grammar:\n{grammar}" if isinstance(grammar, str) else "Any text."
    schema = {"type": "object", "properties": {INPUT: {"type": "string", "description": said}}, "required": [INPUT]}
    function: JSON = {"type": "function", "name": tool["name"], "parameters": schema}
    return {**function, "description": tool["description"]} if "description" in tool else function


def _is_folded(item: Any) -> bool:
    kind = _kind(item)
    return kind in ("custom_tool_call", "custom_tool_call_output") or (kind == "function_call" and "namespace" in item)


def _flat_item(item: Any) -> Any:
    if not _is_folded(item):
        return item
    if item["type"] == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    flat = _flat_name(item)
    if flat["type"] == "custom_tool_call" and isinstance(flat.get(INPUT), str):
        flat["type"] = "function_call"
        flat["arguments"] = orjson.dumps({INPUT: flat.pop(INPUT)}).decode()
    return flat


def _flat_choice(choice: JSON) -> JSON:
    """A `tool_choice`, which names a tool, or lists those that are allowed."""
    allowed = choice.get("tools")
    if isinstance(allowed, list):
        return {**choice, "tools": [_flat_name(one) if isinstance(one, dict) else one for one in allowed]}
    return _flat_name(choice)


def _flat_name(named: JSON) -> JSON:
    flat = dict(named)
    namespace = flat.pop("namespace", None)
    if _is_name(namespace) and isinstance(flat.get("name"), str):
        flat["name"] = f"{namespace}{JOINT}{flat['name']}"
    return flat


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# --- the response object ---------------------------------------------------------------------------------------------


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


# --- events ----------------------------------------------------------------------------------------------------------


class ResponseEvents:
    """The events of one streamed response; every item opens, grows and closes before the next."""

    def __init__(self, echo: JSON, call_id: str, model: str, created_s: int) -> None:
        self._echo = echo
        self._call_id = call_id
        self._model = model
        self._created_s = created_s
        self._number = 0
        """Sequence number of the next event that is sent."""
        self._output: list[JSON] = []
        """Items that are closed."""
        self._open: JSON | None = None
        """The item under way."""
        self._text: list[str] = []
        """The text of the open item."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of the open message's tokens."""
        self._unplaced: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text is held back: their item is known with their text."""
        self._tool = -1
        """Index of the tool call under way."""
        self._messages = 0

    def first(self) -> bytes:
        """Opens the response."""
        begun = response(self._call_id, self._model, self._created_s, self._echo, "in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, index: int, delta: Delta) -> bytes:
        """More reasoning, text, or tool calls. There is one choice."""
        parts: list[bytes] = []
        self._unplaced += delta.logprobs or ()
        if delta.reasoning:
            parts.append(self._begin("reasoning"))
            parts.append(self._more("response.reasoning_text.delta", delta.reasoning, content_index=0))
            if summarises(self._echo):
                more = {"item_id": self._item_id(), "output_index": len(self._output), "summary_index": 0}
                parts.append(self._event("response.reasoning_summary_text.delta", delta=delta.reasoning, **more))
        if delta.content:
            parts.append(self._begin("message"))
            place = spoken(self._unplaced, delta.content, delta.reasoning)
            found = self._unplaced[place]
            del self._unplaced[: place.stop]
            self._logprobs += found
            more = {"content_index": 0, "logprobs": logprob_list(found)}
            parts.append(self._more("response.output_text.delta", delta.content, **more))
        if delta.tools or (delta.reasoning and not delta.content):
            self._unplaced.clear()
        parts += [self._tool_call(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, completion: Completion) -> bytes:
        """Closes the open item and the response."""
        choice = completion.choices[0]
        parts: list[bytes] = []
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if not choice.content and not choice.tool_calls and not self._messages:
            parts.append(self._begin("message"))
        parts.append(self._end(status))
        whole = finished(completion, self._echo, self._output)
        parts.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join((*parts, SSE_DONE))

    def failed(self, refusal: ApiError) -> bytes:
        about = {"message": refusal.message, "code": refusal.code, "param": refusal.param}
        whole = response(self._call_id, self._model, self._created_s, self._echo, "failed", self._output)
        whole["error"] = {"code": "server_error", "message": refusal.message}
        error = self._event("error", **about, error={**about, "type": refusal.type})
        return error + self._event("response.failed", response=whole) + SSE_DONE

    # --- items ------------------------------------------------------------------------------------------------------

    def _tool_call(self, tool: ToolDelta) -> bytes:
        begun = b""
        if tool.name is not None:
            begun = self._end("completed")
            self._tool = tool.index
            item_id = f"fc_{self._call_id}_{tool.index}"
            item = call_item(item_id, tool.id or "", tool.name, "", "in_progress")
            begun += self._add(fold(item, self._echo.get(FOLDS, {})))
        if not tool.arguments:
            return begun
        if self._open is not None and self._open["type"] == "custom_tool_call":
            self._text.append(tool.arguments)  # its input is known once the arguments are whole
            return begun
        return begun + self._more("response.function_call_arguments.delta", tool.arguments)

    def _begin(self, kind: str) -> bytes:
        """Open an item of reasoning or text, where none is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        closed = self._end("completed")
        if kind == "reasoning":
            item = {
                "id": f"rs_{self._call_id}",
                "type": "reasoning",
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            opened = self._add(item) + self._part("added", {"type": "reasoning_text", "text": ""})
            if summarises(self._echo):
                opened += self._summary_part("added", "")
            return closed + opened
        number = f"_{self._messages}" if self._messages else ""
        self._messages += 1
        item = {**message_item(f"msg_{self._call_id}{number}", "", "in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return closed + self._add(item) + self._part("added", part)

    def _add(self, item: JSON) -> bytes:
        self._open, self._text, self._logprobs = item, [], []
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _end(self, status: str) -> bytes:
        """Close the open item."""
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._text)
        parts: list[bytes] = []
        if item["type"] == "reasoning":
            item = reasoning_item(item["id"], text, self._echo, status)
            parts.append(self._whole("response.reasoning_text.done", text=text, content_index=0))
            parts.append(self._part("done", {"type": "reasoning_text", "text": text}))
            if summarises(self._echo):
                parts.append(self._whole("response.reasoning_summary_text.done", text=text, summary_index=0))
                parts.append(self._summary_part("done", text))
        elif item["type"] == "message":
            item = message_item(item["id"], text, status, self._logprobs)
            found = item["content"][0]["logprobs"]
            parts.append(self._whole("response.output_text.done", text=text, content_index=0, logprobs=found))
            parts.append(self._part("done", item["content"][0]))
        elif item["type"] == "custom_tool_call":
            item = {**item, "input": freeform(text), "status": status}
            parts.append(self._whole("response.custom_tool_call_input.delta", delta=item["input"]))
            parts.append(self._whole("response.custom_tool_call_input.done", input=item["input"]))
        else:
            item = {**item, "arguments": text, "status": status}
            parts.append(self._whole("response.function_call_arguments.done", name=item["name"], arguments=text))
        parts.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        return b"".join(parts)

    def _item_id(self) -> str:
        return str(self._open["id"]) if self._open is not None else ""

    def _more(self, kind: str, text: str, **fields: Any) -> bytes:
        self._text.append(text)
        return self._whole(kind, delta=text, **fields)

    def _whole(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id(), output_index=len(self._output), **fields)

    def _part(self, what: str, part: JSON) -> bytes:
        return self._whole(f"response.content_part.{what}", content_index=0, part=part)

    def _summary_part(self, what: str, text: str) -> bytes:
        part = {"type": "summary_text", "text": text}
        return self._whole(f"response.reasoning_summary_part.{what}", summary_index=0, part=part)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return sse_event({"type": kind, "sequence_number": self._number - 1, **data}, kind)
