"""Conversation: the graph of one attempt's model calls, which makes prompts drift-free.

Driven by the gateway: `plan` finds the longest recorded path that a request continues and returns exact prompt ids (the
path's own ids, then the encoding of what is new), `record` adds the answer, `restore` rebuilds the graph from the store.
Nothing is guessed: what is new comes from a checked difference of two renderings, and where the check fails the prompt is
rendered afresh and the plan says why. Parallel calls and sub-agents are branches. No I/O; knows nothing of protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentlightning.rendering.message import Digest, chain, digest, link, normal, root
from agentlightning.rendering.renderer import Renderer, RenderError
from agentlightning.types import JSON, Call

ForkCause = Literal[
    "assistant_message_edited",
    "template_rewrites_history",
    "tools_changed",
    "history_cut",
    "history_edited",
]


@dataclass(slots=True, eq=False)
class Node:
    """A recorded call."""

    call_id: str
    parent: Node | None
    suffix_ids: list[int]
    sampled_ids: list[int]
    digests: list[Digest]
    """Of the messages that the parent's history did not have."""
    answer: JSON
    """The answer as a normal message."""
    answer_digests: tuple[Digest, Digest]
    """With and without its reasoning, which most agents drop when they send it back."""
    request_hash: Digest
    depth: int
    """Messages up to and with the answer."""
    prompt_text: str | None = None
    """The template's rendering of the request; dropped once a child has it, so that text is not kept T times."""
    children: int = 0

    def ids(self) -> list[int]:
        """Prompt and sampled ids of the whole path."""
        parts: list[list[int]] = []
        node: Node | None = self
        while node is not None:
            parts += (node.sampled_ids, node.suffix_ids)
            node = node.parent
        return [index for part in reversed(parts) for index in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The prompt of one request."""

    prompt_ids: list[int]
    suffix_ids: list[int]
    """What the parent's path does not have; the whole prompt without a parent."""
    parent: Node | None
    known: int
    """How many messages the parent's history has."""
    fork_cause: ForkCause | None
    """Why tokens of an earlier answer are not continued though the request contains it."""
    request_hash: Digest
    position: int
    """How many requests with this hash came before in the attempt: with the hash, it names the call."""
    digests: list[Digest]
    prompt_text: str


class Conversation:
    """All calls of one attempt."""

    def __init__(self, renderer: Renderer, calls: Sequence[Call] = ()) -> None:
        self.renderer = renderer
        self._nodes: dict[str, Node] = {}
        self._by_history: dict[Digest, list[Node]] = {}
        self._by_request: dict[Digest, list[Node]] = {}
        self._seen: dict[Digest, int] = {}
        for call in calls:
            self._restore(call)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._nodes

    def plan(self, messages: list[JSON], tools: list[JSON] | None) -> Plan:
        """The exact prompt of a request. Raises RenderError where the model's template refuses the messages."""
        view = [normal(message) for message in messages]
        digests = [digest(message) for message in view]
        hashes = chain(root(tools), digests)
        known, node = self._longest_path(view, hashes)
        cause: ForkCause | None = None
        suffix: str | None = None
        text = ""
        if node is not None:
            _fill_reasoning(view, node)
            text = self.renderer.render(view, tools, generate=True)
            suffix = self._suffix(node, view[:known], tools, text)
            if suffix is None:
                known, node, cause = 0, None, "template_rewrites_history"
        if suffix is None:
            view = [normal(message) for message in messages]
            text = suffix = self.renderer.render(view, tools, generate=True)
        if cause is None and self._nodes and any(message["role"] == "assistant" for message in view[known:]):
            cause = self._diagnose(view, digests, known)
        last = node.sampled_ids[-1] if node is not None and node.sampled_ids else None
        suffix_ids = self.renderer.encode(suffix, after=last)
        request_hash = hashes[-1]
        position = self._seen.get(request_hash, 0)
        self._seen[request_hash] = position + 1
        return Plan(
            prompt_ids=suffix_ids if node is None else node.ids() + suffix_ids,
            suffix_ids=suffix_ids,
            parent=node,
            known=known,
            fork_cause=cause,
            request_hash=request_hash,
            position=position,
            digests=digests,
            prompt_text=text,
        )

    def history_hash(self, plan: Plan, answer: JSON) -> Digest:
        """The hash of the history up to and with this answer."""
        return link(plan.request_hash, digest(normal(answer)))

    def record(self, plan: Plan, call_id: str, sampled_ids: list[int], answer: JSON) -> None:
        """Add an answer, so that later requests continue it."""
        if plan.parent is not None:
            plan.parent.prompt_text = None
        self._add(
            Node(
                call_id=call_id,
                parent=plan.parent,
                suffix_ids=plan.suffix_ids,
                sampled_ids=sampled_ids,
                digests=plan.digests[plan.known :],
                answer=normal(answer),
                answer_digests=_answer_digests(answer),
                request_hash=plan.request_hash,
                depth=len(plan.digests) + 1,
                prompt_text=plan.prompt_text,
            )
        )

    def withdraw(self, plan: Plan) -> None:
        """The call was not answered: the next try takes its place, and so its noise."""
        if self._seen.get(plan.request_hash) == plan.position + 1:
            self._seen[plan.request_hash] = plan.position

    def unanswered(self, request_hash: Digest) -> str | None:
        """The call that recorded this request's answer, if nothing continued it: the agent may never have got it."""
        for node in reversed(self._by_request.get(request_hash, [])):
            if node.children == 0:
                return node.call_id
        return None

    def request_hash(self, messages: list[JSON], tools: list[JSON] | None) -> Digest:
        """The hash that `plan` would give this request, without counting it."""
        return chain(root(tools), [digest(normal(message)) for message in messages])[-1]

    # --- the graph --------------------------------------------------------------------------------------------------

    def _restore(self, call: Call) -> None:
        parent = self._nodes.get(call.parent_id) if call.parent_id is not None else None
        if call.parent_id is not None and parent is None:
            return  # of a call that is not recorded nothing can be continued
        request_hash = bytes.fromhex(call.request_hash)
        self._seen[request_hash] = self._seen.get(request_hash, 0) + 1
        self._add(
            Node(
                call_id=call.id,
                parent=parent,
                suffix_ids=call.suffix_ids,
                sampled_ids=call.sampled_ids,
                digests=[digest(normal(message)) for message in call.messages],
                answer=normal(call.answer),
                answer_digests=_answer_digests(call.answer),
                request_hash=request_hash,
                depth=(parent.depth if parent else 0) + len(call.messages) + 1,
            )
        )

    def _add(self, node: Node) -> None:
        self._nodes[node.call_id] = node
        self._by_request.setdefault(node.request_hash, []).append(node)
        for one in set(node.answer_digests):
            self._by_history.setdefault(link(node.request_hash, one), []).append(node)
        if node.parent is not None:
            node.parent.children += 1

    def _longest_path(self, view: list[JSON], hashes: list[Digest]) -> tuple[int, Node | None]:
        for known in range(len(view), 0, -1):
            if view[known - 1]["role"] == "assistant" and (nodes := self._by_history.get(hashes[known])):
                fresh = [node for node in nodes if node.children == 0]
                return known, (fresh or nodes)[0]
        return 0, None

    def _suffix(self, node: Node, history: list[JSON], tools: list[JSON] | None, text: str) -> str | None:
        """The text that follows the node's sampled ids in `text`; None where it cannot be proven.

        First the plain case: the rendering begins with the node's own prompt and answer, letter for letter. Else the
        template may write the answer in its own way (trimmed, tool calls re-serialised): then the rendering up to the
        answer must begin with the node's prompt, end with the template's closing, and begin the new rendering.
        """
        renderer = self.renderer
        body, end = renderer.split_end(node.sampled_ids)
        closing = renderer.closing
        if closing is None:
            return None
        if node.prompt_text is not None:
            head = node.prompt_text + renderer.decode(body, special=True) + closing
            if text.startswith(head):
                return renderer.after_answer(end, text[len(head) :], text)
        try:
            before = node.prompt_text or renderer.render(history[:-1], tools, generate=True)
            through = renderer.render(history, tools, generate=False)
        except RenderError:
            return None
        if not (text.startswith(through) and through.startswith(before) and through.endswith(closing)):
            return None
        answer = through[len(before) : len(through) - len(closing)]
        if len(through) < len(before) + len(closing) or node.answer.get("reasoning_content", "").strip() not in answer:
            return None
        return renderer.after_answer(end, text[len(through) :], text)

    # --- why a prompt does not continue ------------------------------------------------------------------------------

    def _diagnose(self, view: list[JSON], digests: list[Digest], known: int) -> ForkCause | None:
        """Compares the request with the recorded path that shares most with it."""
        shared, path = 0, list[frozenset[Digest]]()
        answers: set[int] = set()
        for node in self._nodes.values():
            if node.children:
                continue
            one, positions = _path(node)
            count = next((i for i, (a, b) in enumerate(zip(digests, one, strict=False)) if a not in b), None)
            count = min(len(digests), len(one)) if count is None else count
            if count >= shared:
                shared, path, answers = count, one, positions
        if any(known <= position < shared for position in answers):
            return "tools_changed"
        if shared in answers and shared < len(view) and view[shared]["role"] == "assistant":
            return "assistant_message_edited"
        later = digests[max(shared, known) :]
        recorded_answers = set().union(*(path[position] for position in answers))
        if not any(one in recorded_answers for one in later):
            return None  # a conversation of its own, with answers in it that were never sampled
        remaining = path[shared + 1 :]
        if later and any(later[0] in one for one in remaining):
            return "history_cut"
        return "history_edited"


def _path(node: Node) -> tuple[list[frozenset[Digest]], set[int]]:
    """Digests of all messages of a path (an answer has two), and the positions of its answers."""
    nodes: list[Node] = []
    step: Node | None = node
    while step is not None:
        nodes.append(step)
        step = step.parent
    digests: list[frozenset[Digest]] = []
    answers: set[int] = set()
    for step in reversed(nodes):
        digests += [frozenset((one,)) for one in step.digests]
        answers.add(len(digests))
        digests.append(frozenset(step.answer_digests))
    return digests, answers


def _fill_reasoning(view: list[JSON], node: Node) -> None:
    """Give back the reasoning that the agent dropped: the model did sample it, and some templates keep it."""
    step: Node | None = node
    while step is not None:
        if "reasoning_content" in step.answer:
            view[step.depth - 1] = step.answer
        step = step.parent


def _answer_digests(answer: JSON) -> tuple[Digest, Digest]:
    full = normal(answer)
    bare = {key: value for key, value in full.items() if key != "reasoning_content"}
    return digest(full), digest(bare)
