"""CallGraph: the recorded calls of one attempt, each held once, and what finds them again.

Driven by the conversation. A call is a node under the call that its prompt continues; parallel calls and sub-agents are
branches. Nodes keep token ids, hashes and the answer, never whole histories. Knows nothing of templates or of text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentlightning.rendering.message import Digest, link
from agentlightning.types import JSON

NODE_BYTES = 2600
"""Memory of a node and its index entries beside ids, text and digests; measured."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages of one call that its parent's history does not have, and its answer."""

    digests: list[Digest]
    roles: str
    """First letters of the roles of these messages."""
    answer: JSON
    """The answer as a normal message."""
    answer_digests: tuple[Digest, ...]
    """Digests with and without its reasoning, which most agents drop when they send it back."""


@dataclass(slots=True, eq=False)
class CallNode:
    """A recorded call."""

    call_id: str
    parent: CallNode | None
    suffix_ids: array[int]
    sampled_ids: array[int]
    root: Digest
    """Hash of the tools."""
    step: Turn
    request_hash: Digest
    head: tuple[int, Digest] | None = None
    """Length and hash of the template's rendering of the request; None where the call was read from the store."""
    children: int = 0
    depth: int = field(init=False)
    """Messages up to and with the answer."""
    sampled_total: int = field(init=False)
    """Sampled tokens of the whole path."""

    def __post_init__(self) -> None:
        before = self.parent
        self.depth = (before.depth if before else 0) + len(self.step.digests) + 1
        self.sampled_total = (before.sampled_total if before else 0) + len(self.sampled_ids)

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

    @property
    def size(self) -> int:
        """Bytes that the node keeps, roughly."""
        ids = self.suffix_ids.itemsize * (len(self.suffix_ids) + len(self.sampled_ids))
        return NODE_BYTES + ids + 64 * len(self.step.digests) + _text_bytes(self.step.answer)


class CallGraph:
    """Nodes by what a later request shows of them."""

    def __init__(self) -> None:
        self.by_history: dict[Digest, list[CallNode]] = {}
        """Nodes by tools and all messages including the completion."""
        self.by_request: dict[Digest, list[CallNode]] = {}
        """Nodes by tools and all messages before the completion."""
        self.by_answer: dict[Digest, list[CallNode]] = {}
        """Nodes by the completion alone."""

    def add(self, node: CallNode) -> None:
        """Let later requests find the node."""
        self.by_request.setdefault(node.request_hash, []).append(node)
        for one in set(node.step.answer_digests):
            self.by_history.setdefault(link(node.request_hash, one), []).append(node)
            self.by_answer.setdefault(one, []).append(node)
        if node.parent is not None:
            node.parent.children += 1

    def longest_path(self, roles: str, hashes: list[Digest]) -> tuple[int, CallNode | None]:
        """The deepest node whose whole history the request repeats, and how many messages that is.

        Of equal ones the first that nothing continues: equal answers to parallel calls are continued apart.
        """
        for known in range(len(roles), 0, -1):
            if roles[known - 1] == "a" and (nodes := self.by_history.get(hashes[known])):
                return known, next((node for node in nodes if node.children == 0), nodes[0])
        return 0, None


def _text_bytes(value: object) -> int:
    """Bytes of the texts in a message; its structure is counted by the piece."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(_text_bytes(one) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return 32 + sum(map(_text_bytes, value))
    return 8
