"""Micro-batches: which sequences are computed together, and where in the model's output each token's state is.

The learner drives it. Two ways give the same numbers: rows padded to equal length, and prefix trees. Refuses to know losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentlightning.engines.local import tree
from agentlightning.engines.local.options import LearnerOptions
from agentlightning.training_types import TrainingSequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that are computed together."""

    sequences: list[TrainingSequence]
    tokens_BT: Tensor
    places: list[Sequence[int]]
    """Flat index in [B, T] of each token of each sequence."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward."""

    def pick(self, where: Sequence[tuple[int, int]]) -> Tensor:
        """Flat indices in [B, T] of (sequence, position)."""
        found = [self.places[row][at] for row, at in where]
        return torch.tensor(found, dtype=torch.int64, device=self.tokens_BT.device)


def batches(sequences: Sequence[TrainingSequence], options: LearnerOptions, device: str) -> Iterator[Batch]:
    """Sequences of at most max_tokens_per_microbatch at a time: padded ones, sorted by length, or the tokens of a tree."""
    budget = options.max_tokens_per_microbatch
    if options.packing == "padded":
        for group in _by_length(sequences, budget):
            yield _padded(group, device)
        return
    ids = [sequence.tokens for sequence in sequences]
    for part in tree.packs(ids, budget):
        yield _shared([sequences[i] for i in part], device)


def _by_length(sequences: Sequence[TrainingSequence], budget: int) -> Iterator[list[TrainingSequence]]:
    group: list[TrainingSequence] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens)):
        if group and (len(group) + 1) * len(sequence.tokens) > budget:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _padded(group: list[TrainingSequence], device: str) -> Batch:
    """Padded on the right: with causal attention no mask is needed."""
    width = max(len(s.tokens) for s in group)
    tokens_BT = torch.tensor([s.tokens + [0] * (width - len(s.tokens)) for s in group], device=device)
    return Batch(group, tokens_BT, [range(row * width, row * width + width) for row in range(len(group))])


def _shared(group: list[TrainingSequence], device: str) -> Batch:
    built = tree.build([s.tokens for s in group])
    inputs = {
        "position_ids": torch.tensor([built.positions], device=device),
        "tree": tree.TreeMask(built, device),
    }
    return Batch(group, torch.tensor([built.tokens], device=device), list(built.paths), inputs)
