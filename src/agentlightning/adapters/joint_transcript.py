"""Joint transcript: the calls of all agents of a rollout as one conversation, in the order in which they finished.

A centralised critic reads it: what any agent was told or said before a call stands before the call. Pure; needs one
vocabulary for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentlightning.training_types import ImageInput, Transition

Piece = tuple[list[int], list[ImageInput]]


def joint_transcript(transitions: Sequence[Transition], max_tokens: int) -> list[Transition]:
    """The calls as a chain, each of which continues the one before it with the tokens that no call before it showed.

    `merge` makes one row of them. Writer (O1, A1), checker (O2, A2), writer again (O1+A1+O3, A3):

        O1 A1 O2 A2 O3 A3

    Where that would be longer than `max_tokens`, a new row begins at a call, with the latest calls and observations before
    it that fill at most half of that and leave room for the call; a call whose own new tokens are longer makes a row that
    is. Grammars are left out, since no log-probability of such a row means anything.
    """
    pieces: list[Piece] = []
    shown: set[str] = set()
    chain: list[Transition] = []
    length = 0
    for call in transitions:
        new: list[Piece] = []
        for node in call.path[:-1]:
            if node.call_id not in shown:
                shown.add(node.call_id)
                new += [(node.suffix_ids, node.images), (node.sampled_ids, [])]
        new.append((call.suffix_ids, call.images))
        shown.add(call.call_id)
        own = [*new, (call.sampled_ids, [])]
        parent = chain[-1] if chain and length + _length(own) <= max_tokens else None
        before = [] if parent is not None else _latest(pieces, min(max_tokens // 2, max_tokens - _length(own)))
        length = _length(before + own) + (0 if parent is None else length)
        pieces += own
        ids, images = _joined(before + new)
        chain.append(replace(call, suffix_ids=ids, images=images, parent=parent, temperature=1.0, decoding={}))
    return chain


def _latest(pieces: Sequence[Piece], max_tokens: int) -> list[Piece]:
    """The last pieces that have no more tokens than that."""
    found: list[Piece] = []
    for piece in reversed(pieces):
        if _length([piece, *found]) > max_tokens:
            break
        found.insert(0, piece)
    return found


def _length(pieces: Sequence[Piece]) -> int:
    return sum(len(ids) for ids, _ in pieces)


def _joined(pieces: Sequence[Piece]) -> Piece:
    ids: list[int] = []
    images: list[ImageInput] = []
    for tokens, own in pieces:
        images += [replace(image, start=len(ids) + image.start, end=len(ids) + image.end) for image in own]
        ids += tokens
    return ids, images
