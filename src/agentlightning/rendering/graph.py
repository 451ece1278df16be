"""CallGraph: the recorded calls of one attempt, each held once, and what finds them again.

Driven by the conversation. A call is a node under the call that its prompt continues; parallel calls and sub-agents are
branches. Nodes keep token ids, hashes and the completion, never whole histories.

Calls are found by hashes of their messages. Agents and their frameworks send a message back with cosmetic changes: content
None, "" or missing, a string or a list of text parts, arguments re-serialised, fields added. `normal` removes what means
nothing, for hashes and for chat templates; `digest` hashes what is left, so that whatever is equal as JSON hashes alike.
Knows nothing of templates or of text.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import orjson

from agentlightning.records import JSON, PREFILL, ImageSpan, prefill_of
from agentlightning.runtime import json_text
from agentlightning.runtime.json_text import whole_characters

Digest = bytes

DIGEST_BYTES = 16

MAX_NESTING = 64
"""Levels of nesting of a tool call's arguments; deeper ones stay text: what writes them is recursive."""

NODE_BYTES = 2600
"""Memory of a node and its index entries beside ids, text and digests; measured."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages of one call that its parent's history does not have, and its completion."""

    digests: list[Digest]
    roles: str
    """First letters of the roles of these messages."""
    answer: JSON
    """The completion as a normal message, its prefill included."""
    answer_digests: tuple[Digest, ...]
    """Digests with and without its reasoning, which most agents drop when they send it back."""
    called: Mapping[int, list[JSON]] = field(default_factory=dict)
    """Tool calls of these messages by place, as the template wrote them: those of examples, which nobody sampled."""


@dataclass(slots=True, eq=False)
class CallNode:
    """A recorded call."""

    call_id: str
    parent: CallNode | None
    suffix_ids: array[int]
    sampled_ids: array[int]
    root: Digest
    """Hash of the tools and of the template's variables."""
    step: Turn
    request_hash: Digest
    head: tuple[int, Digest] | None = None
    """Length and hash of the template's rendering of the request; None where the call was read from the store."""
    children: int = 0
    images: tuple[ImageSpan, ...] = ()
    """Images among `suffix_ids`."""
    prefill: JSON | None = None
    """The last message of the request, which the completion continues; `step` counts it as a part of the completion."""
    depth: int = field(init=False)
    """Messages up to and with the completion."""
    sampled_total: int = field(init=False)
    """Sampled tokens of the whole path."""

    def __post_init__(self) -> None:
        before = self.parent
        self.depth = (before.depth if before else 0) + len(self.step.digests) + 1
        self.sampled_total = (before.sampled_total if before else 0) + len(self.sampled_ids)

    @property
    def before(self) -> Digest:
        """Hash of the tools and of all messages before the completion, without its prefill."""
        return self.request_hash if self.prefill is None else hash_before(self.request_hash, self.prefill)

    def up(self) -> Iterator[CallNode]:
        """Yields this node, its parent, and so on."""
        node: CallNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def prompt_ids(self) -> list[int]:
        """Ids of the whole path, without the node's own completion."""
        parts = [self.suffix_ids]
        for node in self.up():
            if node is not self:
                parts += (node.sampled_ids, node.suffix_ids)
        whole = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole.tolist()

    def prompt_images(self) -> list[ImageSpan]:
        """Images of the whole path, with their places in it."""
        found: list[ImageSpan] = []
        at = 0
        for node in reversed(list(self.up())):
            found += (replace(image, start=at + image.start, end=at + image.end) for image in node.images)
            at += len(node.suffix_ids) + len(node.sampled_ids)
        return found

    @property
    def size(self) -> int:
        """Bytes that the node keeps, roughly."""
        ids = self.suffix_ids.itemsize * (len(self.suffix_ids) + len(self.sampled_ids))
        return NODE_BYTES + ids + 64 * len(self.step.digests) + len(json_text.dumps(self.step.answer))


class CallGraph:
    """Nodes by what a later request shows of them."""

    def __init__(self) -> None:
        self.by_history: dict[Digest, list[CallNode]] = {}
        """Nodes by tools and all messages including the completion."""
        self.by_request: dict[Digest, list[CallNode]] = {}
        """Nodes by tools and all messages before the completion, with its prefill and without it."""
        self.by_answer: dict[Digest, list[CallNode]] = {}
        """Nodes by the completion alone."""

    def add(self, node: CallNode) -> None:
        """Let later requests find the node."""
        before = node.before
        for request in {node.request_hash, before}:
            self.by_request.setdefault(request, []).append(node)
        for one in set(node.step.answer_digests):
            self.by_history.setdefault(link(before, one), []).append(node)
            self.by_answer.setdefault(one, []).append(node)
        if node.parent is not None:
            node.parent.children += 1

    def longest_path(self, roles: str, hashes: list[Digest]) -> tuple[int, CallNode | None]:
        """The deepest node whose whole history the request repeats, and how many messages that is.

        Of equal ones the first that nothing continues: equal completions to parallel calls are continued apart.
        """
        for known in range(len(roles), 0, -1):
            if roles[known - 1] == "a" and (nodes := self.by_history.get(hashes[known])):
                return known, next((node for node in nodes if node.children == 0), nodes[0])
        return 0, None


# --- messages ---------------------------------------------------------------------------------------------------------


def normal(message: JSON) -> JSON:
    """The message with text content, parsed arguments and no empty fields, as chat templates want it.

    >>> normal({"role": "assistant", "content": None, "refusal": None, "tool_calls": []})
    {'role': 'assistant', 'content': ''}
    """
    role, content = message["role"], message.get("content")
    if not isinstance(content, str):
        content = _content(content)
    result: JSON = {"role": "system" if role == "developer" else role, "content": content}
    if reasoning := message.get("reasoning_content"):
        result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call) for call in calls]
    if call_id := message.get("tool_call_id"):
        result["tool_call_id"] = call_id
    if name := message.get("name"):
        result["name"] = name
    if message.get(PREFILL) is True:
        result[PREFILL] = True
    return result


def in_call_order(messages: list[JSON]) -> list[JSON]:
    """The messages with the results of parallel calls in the order of the calls, by id: most templates write no ids, so that
    the model takes the first result for that of the first call. Results of no known call stay where they are."""
    ordered = messages
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls or len(calls) < 2:
            continue
        order = {call.get("id"): place for place, call in reversed(list(enumerate(calls)))}
        places: list[int] = []
        for place in range(at + 1, len(messages)):
            role = messages[place].get("role")
            if role == "assistant":
                break
            if role == "tool" and messages[place].get("tool_call_id") in order:
                places.append(place)
        by_call = sorted(places, key=lambda place: order[messages[place]["tool_call_id"]])
        if by_call != places:
            ordered = ordered if ordered is not messages else list(messages)
            for place, source in zip(places, by_call, strict=True):
                ordered[place] = messages[source]
    return ordered


def digest(message: JSON) -> Digest:
    """Hash of a normal message: role, content, reasoning, tool calls by name and arguments, and the tool call answered.

    Names, the ids of tool calls and space around a completion do not count: where a template renders them differently, the
    check of the prefix notices. Arguments count as JSON, so that their order does not, and 1.0 is 1.
    """
    role, content = message["role"], message["content"]
    form: tuple[Any, ...] = (role, content.strip() if role == "assistant" and isinstance(content, str) else content)
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content")
    answered = message.get("tool_call_id")
    if calls or reasoning or answered:
        reasoning = reasoning and reasoning.strip()
        named = calls and [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        form = (*form, named, reasoning, answered)
    if message.get(PREFILL) is True:
        form = (PREFILL, *form[:1], content, *form[2:])  # here space counts: the completion begins right after it
    return _hash(canonical(form) if calls else orjson.dumps(form))


def verbatim(message: JSON) -> Digest:
    """Hash of a message that only an external model need understand: images, items without a role, whatever else there is.

    What `normal` understands whole hashes like `digest`, so that cosmetic changes do not count; the rest as it stands.
    """
    return digest(normal(message)) if _plain(message) else _hash(canonical(message))


def letters(messages: list[JSON]) -> str:
    """First letters of the roles; developers are systems, what has no role is an x, and a prefill is a p: nobody sampled
    it."""
    found = ""
    for message in messages:
        role = message.get("role")
        found += "s" if role == "developer" else str(role or "x")[0]
    return found[:-1] + "p" if messages and messages[-1].get(PREFILL) is True else found


def answer_digests(answer: JSON, of: Callable[[JSON], Digest]) -> tuple[Digest, ...]:
    """Digests of the completion and, if it has reasoning, of it without that, which is how most agents send it back."""
    if "reasoning_content" not in answer:
        return (of(answer),)
    return of(answer), of({key: value for key, value in answer.items() if key != "reasoning_content"})


def chain(root: Digest, digests: list[Digest]) -> list[Digest]:
    """Running hashes: entry i covers the root and the first i digests, so entry 0 is the root."""
    result = [root]
    for one in digests:
        result.append(link(result[-1], one))
    return result


def link(before: Digest, one: Digest) -> Digest:
    """The hash of a history and one more message."""
    return blake2b(before + one, digest_size=DIGEST_BYTES).digest()


def hash_before(request_hash: Digest, prefill: JSON | None) -> Digest:
    """The hash of a request without its prefill; and the other way round, since the two differ by the prefill's digest."""
    if prefill is None:
        return request_hash
    return bytes(one ^ other for one, other in zip(request_hash, digest(prefill), strict=True))


def root(tools: list[JSON] | None, template_kwargs: JSON | None = None) -> Digest:
    """The hash of an empty history: of the tools, and of the variables that the request gives to the chat template."""
    of_tools = _hash(canonical(tools) if tools else b"")
    return link(of_tools, _hash(canonical(template_kwargs))) if template_kwargs else of_tools


_WHOLE = (b".0", b"e+")
"""Texts without which orjson has written no whole number as a float."""


def canonical(value: Any) -> bytes:
    """JSON text that is the same for all that is equal as JSON, whatever its keys' order and its numbers' spelling.

    >>> canonical({"b": 1e2, "a": -0.0}) == canonical({"a": 0, "b": 100})
    True
    """
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        if not any(mark in data for mark in _WHOLE):
            return data
        return orjson.dumps(_with_whole_numbers(value), option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers of more than 64 bits
        return json.dumps(_with_whole_numbers(value), sort_keys=True).encode()


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    return [_with_whole_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def fingerprint(text: str) -> Digest:
    """Hash of a text."""
    return _hash(text.encode())


def _hash(data: bytes) -> Digest:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _plain(message: JSON) -> bool:
    """True where `normal` keeps all that the message says."""
    content = message.get("content")
    known = message.get("role") in ("system", "developer", "user", "assistant", "tool")
    if len(message) == 2 and isinstance(content, str):
        return known
    parts = content if isinstance(content, list) else []
    calls = message.get("tool_calls") or ()
    return (
        known
        and (content is None or isinstance(content, str | list))
        and all(isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in parts)
        and all(isinstance(part.get("text") or part.get("refusal") or "", str) for part in parts)
        and isinstance(message.get("reasoning_content") or "", str)
        and isinstance(calls, list | tuple)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        and all({"name", "arguments"} <= call["function"].keys() for call in calls)
    )


def image_hashes(messages: Iterable[JSON]) -> list[str]:
    """Hashes of the images in normal messages, in their order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def _content(content: Any) -> Any:
    """Text, or a list of texts and images where there are any."""
    result: list[JSON] = []
    for part in content or ():
        if part.get("type") == "image":
            result.append({"type": "image", "image": part["image"]})
        else:
            text = part.get("text") or part.get("refusal") or ""
            if result and result[-1]["type"] == "text":
                result[-1]["text"] += text
            else:
                result.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in result):
        return result
    return result[0]["text"] if result else ""


def _tool_call(call: JSON) -> JSON:
    function = call["function"]
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function["arguments"])},
    }


class Arguments(dict[str, Any]):
    """A tool call's arguments, and the text that they came as, which some templates write."""

    __slots__ = ("text",)

    def __init__(self, value: JSON, text: str) -> None:
        super().__init__(value)
        self.text = text


def _arguments(text: Any) -> Any:
    """The object that the arguments are, empty where there is nothing; the text itself where it is none, or one that
    `MAX_NESTING` levels or Python's numbers cannot hold."""
    if not isinstance(text, str):
        return text
    if not text.strip():
        return Arguments({}, "{}")
    if "\\u" in text:
        text = whole_characters(text)
    if text.count("{") + text.count("[") > MAX_NESTING and _levels(text) > MAX_NESTING:
        return text
    try:
        value = _ARGUMENTS.decode(text.strip())
    except ValueError:
        return text
    return Arguments(value, text) if isinstance(value, dict) else text


def _finite(text: str) -> float:
    if abs(number := float(text)) < math.inf:
        return number
    raise ValueError(f"{text} is not finite")


_ARGUMENTS = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
"""Not orjson, which makes floats of integers beyond 64 bits."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _levels(text: str) -> int:
    """Levels of nesting of a JSON text."""
    level = deepest = 0
    for char in _STRING.sub("", text):
        level += (char in "{[") - (char in "}]")
        deepest = max(deepest, level)
    return deepest


EXTERNAL = b"external"
"""Keeps the hashes of calls to external models apart: the same question to a judge is another call."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """The messages and tools of one request, normalised and hashed once."""

    messages: list[JSON]
    """As the agent sent them, but for the order of the results of parallel calls."""
    tools: list[JSON] | None
    normal: list[JSON]
    roles: str
    digests: list[Digest]
    hashes: list[Digest]
    """Running hashes over the tools, the template's variables and the messages: entry i covers the first i messages."""
    request_hash: Digest
    """The hash of the whole request."""
    prefill: JSON | None = None
    """The last message, where the completion continues it."""
    expansions: Mapping[str, list[int]] = field(default_factory=dict)
    """The ids that stand for each image, by its hash."""
    template_kwargs: JSON = field(default_factory=dict)
    """Further variables of the chat template, all of which it reads (`chat_template_kwargs`)."""

    @classmethod
    def of(
        cls,
        messages: list[JSON],
        tools: list[JSON] | None,
        expansions: Mapping[str, list[int]] | None = None,
        template_kwargs: JSON | None = None,
    ) -> RequestView:
        """For a policy: only what its chat template reads counts."""
        messages = in_call_order(messages)
        view = list(map(normal, messages))
        digests = list(map(digest, view))
        hashes = chain(root(tools, template_kwargs), digests)
        roles = letters(view)
        prefill = view[-1] if roles.endswith("p") else None
        if prefill is not None:
            hashes[-1] = hash_before(hashes[-2], view[-1])
        return cls(
            messages,
            tools,
            view,
            roles,
            digests,
            hashes,
            hashes[-1],
            prefill,
            expansions or {},
            template_kwargs or {},
        )

    @classmethod
    def of_external(cls, messages: list[JSON], tools: list[JSON] | None) -> RequestView:
        """For an external model: whatever `normal` does not understand counts as it stands."""
        digests = list(map(verbatim, messages))
        hashes = chain(external_root(tools), digests)
        return cls(messages, tools, messages, letters(messages), digests, hashes, hashes[-1], prefill_of(messages))

    @property
    def history(self) -> int:
        """Number of messages before the completion, without its prefill."""
        return len(self.roles) - (self.prefill is not None)


def external_root(tools: list[JSON] | None) -> Digest:
    return link(EXTERNAL, root(tools))
