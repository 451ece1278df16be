"""PromptIndex: the recorded calls of one attempt that were made with raw prompts (Completions), found by how a prompt
begins.

Driven by the conversation. A prompt continues a call if it begins with that call's prompt and completion, as text or as
ids. Each is kept as a length and a hash: one pass over a prompt finds all that it begins with. Knows nothing of messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agentlightning.rendering.graph import DIGEST_BYTES, CallNode, Digest
from agentlightning.rendering.renderer import RenderError

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
    """Calls by the beginnings that they give to later prompts."""

    def __init__(self) -> None:
        self.by_request: dict[Digest, list[PromptNode]] = {}
        self._whole: dict[type, _Beginnings] = {str: _Beginnings(), list: _Beginnings()}
        self._asked: dict[type, _Beginnings] = {str: _Beginnings(), list: _Beginnings()}

    def add(self, node: PromptNode, asked: tuple[RunningHash, RunningHash]) -> None:
        """`asked` are text and ids of the prompt alone."""
        self.by_request.setdefault(node.request_hash, []).append(node)
        for kind, whole, alone in zip((str, list), (node.text, node.ids), asked, strict=True):
            self._whole[kind].add(whole, node)
            self._asked[kind].add(alone, node)
        if node.parent is not None:
            node.parent.children += 1

    def longest(self, prompt: Prompt) -> PromptNode | None:
        """The call whose prompt and completion are the longest beginning; of equal ones the first that nothing continues."""
        found = [nodes for nodes, _ in self._whole[type(prompt)].of(prompt)]
        nodes = found[-1] if found else []
        return next((node for node in nodes if node.children == 0), nodes[0] if nodes else None)

    def asked(self, prompt: Prompt) -> tuple[PromptNode | None, Prompt]:
        """The call with the longest prompt that is a beginning of this one, and what follows it there."""
        node: PromptNode | None = None
        size = 0
        for nodes, length in self._asked[type(prompt)].of(prompt):
            node, size = nodes[-1], length
        if isinstance(prompt, str):
            return node, prompt.encode()[size:].decode()
        return node, prompt[size // array("i").itemsize :]


class _Beginnings:
    def __init__(self) -> None:
        self._nodes: dict[int, dict[Digest, list[PromptNode]]] = {}

    def add(self, running: RunningHash, node: PromptNode) -> None:
        self._nodes.setdefault(running.size, {}).setdefault(running.digest, []).append(node)

    def of(self, prompt: Prompt) -> Iterator[tuple[list[PromptNode], int]]:
        """Nodes with a beginning of the prompt and its length in bytes, shorter ones first."""
        data = memoryview(_bytes(prompt))
        state = blake2b(digest_size=DIGEST_BYTES)
        done = 0
        for size in sorted(size for size in self._nodes if size <= len(data)):
            state.update(data[done:size])
            done = size
            if nodes := self._nodes[size].get(state.digest()):
                yield nodes, size


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
