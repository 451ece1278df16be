"""Diagnosis of forks: a request that does not continue a sampled completion, compared with the nearest recorded path.

Driven by the conversation where a request repeats more than it continues. It compares digests only, so it knows what was
changed (a completion, a tool result, the tools, …) and nothing of texts, templates or tokens. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentlightning.rendering.graph import CallGraph, CallNode, Digest

ForkCause = Literal[
    "assistant_message_edited",
    "template_rewrites_history",
    "tool_result_rewritten",
    "system_or_tools_changed",
    "history_cut",
    "history_edited",
    "context_cleared",
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
    return any(hashes[end] in graph.by_request and roles[:end].strip("s") for end in range(1, len(roles)))


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
