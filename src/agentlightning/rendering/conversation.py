"""Conversation: the graph of one attempt's model calls, which makes prompts drift-free.

Driven by the gateway: `plan` finds the longest recorded path that a request continues and returns exact prompt ids (the
path's own ids, then the encoding of what is new), `record` adds the completion, `add` takes in what the store knows. Nothing
is guessed: what is new comes from the model family's own renderer or from a checked difference of two renderings, and where
the check fails the prompt is rendered afresh and the plan says why. Parallel calls and sub-agents are branches. No I/O;
knows nothing of protocols.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

from agentlightning.records import ABANDONED, JSON, TEMPLATE_KWARGS, Call, ImageSpan, prefill_of, with_completion
from agentlightning.rendering.graph import (
    DIGEST_BYTES,
    CallGraph,
    CallNode,
    Digest,
    RequestView,
    Turn,
    answer_digests,
    digest,
    external_root,
    fingerprint,
    hash_before,
    image_hashes,
    letters,
    link,
    normal,
    root,
    verbatim,
)
from agentlightning.rendering.renderer import PROBE, Renderer, RenderError
from agentlightning.runtime import json_text

ForkCause = Literal[
    "assistant_message_edited",
    "template_rewrites_history",
    "tool_result_rewritten",
    "system_or_tools_changed",
    "history_cut",
    "history_edited",
]

MAX_CANDIDATES = 16
"""Equal completions that are compared, latest first: sub-agents may all have said "done"."""

MAX_COMMON_TOKENS = 8
"""Sampled tokens of a completion that two conversations may have in common by chance."""


def diagnose(
    graph: CallGraph, roles: str, digests: list[Digest], hashes: list[Digest], known: int
) -> tuple[ForkCause | None, int]:
    """The cause, and the sampled tokens of recorded completions that the request repeats after its first `known` messages.

    (None, 0) where there is nothing to explain: the rest of the request was never sampled (examples, completions of other
    models) or belongs to another branch than the one it continues. An edited completion counts as repeated: its tokens, too,
    are context and no more. The latest recorded completion in the request leads to the recorded path that it was made from,
    and the first message in which the two differ says what happened; but where a recorded request is repeated for longer
    than that, and then has another completion, it was this one that was edited.
    """
    if "a" not in roles[known:]:
        cut = known == 0 and _drops_answer(graph, roles, hashes)
        return ("history_cut", 0) if cut else (None, 0)
    tip, at = _nearest(graph, roles, digests, known)
    path = _Path.of(tip) if tip is not None else None
    same = _common(digests, path) if path is not None else 0
    edited, answered = _edited(graph, roles, hashes, known)
    cause: ForkCause | None
    if answered is not None and (path is None or same < edited):
        path, same, cause = _Path.of(answered), edited, "assistant_message_edited"
    elif path is None or tip is None or same < known:
        return None, 0
    else:
        cause = "system_or_tools_changed" if tip.root != hashes[0] else _cause(roles, digests, path, same, at)
    if cause is None:
        return None, 0
    repeated = {one for one, role in zip(digests[known:], roles[known:], strict=True) if role == "a"}
    lost = 0
    for position, node in path.answers.items():
        in_place = position == same and cause == "assistant_message_edited"
        if position >= known and (in_place or not repeated.isdisjoint(path.digests[position])):
            lost += len(node.sampled_ids)
    return cause, lost


@dataclass(frozen=True, slots=True)
class _Path:
    """All messages of a recorded path; a completion has two digests, with and without its reasoning."""

    digests: list[tuple[Digest, ...]]
    roles: str
    answers: dict[int, CallNode]

    @classmethod
    def of(cls, tip: CallNode) -> _Path:
        """From the root to the completion of `tip`."""
        digests: list[tuple[Digest, ...]] = []
        roles: list[str] = []
        answers: dict[int, CallNode] = {}
        for node in reversed(list(tip.up())):
            digests += [(one,) for one in node.step.digests]
            roles.append(node.step.roles)
            answers[len(digests)] = node
            digests.append(node.step.answer_digests)
            roles.append("a")
        return cls(digests, "".join(roles), answers)


def _nearest(graph: CallGraph, roles: str, digests: list[Digest], known: int) -> tuple[CallNode | None, int]:
    """The node of the latest recorded completion in the request whose path shares most with it, and where it stands.

    A short completion alone is no kinship ("yes" is said often), unless it stands at the same place.
    """
    whole = set(digests)
    for at in range(len(roles) - 1, known - 1, -1):
        if roles[at] != "a":
            continue
        best, most = None, 0
        for node in reversed(graph.by_answer.get(digests[at], [])[-MAX_CANDIDATES:]):
            shared = sum(
                sum(one in whole for one in step.step.digests) + (not whole.isdisjoint(step.step.answer_digests))
                for step in node.up()
            )
            kin = shared > 1 or node.depth == at + 1 or len(node.sampled_ids) > MAX_COMMON_TOKENS
            if shared > most and kin:
                best, most = node, shared
        if best is not None:
            return best, at
    return None, 0


def _edited(graph: CallGraph, roles: str, hashes: list[Digest], known: int) -> tuple[int, CallNode | None]:
    """The last call whose request is repeated as it was, with another completion than it got, and where that stands."""
    for position in range(len(roles) - 1, known - 1, -1):
        if roles[position] == "a" and (nodes := graph.by_request.get(hashes[position])):
            return position, nodes[-1]
    return 0, None


def _drops_answer(graph: CallGraph, roles: str, hashes: list[Digest]) -> bool:
    """A request that was made before is repeated and goes on without any completion of it."""
    return bool(graph.by_request) and any(
        hashes[end] in graph.by_request and roles[:end].strip("s") for end in range(1, len(roles))
    )


def _common(digests: list[Digest], path: _Path) -> int:
    """Length of the common beginning."""
    count = 0
    for one, recorded in zip(digests, path.digests, strict=False):
        if one not in recorded:
            break
        count += 1
    return count


def _cause(roles: str, digests: list[Digest], path: _Path, same: int, at: int) -> ForkCause | None:
    """The cause at message `same`, the first that differs; message `at` of the request is the path's last one."""
    if same >= min(len(path.digests), at + 1):
        return None
    end, recorded_end = _again_alike(digests, path, same, at)
    now, before = roles[same:end], path.roles[same:recorded_end]
    if len(now) == len(before):
        if "s" in (now[0], before[0]):
            return "system_or_tools_changed"
        if before[0] == "a":
            return "assistant_message_edited"
        return "tool_result_rewritten" if before[0] == "t" else "history_edited"
    if not (now + before).strip("s"):
        return "system_or_tools_changed"
    return "history_cut" if len(now) < len(before) else "history_edited"


def _again_alike(digests: list[Digest], path: _Path, same: int, at: int) -> tuple[int, int]:
    """Ends of the different parts that begin at `same`, in the request and in the path.

    Where both have as many messages up to the completion they share, or the next ones are alike, one was changed in place.
    """
    following = same + 1
    alike = following < min(at + 1, len(path.digests)) and digests[following] in path.digests[following]
    if alike or at + 1 == len(path.digests):
        return following, following
    places: dict[Digest, int] = {}
    for position in range(len(path.digests) - 1, same - 1, -1):
        for one in path.digests[position]:
            places[one] = position
    end = next(end for end in range(same, at + 1) if digests[end] in places)  # what is at `at` is the path's last
    return end, places[digests[end]]


PARSED_BYTES = 5
"""Memory of parsed JSON for each byte of its text, roughly."""

Rendering = Callable[..., str]
"""`Renderer.render` with the tools and the template's variables of one request."""

RAW_PROMPTS = ("completions", "tokens")
"""`Call.protocol` of calls with a raw prompt in place of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """The prompt of one request."""

    prompt_ids: list[int]
    suffix_ids: list[int]
    """Ids that the parent's path does not have; the whole prompt without a parent."""
    parent: CallNode | None
    known: int = 0
    """Number of messages in the parent's history."""
    fork_cause: ForkCause | None = None
    """Cause of a fork: tokens of an earlier completion are not continued though the request contains it."""
    untrained_tokens: int = 0
    """Sampled tokens of earlier calls that the prompt repeats without continuing them: the calls on the recorded path that
    shares most with the request, below `parent`, whose completions the request has as they were (or edited, for the call
    that assistant_message_edited names). Those that a cut history has lost do not count: the prompt does not have them."""
    request_hash: Digest
    position: int
    """Number of earlier requests of the attempt with this hash: with the hash, it identifies the call."""
    root: Digest = b""
    """Hash of the tools and of the template's variables."""
    tools: list[JSON] | None = None
    template_kwargs: JSON = field(default_factory=dict)
    """Tools and variables of the template as the prompt has them."""
    step: Turn | None = None
    """Messages and digests that `record` keeps; None for a raw prompt."""
    prompt_text: str = ""
    """The prompt as text; no more than its end where the model family's own renderer made it."""
    messages: list[JSON]
    """Messages that the parent's history does not have, as the agent sent them: `Call.messages`. Of a raw prompt
    the text that follows the parent's, as one user message."""
    head: tuple[int, Digest] | None = None
    """Length and hash of `prompt_text`, where that is the whole prompt."""
    external: bool = False
    """An external model answers it."""
    prefill: JSON | None = None
    """The last message as a normal one, where the completion continues it."""
    images: tuple[ImageSpan, ...] = ()
    """Images among `suffix_ids`."""

    @property
    def prompt_images(self) -> list[ImageSpan]:
        """Images of the whole prompt, with their places in it."""
        at = len(self.prompt_ids) - len(self.suffix_ids)
        before = [] if self.parent is None or not self.prompt_ids else self.parent.prompt_images()
        return [*before, *(replace(image, start=at + image.start, end=at + image.end) for image in self.images)]


class Conversation:
    """All calls of one attempt. Without a renderer it plans calls of external models only."""

    def __init__(self, renderer: Renderer | None, calls: Iterable[Call] = ()) -> None:
        self.renderer = renderer
        self.size = 0
        """Bytes that it keeps, roughly."""
        self._nodes: dict[str, CallNode] = {}
        self._sampled = CallGraph()
        self._external = CallGraph()
        self._prompts = PromptIndex()
        self._seen: dict[Digest, int] = {}
        self._given: dict[Digest, tuple[list[JSON] | None, JSON]] = {}
        """Tools and variables of the template by their hash, as they came first: only the same text continues a prompt, and
        some clients order the keys anew in every request."""
        self.add(calls)

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._nodes

    # --- before a call ----------------------------------------------------------------------------------------------

    def plan(self, view: RequestView) -> PromptPlan:
        """The exact prompt of a request. Raises RenderError where the model's template refuses the messages."""
        if (given := self._given.get(view.hashes[0])) is not None:
            view = replace(view, tools=given[0], template_kwargs=given[1])
        known, node = self._sampled.longest_path(view.roles, view.hashes)
        cause: ForkCause | None = None
        lost = 0
        prefix: list[int] = []
        continued = None
        if node is not None:
            prefix = node.prompt_ids() + node.sampled_ids.tolist()
            continued = self._continued(node, prefix, view, known)
            if continued is None:
                cause, lost = self._why_not_continued(node, view), node.sampled_total
                prefix, known, node = [], 0, None
        renderer = self._renderer
        if continued is None:
            text = renderer.render(view.normal, view.tools, True, view.template_kwargs)
            suffix_ids, whole = renderer.encode(text), True
        else:
            suffix_ids, text, whole = continued
        images: tuple[ImageSpan, ...] = ()
        if renderer.images is not None or view.expansions:
            suffix_ids, images = renderer.expand(suffix_ids, image_hashes(view.normal[known:]), view.expansions)
        if cause is None:
            end = view.history
            cause, lost = diagnose(self._sampled, view.roles[:end], view.digests[:end], view.hashes[: end + 1], known)
        return self._message_plan(
            view,
            node,
            known,
            prompt_ids=prefix + suffix_ids,
            suffix_ids=suffix_ids,
            fork_cause=cause,
            untrained_tokens=lost,
            prompt_text=text,
            head=(len(text), fingerprint(text)) if whole else None,
            images=images,
        )

    def plan_external(self, view: RequestView) -> PromptPlan:
        """The place of a call that an external model answers: no ids, and no template has a say."""
        known, node = self._external.longest_path(view.roles, view.hashes)
        return self._message_plan(view, node, known, prompt_ids=[], suffix_ids=[], external=True)

    def plan_prompt(self, prompt: Prompt) -> PromptPlan:
        """The exact ids of a raw prompt: it continues the call whose prompt and completion it begins with, if there is one.

        A completion that the agent cut (at a stop string, for one) was not sampled so: the prompt is then encoded afresh, as
        for an edited message. The token that ended a completion stays in the prompt, whether the agent writes it or not.
        """
        renderer = self._renderer
        node = self._prompts.longest(prompt)
        prefix = [] if node is None else node.prompt_ids() + node.sampled_ids.tolist()
        if isinstance(prompt, str):
            rest = prompt if node is None else prompt.encode()[node.text.size :].decode()
            end = renderer.end_ids.get(prefix[-1], "") if prefix else ""
            suffix_ids = renderer.encode(rest.removeprefix(end), after=prefix[-1] if prefix else None)
            text = prompt
        else:
            suffix_ids = prompt[len(prefix) :]
            rest = renderer.decode(suffix_ids, special=True)
            text = renderer.decode(prompt, special=True)
        cause, lost = self._cut(prompt, node)
        request_hash = prompt_hash(prompt)
        return PromptPlan(
            prompt_ids=prefix + suffix_ids,
            suffix_ids=suffix_ids,
            parent=node,
            fork_cause=cause,
            untrained_tokens=lost,
            request_hash=request_hash,
            position=self._take(request_hash),
            prompt_text=text,
            messages=[{"role": "user", "content": rest}],
        )

    def _cut(self, prompt: Prompt, node: PromptNode | None) -> tuple[ForkCause | None, int]:
        """The fork where a prompt continues an earlier prompt with an edited part of its completion, and the tokens lost."""
        asked, rest = self._prompts.asked(prompt)
        if asked is None or asked is node or asked.parent is not node:
            return None, 0
        sampled = asked.sampled_ids.tolist()
        if isinstance(rest, str):
            kept = rest.lstrip()[:1] == self._renderer.decode(sampled).lstrip()[:1] != ""
        else:
            kept = rest[:1] == sampled[:1] != []
        return ("assistant_message_edited", len(sampled)) if kept else (None, 0)

    def withdraw(self, plan: PromptPlan) -> None:
        """The call was not answered: the next try takes its place, and so its noise."""
        if self._seen.get(plan.request_hash) == plan.position + 1:
            self._seen[plan.request_hash] = plan.position

    def history_hash(self, plan: PromptPlan, answer: JSON) -> Digest:
        """The hash of the history up to and with this completion."""
        before = plan.request_hash
        if plan.prefill is not None:
            before, answer = hash_before(before, plan.prefill), with_completion([plan.prefill], answer)[-1]
        return link(before, verbatim(answer))

    def unanswered(self, request_hash: Digest) -> list[str]:
        """The calls that recorded this request's completion and that nothing continued, newest first: the agent may never
        have got them.

        Of several samples of one request the first is named, and all must be without successor.
        """
        nodes = [*self._sampled.by_request.get(request_hash, ()), *self._external.by_request.get(request_hash, ())]
        nodes += self._prompts.by_request.get(request_hash, ())
        nodes = [node for node in nodes if node.request_hash == request_hash]
        continued = {_first(node.call_id) for node in nodes if node.children}
        newest = dict.fromkeys(_first(node.call_id) for node in reversed(nodes))
        return [call_id for call_id in newest if call_id not in continued]

    def lacks_answer(self, view: RequestView) -> bool:
        """True where the request has an assistant message that no recorded call explains: another gateway may know it.

        Explained is what lies on a recorded path, and a recorded completion to the same message in another history.
        """
        if "a" not in view.roles:
            return False
        known, _ = self._sampled.longest_path(view.roles, view.hashes)
        for at in range(len(view.roles) - 1, known - 1, -1):
            answer, before = view.digests[at], view.digests[max(0, at - 1) : at]
            if view.roles[at] != "a":
                continue
            known_as = (*self._sampled.by_answer.get(answer, ()), *self._external.by_answer.get(answer, ()))
            if not any(node.step.digests[-1:] == before for node in known_as):
                return True
        return False

    def known(self, view: RequestView) -> int:
        """Number of a request's messages that the longest recorded path has which it continues."""
        return self._sampled.longest_path(view.roles, view.hashes)[0]

    # --- after it ---------------------------------------------------------------------------------------------------

    def record(self, plan: PromptPlan, call_id: str, sampled_ids: list[int], answer: JSON) -> None:
        """Add a completion, so that later requests continue it. One plan may be recorded several times, with other ids."""
        if call_id in self._nodes:  # the store told of it first, and it was counted twice
            self._count(plan.request_hash, -1 if call_id == _first(call_id) else 0)
            return
        if plan.step is None:
            self._add_prompt(call_id, plan.parent, plan.suffix_ids, sampled_ids, plan.messages, plan.request_hash)
            return
        if plan.parent is None and not plan.external:
            self._keep_given(plan.root, plan.tools, plan.template_kwargs)
        self._add(
            CallNode(
                call_id=call_id,
                parent=plan.parent,
                suffix_ids=array("i", plan.suffix_ids),
                sampled_ids=array("i", sampled_ids),
                root=plan.root,
                step=_step(plan.step, answer, plan.external, plan.prefill),
                request_hash=plan.request_hash,
                head=plan.head,
                images=plan.images,
                prefill=plan.prefill,
            ),
            plan.external,
        )

    def add(self, calls: Iterable[Call]) -> None:
        """Take in calls from the store, parents before children; those that are known already change nothing.

        Abandoned ones are left out: the agent never read them. Of a call that is not known nothing can be continued.
        """
        for call in calls:
            parent = self._nodes.get(call.parent_id) if call.parent_id is not None else None
            missing = call.parent_id is not None and parent is None
            if call.id in self._nodes or missing or call.finish_reason == ABANDONED:
                continue
            request_hash = bytes.fromhex(call.request_hash)
            self._count(request_hash, 1 if call.id == _first(call.id) else 0)
            external = not call.policy
            if call.protocol in RAW_PROMPTS and not external:
                if self.renderer is None:  # built for external models: whoever brings a renderer builds it anew
                    continue
                self._add_prompt(call.id, parent, call.suffix_ids, call.sampled_ids, call.messages, request_hash)
                continue
            begun = None if external else prefill_of(call.messages)
            messages = call.messages if begun is None else call.messages[:-1]
            view = messages if external else [normal(message) for message in messages]
            digests = list(map(verbatim if external else digest, view))
            kwargs = call.request_fields.get(TEMPLATE_KWARGS)
            base = external_root(call.tools) if external else root(call.tools, kwargs)
            if parent is None and not external:
                self._keep_given(base, call.tools, kwargs or {})
            step = Turn(digests, letters(messages), {}, (), {} if external else _called(view))
            node = CallNode(
                call_id=call.id,
                parent=parent,
                suffix_ids=array("i", call.suffix_ids),
                sampled_ids=array("i", call.sampled_ids),
                root=base if parent is None else parent.root,
                step=_step(step, call.completion, external, begun),
                request_hash=request_hash,
                images=tuple(call.images),
                prefill=begun and normal(begun),
            )
            self._add(node, external)

    # --- how a path is continued ------------------------------------------------------------------------------------

    @property
    def _renderer(self) -> Renderer:
        if self.renderer is None:
            raise ValueError("a conversation without a renderer plans no calls of a policy")
        return self.renderer

    def _rendering(self, view: RequestView) -> Rendering:
        return partial(self._renderer.render, tools=view.tools, template_kwargs=view.template_kwargs)

    def _continued(
        self, node: CallNode, prefix: list[int], view: RequestView, known: int
    ) -> tuple[list[int], str, bool] | None:
        """The ids that follow `prefix`, all ids of the node's path, the prompt's text, and whether it is the whole text.

        None where it cannot be proven that the path is what the model's template would have made of these messages.
        """
        renderer = self._renderer
        filled = _with_answers(view.normal, node)
        begun = prefill_of(filled)
        new = filled[known:] if begun is None else filled[known:-1]
        last = node.sampled_ids[-1] if node.sampled_ids else None
        render = self._rendering(view)
        if new and not image_hashes(new) and not any(message["role"] == "assistant" for message in new):
            prompt = prefix[: len(prefix) - len(node.sampled_ids)]
            bridge = renderer.bridge(prompt, node.sampled_ids.tolist(), new, view.tools, view.template_kwargs)
            said = None if bridge is None else renderer.decode(bridge, special=True)
            if bridge is not None and said is not None and begun is None:
                return bridge, said, False
            if said is not None and renderer.encode(said, after=last) == bridge:
                before, through = (render(one, generate=True) for one in (filled[:-1], filled))
                if through.startswith(before):
                    said += through[len(before) :]
                    return renderer.encode(said, after=last), said, False
        text = render(filled, generate=True)
        suffix = self._suffix(node, filled, render, text)
        if suffix is None:
            return None
        return renderer.encode(suffix, after=last), text, True

    def _why_not_continued(self, node: CallNode, view: RequestView) -> ForkCause:
        """The template's rendering of the node's own request, made again, shows whether the template is the cause or the
        agent, by a change that no hash counts: a name, an id, space around an example."""
        history = _with_answers(view.normal, node)[: node.depth - 1]
        begun = history if node.prefill is None else [*history, node.prefill]
        try:
            own = self._rendering(view)(begun, generate=True)
        except RenderError:
            return "template_rewrites_history"
        rewritten = node.head is None or fingerprint(own) == node.head[1]
        return "template_rewrites_history" if rewritten else "history_edited"

    def _suffix(self, node: CallNode, filled: list[JSON], render: Rendering, text: str) -> str | None:
        """The text that follows the node's sampled ids in `text`; None where it cannot be proven.

        First the plain case: the rendering begins with the node's own prompt and completion, letter for letter. Else the
        template may write the completion in its own way (trimmed, tool calls re-serialised): then `text` must begin with the
        node's prompt, and what follows the completion in it must be what follows any there, template's closing first.
        """
        renderer = self._renderer
        body, end = renderer.split_end(node.sampled_ids.tolist())
        closing = renderer.closing
        if closing is None:
            return None
        try:
            start = _head_size(render, node, filled[: node.depth], text)
            if start is None:
                return None
            plain = renderer.decode(body, special=True) + closing
            if text.startswith(plain, start):
                return renderer.after_answer(end, text[start + len(plain) :], text)
            stop = _answer_end(render, filled, node.depth, text, closing)
        except RenderError:
            return None
        if stop is None or stop < start:
            return None
        reasoning = "" if node.prefill else node.step.answer.get("reasoning_content", "")
        if reasoning.strip() not in text[start:stop]:
            return None
        return renderer.after_answer(end, text[stop + len(closing) :], text)

    def _message_plan(self, view: RequestView, node: CallNode | None, known: int, **prompt: Any) -> PromptPlan:
        """The plan of a request with messages, of which the path to `node` has the first `known`."""
        end = view.history
        return PromptPlan(
            parent=node,
            known=known,
            request_hash=view.request_hash,
            position=self._take(view.request_hash),
            root=view.hashes[0],
            tools=view.tools,
            template_kwargs=view.template_kwargs,
            step=Turn(view.digests[known:end], view.roles[known:end], {}, (), _called(view.normal[known:end])),
            messages=view.messages[known:],
            prefill=view.prefill,
            **prompt,
        )

    # --- the graph --------------------------------------------------------------------------------------------------

    def _take(self, request_hash: Digest) -> int:
        position = self._seen.get(request_hash, 0)
        self._seen[request_hash] = position + 1
        return position

    def _count(self, request_hash: Digest, more: int) -> None:
        self._seen[request_hash] = self._seen.get(request_hash, 0) + more

    def _keep_given(self, root: Digest, tools: list[JSON] | None, template_kwargs: JSON) -> None:
        if (tools or template_kwargs) and root not in self._given:
            self._given[root] = tools, template_kwargs
            self.size += PARSED_BYTES * len(json_text.dumps([tools, template_kwargs]))

    def _add(self, node: CallNode, external: bool) -> None:
        self._nodes[node.call_id] = node
        (self._external if external else self._sampled).add(node)
        self.size += node.size

    def _add_prompt(
        self,
        call_id: str,
        parent: CallNode | None,
        suffix_ids: list[int],
        sampled_ids: list[int],
        messages: list[JSON],
        request_hash: Digest,
    ) -> None:
        before = parent if isinstance(parent, PromptNode) else None
        text = (before.text if before else RunningHash.empty()).plus("".join(one["content"] for one in messages))
        ids = (before.ids if before else RunningHash.empty()).plus(suffix_ids)
        body, _ = self._renderer.split_end(sampled_ids)
        node = PromptNode(
            call_id=call_id,
            parent=before,
            suffix_ids=array("i", suffix_ids),
            sampled_ids=array("i", sampled_ids),
            root=b"",
            step=Turn([], "", {}, ()),
            request_hash=request_hash,
            text=text.plus(self._renderer.decode(body)),
            ids=ids.plus(sampled_ids),
        )
        self._nodes[call_id] = node
        self._prompts.add(node, (text, ids))
        self.size += node.size


def _step(turn: Turn, answer: JSON, external: bool, begun: JSON | None) -> Turn:
    """The turn with its completion."""
    if external:
        return replace(turn, called={}, answer_digests=answer_digests(answer, verbatim))
    answer = normal(answer if begun is None else with_completion([begun], answer)[-1])
    return replace(turn, answer=answer, answer_digests=answer_digests(answer, digest))


def _called(messages: list[JSON]) -> dict[int, list[JSON]]:
    return {place: message["tool_calls"] for place, message in enumerate(messages) if "tool_calls" in message}


def _with_answers(view: list[JSON], node: CallNode) -> list[JSON]:
    """The messages with the path's own completions and tool calls: equal, but for the reasoning that an agent may have
    dropped (the model did sample it, and some templates keep it) and for the spelling of arguments."""
    filled = list(view)
    for step in node.up():
        at = step.depth - 1
        filled[at] = step.step.answer
        for place, calls in step.step.called.items():
            place += at - len(step.step.digests)
            filled[place] = {**filled[place], "tool_calls": calls}
    return filled


def _head_size(render: Rendering, node: CallNode, history: list[JSON], text: str) -> int | None:
    """Length of the rendering of the node's own request, with which `text` must begin; None where it does not."""
    if node.head is not None:
        size, expected = node.head
        return size if len(text) >= size and fingerprint(text[:size]) == expected else None
    begun = history[:-1] if node.prefill is None else [*history[:-1], node.prefill]
    before = render(begun, generate=True)
    return len(before) if text.startswith(before) else None


def _answer_end(render: Rendering, filled: list[JSON], depth: int, text: str, closing: str) -> int | None:
    """Offset in `text` at which message `depth` (from 1) ends and the template's closing begins.

    Told by the rendering that ends with the completion, if `text` begins so; else (some templates write the last completion
    in another way) by the rendering in which another completion is in its place, if both end alike after it.
    """
    through = render(filled[:depth], generate=False)
    if text.startswith(through) and through.endswith(closing):
        return len(through) - len(closing)
    other = [*filled[: depth - 1], {"role": "assistant", "content": PROBE}, *filled[depth:]]
    _, found, rest = render(other, generate=True).partition(PROBE)
    return len(text) - len(rest) if found and rest.startswith(closing) and text.endswith(rest) else None


def _first(call_id: str) -> str:
    """The id of the first of several samples of one request: others have a number after a dot."""
    return call_id.partition(".")[0]


# --- raw prompts -----------------------------------------------------------------------------------------------------


Prompt = str | list[int]

MAX_TOKEN_ID = 2**31 - 1
"""Ids are stored as 32-bit integers; no vocabulary comes near."""


@dataclass(frozen=True, slots=True)
class RunningHash:
    """A length in bytes and the hash of as many, to which more can be added."""

    size: int
    state: Any

    @classmethod
    def empty(cls) -> RunningHash:
        """The hash of nothing."""
        return cls(0, blake2b(digest_size=DIGEST_BYTES))

    def plus(self, more: Prompt | array[int]) -> RunningHash:
        """The hash of this and more."""
        data = _bytes(more)
        state = self.state.copy()
        state.update(data)
        return RunningHash(self.size + len(data), state)

    @property
    def digest(self) -> Digest:
        """The hash so far."""
        return bytes(self.state.digest())


@dataclass(slots=True, eq=False, kw_only=True)
class PromptNode(CallNode):
    """A recorded call that was made with a raw prompt."""

    text: RunningHash
    """The prompt and all that was sampled, as text, without the token that ended it."""
    ids: RunningHash


class PromptIndex:
    """Calls with raw prompts by the beginnings that they give to later prompts: as text or as ids, a length and a hash."""

    def __init__(self) -> None:
        self.by_request: dict[Digest, list[PromptNode]] = {}
        self._whole: dict[type, _Beginnings] = {str: {}, list: {}}
        self._asked: dict[type, _Beginnings] = {str: {}, list: {}}

    def add(self, node: PromptNode, asked: tuple[RunningHash, RunningHash]) -> None:
        """`asked` are text and ids of the prompt alone."""
        self.by_request.setdefault(node.request_hash, []).append(node)
        for kind, whole, alone in zip((str, list), (node.text, node.ids), asked, strict=True):
            for known, running in ((self._whole[kind], whole), (self._asked[kind], alone)):
                known.setdefault(running.size, {}).setdefault(running.digest, []).append(node)
        if node.parent is not None:
            node.parent.children += 1

    def longest(self, prompt: Prompt) -> PromptNode | None:
        """The call whose prompt and completion are the longest beginning; of equal ones the first that nothing continues."""
        found, _ = _longest(self._whole[type(prompt)], prompt)
        return next((node for node in found if node.children == 0), found[0] if found else None)

    def asked(self, prompt: Prompt) -> tuple[PromptNode | None, Prompt]:
        """The call with the longest prompt that is a beginning of this one, and what follows it there."""
        found, size = _longest(self._asked[type(prompt)], prompt)
        rest = prompt.encode()[size:].decode() if isinstance(prompt, str) else prompt[size // array("i").itemsize :]
        return found[-1] if found else None, rest


_Beginnings = dict[int, dict[Digest, list[PromptNode]]]


def _longest(known: _Beginnings, prompt: Prompt) -> tuple[list[PromptNode], int]:
    """The nodes of the longest beginning of the prompt that is known, and its length in bytes."""
    data = memoryview(_bytes(prompt))
    state = blake2b(digest_size=DIGEST_BYTES)
    found: list[PromptNode] = []
    done = length = 0
    for size in sorted(size for size in known if size <= len(data)):
        state.update(data[done:size])
        done = size
        if nodes := known[size].get(state.digest()):
            found, length = nodes, size
    return found, length


def prompt_hash(prompt: Prompt) -> Digest:
    """The hash of a request with this prompt; texts and ids differ."""
    kind = b"text:" if isinstance(prompt, str) else b"ids:"
    return blake2b(kind + _bytes(prompt), digest_size=DIGEST_BYTES).digest()


def _bytes(prompt: Prompt | array[int]) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, array):
        return prompt.tobytes()
    wrong = next((index for index in prompt if not 0 <= index <= MAX_TOKEN_ID), None)
    if wrong is not None:
        raise RenderError(f"prompt: expected token ids from 0 to {MAX_TOKEN_ID}, got {wrong}")
    return array("i", prompt).tobytes()
