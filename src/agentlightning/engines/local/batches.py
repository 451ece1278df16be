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
from agentlightning.errors import EngineError
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


def batches(
    sequences: Sequence[TrainingSequence], options: LearnerOptions, device: str, *, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Sequences of at most max_tokens_per_microbatch at a time: padded ones, sorted by length, or the tokens of a tree.

    Those of one rank's share; every rank gets as many, and where its own are fewer, the last are without sequences.
    """
    shares = [list(_groups(share, options)) for share in _shares(sequences, options.packing, ranks)]
    for turn in range(max(len(groups) for groups in shares)):
        group = shares[rank][turn] if turn < len(shares[rank]) else []
        yield _shared(group, device) if group and options.packing == "prefix_tree" else _padded(group, device)


def _shares(sequences: Sequence[TrainingSequence], packing: str, ranks: int) -> list[list[TrainingSequence]]:
    """Every rank's share, of about as much work: dealt by length, or cut so that what begins alike stays together."""
    if packing == "padded":
        dealt = sorted(sequences, key=lambda s: len(s.tokens))
        return [dealt[rank::ranks] for rank in range(ranks)]
    shares: list[list[TrainingSequence]] = [[] for _ in range(ranks)]
    before, total = 0, sum(len(s.tokens) for s in sequences)
    for sequence in sorted(sequences, key=lambda s: s.tokens):
        shares[before * ranks // total].append(sequence)
        before += len(sequence.tokens)
    return shares


def _groups(sequences: Sequence[TrainingSequence], options: LearnerOptions) -> Iterator[list[TrainingSequence]]:
    budget = options.max_tokens_per_microbatch
    if options.packing == "padded":
        yield from _by_length(sequences, budget)
        return
    for part in tree.packs([sequence.tokens for sequence in sequences], budget):
        yield [sequences[i] for i in part]


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
    """Padded on the right: with causal attention no mask is needed. Without sequences one token, which nobody reads."""
    width = max((len(s.tokens) for s in group), default=1)
    rows = [s.tokens + [0] * (width - len(s.tokens)) for s in group] or [[0]]
    tokens_BT = torch.tensor(rows, device=device)
    return Batch(group, tokens_BT, [range(row * width, row * width + width) for row in range(len(group))])


def _shared(group: list[TrainingSequence], device: str) -> Batch:
    built = tree.build([s.tokens for s in group])
    inputs = {
        "position_ids": torch.tensor([built.positions], device=device),
        "tree": tree.TreeMask(built, device),
    }
    return Batch(group, torch.tensor([built.tokens], device=device), list(built.paths), inputs)


def check_sequences(sequences: Sequence[TrainingSequence], config: Any) -> None:
    """EngineError, naming the rollout, where a model of this text configuration cannot compute a sequence."""
    longest = getattr(config, "max_position_embeddings", None)
    for sequence in sequences:
        if not sequence.tokens or (longest and len(sequence.tokens) > longest):
            raise EngineError(
                f"a sequence of rollout {sequence.rollout_id} has {len(sequence.tokens)} tokens; expected 1 to {longest}"
            )
        if sequence.mask[0]:
            raise EngineError(
                f"the first token of rollout {sequence.rollout_id} is masked as sampled; nothing precedes it"
            )
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < config.vocab_size:
            raise EngineError(
                f"a sequence of rollout {sequence.rollout_id} holds ids from {min(sequence.tokens)} to "
                f"{max(sequence.tokens)}; the model's vocabulary has ids 0 to {config.vocab_size - 1}"
            )
