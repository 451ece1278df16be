"""Tool uses and agents of the calls of an attempt: the tools that each call led to, and its agent where it named none.

AIR drives it over the whole record of one attempt. What a tool gave stands in the messages of a later call, in a span, in
both, or in neither; what stands in both is one use. A span is somebody else's data: nothing here raises on it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from agentlightning.adapters.semantics import ToolUse, tool_use
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.protocols.system_prompts import is_prompt_name
from agentlightning.records import ABANDONED, JSON, RESERVED_AGENTS, Call, Span
from agentlightning.rendering.call_chain import call_chain, chain_tools
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import by_attempt

FAILED = re.compile(
    r"\s*(?:[\w.]*(?:error|exception)\s*(?:[:(\[\n]|\Z)|traceback \(most recent call last\)|an error occurred\b"
    r"|error (?:executing|running|invoking|calling|while|occurred)\b"
    r"|(?:tool|function) (?:(?:named|with name) )?[^\w\s]?[\w./-]+[^\w\s]? (?:was |is |does )?"
    r"(?:not found\b|not exist\b|not (?:a )?(?:valid|available|defined)\b)"
    r"|unknown (?:tool|function)\b|\d+ validation errors?\b)",
    re.IGNORECASE,
)
"""Openings of texts that frameworks give the model in place of a tool's result."""

MAX_ANCESTORS = 256
"""Spans looked at on the way to the root: programs may send chains without end, or cycles."""


@dataclass(slots=True, kw_only=True)
class ToolExecution:
    """One tool that a call asked for, or that ran because of it."""

    name: str
    """'' where a user message is the reply of a tool that is called in text."""
    arguments: str
    """As they were sampled, or as a span has them."""
    asked: bool
    """The call's completion has it as a tool call; False: a span or a reply in text alone tells of it."""
    id: str | None = None
    """Of the tool call."""
    result: str | None = None
    """None: nothing tells what became of it."""
    failed: bool | None = None
    """None: nothing tells what became of it. A span tells of a failure alone, since its agent may have posted it: a tool
    succeeded where the model was shown its result."""
    seen: bool = False
    """A span has told of it."""
    span: ToolUse | None = None

    @property
    def only_told(self) -> bool:
        """True where a span alone tells of it: agents post what spans they like."""
        return not self.asked and self.span is not None

    @property
    def key(self) -> tuple[str, str]:
        """Equal for uses that ask for the same, however it is written."""
        return self.name, canonical(self.arguments)


@dataclass(slots=True, kw_only=True)
class CallStep:
    """One call of the attempt and what came of it."""

    call: Call
    tools: list[JSON] | None
    """The definitions that the call was given, whichever call they are recorded with."""
    tool_calls: list[ToolExecution] = field(default_factory=list)
    """Those that the completion asks for come first, in its order."""
    next_ns: int | None = None
    """Start of the next call of its conversation; None where there is none."""

    @property
    def seconds(self) -> float | None:
        """From the completion to the conversation's next call, by the gateway's clock: tools and the agent's own work."""
        return None if self.next_ns is None else max(0, self.next_ns - self.call.finished_ns) / 1e9

    @property
    def sampled_tokens(self) -> int:
        """Length of the completion; of an external model as it said."""
        said = self.call.usage.get("sampled_tokens")
        return len(self.call.sampled_ids) or (said if isinstance(said, int) else 0)


def call_steps(
    calls: Sequence[Call],
    spans: Iterable[Span] = (),
    *,
    user_replies: bool = False,
    error_pattern: re.Pattern[str] | None = None,
) -> list[CallStep]:
    """The calls of one attempt, in the order they finished, with what came of each. The order of `spans` means nothing.

    user_replies: a user message that follows a completion without tool calls is the reply of a tool that is called in text.
    error_pattern: what the text of a failed tool's result matches somewhere; None: begins as `FAILED` says.
    """
    found = _Steps(calls, error_pattern)
    for step in found.steps:
        found.read_messages(step, user_replies)
    told = [use for span in sorted(spans, key=lambda span: (span.started_ns, span.id)) if (use := tool_use(span))]
    if told:
        found.read_spans(told, {span.id: span.parent_id for span in spans})
    return found.steps


def canonical(arguments: str) -> str:
    """Arguments so that equal ones are equal texts.

    >>> canonical('{"b": 1, "a": 2}') == canonical('{"a":2,"b":1}')
    True
    """
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments.strip()


def content_text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def parse_tool_calls(answer: JSON) -> Iterator[tuple[str | None, str, str]]:
    """Id, name and arguments of each tool call of a completion; what is malformed is passed over. Without an id: None."""
    calls = answer.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments, name = function.get("arguments"), call.get("id")
            yield (
                name if isinstance(name, str) and name else None,  # '' is what some endpoints give every call
                function["name"],
                arguments if isinstance(arguments, str) else "",
            )


def says_error(text: str, pattern: re.Pattern[str] | None = None) -> bool:
    """True where a tool's result tells that the tool failed.

    >>> says_error("ValueError: no such city"), says_error('{"isError": true}'), says_error("Error rates fell")
    (True, True, False)
    """
    if pattern is not None:
        return pattern.search(text) is not None
    if text.lstrip()[:1] == "{":
        try:
            table = orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        return isinstance(table, dict) and (
            any(bool(table.get(key)) for key in ("error", "isError", "is_error"))
            or table.get("success") is False
            or table.get("status") == "error"
        )
    return FAILED.match(text) is not None


class _Steps:
    """The steps of one attempt while they are put together."""

    def __init__(self, calls: Sequence[Call], pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        given = {call.id: call for call in calls}
        self.steps: list[CallStep] = []
        self._by_call: dict[str, CallStep] = {}
        self._by_id: defaultdict[str, list[tuple[CallStep, ToolExecution]]] = defaultdict(list)
        for call in calls:
            if call.finish_reason == ABANDONED:
                continue
            step = CallStep(call=call, tools=chain_tools(call_chain(call, given)))
            for name_id, name, arguments in parse_tool_calls(call.completion):
                use = ToolExecution(name=name, arguments=arguments, asked=True, id=name_id)
                step.tool_calls.append(use)
                if name_id is not None:
                    self._by_id[name_id].append((step, use))
            self.steps.append(step)
            self._by_call[call.id] = step

    # --- what later calls' messages say -----------------------------------------------------------------------------

    def read_messages(self, step: CallStep, user_replies: bool) -> None:
        """Take in what this call's prompt says of earlier calls. Results in a history that could not be continued, and was
        sent again whole, are found by the ids of their calls."""
        parent = self._by_call.get(step.call.parent_id or "")
        if parent is not None and (parent.next_ns is None or step.call.started_ns < parent.next_ns):
            parent.next_ns = step.call.started_ns
        for message in step.call.messages:
            if message.get("role") == "tool":
                self._result(parent, message, step)
            elif message.get("role") == "user" and user_replies and parent is not None:
                self._reply(parent, message)

    def _result(self, current: CallStep | None, message: JSON, step: CallStep) -> None:
        name = message.get("tool_call_id")
        known = self._by_id.get(name, []) if isinstance(name, str) else []
        known = [(one, use) for one, use in known if one is current or _before(one, step)]
        uses = [use for one, use in known if one is current] or [use for _, use in known[-1:]]
        if not known and current is not None:
            # an id that nobody gave: the first that waits, of this name if it has one
            uses = [use for use in current.tool_calls if use.asked and use.failed is None]
            uses = [use for use in uses if use.name == message.get("name")] or uses
        result = content_text(message.get("content"))
        failed = message.get("is_error") is True or says_error(result, self._pattern)
        use = next((use for use in uses if use.failed is None), None)
        if use is None and failed:  # the conversation itself outweighs a call beside it that was shown another result
            use = next((use for one, use in known if one is current and not use.failed), None)
        if use is None:
            return
        use.result = result
        use.failed = failed

    def _reply(self, current: CallStep, message: JSON) -> None:
        if current.tool_calls:
            return  # tools were called as such, or the reply was read before
        text = content_text(message.get("content"))
        asked = content_text(current.call.completion.get("content"))
        current.tool_calls.append(
            ToolExecution(name="", arguments=asked, asked=False, result=text, failed=says_error(text, self._pattern))
        )

    # --- what spans say ---------------------------------------------------------------------------------------------

    def read_spans(self, told: Sequence[ToolUse], parents: Mapping[str, str | None]) -> None:
        """Take in the tools' spans, in the order they began."""
        under: defaultdict[str, list[CallStep]] = defaultdict(list)
        """By span: the calls that were made within it, in the order they finished."""
        for step in self.steps:
            for span_id in _lineage(step.call.span_id, parents):
                under[span_id].append(step)
        seen = {use.span_id: use for use in told}
        for use in told:
            _, *above = _lineage(use.span_id, parents)
            if any(_is_one(use, seen[one], under[one]) for one in above if one in seen):
                continue  # two instrumentations told of one use, one within the other
            within = (_last(under[one], use.started_ns) for one in (use.span_id, *above) if one in under)
            # the call that led to it: the last before it that shares its nearest ancestor, else the last before it
            owner = next(filter(None, within), None) or _last(self.steps, use.started_ns)
            known = self._known(use, owner)
            if known is None and owner is not None:
                known = ToolExecution(name=use.name, arguments=use.arguments or "", asked=False, id=use.call_id)
                owner.tool_calls.append(known)
            if known is not None:
                self._merge(known, use)

    def _known(self, told: ToolUse, owner: CallStep | None) -> ToolExecution | None:
        """The use that a span tells of: by the id; else what the call before it asked in the same words, or by the name."""
        if named := self._by_id.get(told.call_id or ""):
            return min(named, key=lambda one: (one[0] is not owner, one[1].seen))[1]
        waiting = [use for use in (owner.tool_calls if owner else ()) if _waits(use, told)]
        key = told.name, canonical(told.arguments or "")
        return next((use for use in waiting if use.key == key), waiting[0] if waiting else None)

    def _merge(self, use: ToolExecution, told: ToolUse) -> None:
        use.seen = True
        use.span = use.span or told
        if use.result is None:
            use.result = told.result
        failed = told.error is not None or (told.result is not None and says_error(told.result, self._pattern))
        if failed and (use.failed is None or told.error is not None):
            use.failed = True


def _lineage(span_id: str | None, parents: Mapping[str, str | None]) -> list[str]:
    """The span and its ancestors, the nearest first; of a cycle each one once."""
    found: dict[str, None] = {}
    while span_id is not None and span_id not in found and len(found) < MAX_ANCESTORS:
        found[span_id] = None
        span_id = parents.get(span_id)
    return list(found)


def _last(found: Sequence[CallStep], before_ns: int) -> CallStep | None:
    at = bisect_right(found, before_ns, key=lambda step: step.call.finished_ns)
    return found[at - 1] if at else None


def _waits(use: ToolExecution, told: ToolUse) -> bool:
    """True where a span may be the first to tell of this use."""
    return use.asked and not use.seen and use.name == told.name


def _is_one(inner: ToolUse, outer: ToolUse, called: Sequence[CallStep]) -> bool:
    """True where two spans, one within the other, tell of one use. Not where a call within the outer one led to the inner
    one: an agent that is a tool may call itself."""
    if inner.name != outer.name or (inner.call_id and outer.call_id and inner.call_id != outer.call_id):
        return False
    return _last(called, inner.started_ns) is None


def _before(one: CallStep, step: CallStep) -> bool:
    """True where the one's completion can be in the other's prompt."""
    return one is not step and one.call.finished_ns <= step.call.started_ns


# --- agents -----------------------------------------------------------------------------------------------------------


async def named_calls(store: LightningStore, calls: Sequence[Call]) -> list[Call]:
    """The calls, those whose request named no agent with the one that their span is within; reads spans only where there are
    some."""
    nameless = {call.rollout_id for call in calls if _is_nameless(call)}
    if not nameless:
        return list(calls)
    return name_calls(calls, await store.spans(sorted(nameless)))


def name_calls(calls: Sequence[Call], spans: Sequence[Span]) -> list[Call]:
    """`named_calls` without a store. A call whose span was never recorded, or is nobody's, stays without a name."""
    trees = {place: SpanTree(found) for place, found in by_attempt(spans).items()}
    return [_named(call, trees.get((call.rollout_id, call.attempt))) for call in calls]


def _named(call: Call, tree: SpanTree | None) -> Call:
    if tree is None or not _is_nameless(call):
        return call
    span = tree.get(call.span_id or "")
    agent = tree.agent(span) if span is not None else None
    return call if agent is None or agent.startswith(RESERVED_AGENTS) else replace(call, agent=agent)


def _is_nameless(call: Call) -> bool:
    """True where a span may name the agent: its request did not."""
    return call.span_id is not None and (call.agent is None or is_prompt_name(call.agent))
