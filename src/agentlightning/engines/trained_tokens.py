"""The loss's inputs for the trained tokens of sequences, as tensors. Learners drive it; requires torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentlightning.engines.corrections import Tokens
from agentlightning.errors import EngineError
from agentlightning.training_types import TokenNumbers, TrainingSequence


def known_tokens(batch: Sequence[TrainingSequence], device: str, *, calls: bool) -> Tokens:
    """Gathers the fields of the trained tokens, sequence by sequence; with `calls`, to which call each belongs."""

    def column(name: str, fallback: str | None = None) -> Tensor:
        values: list[float] = []
        for sequence in batch:
            listed = getattr(sequence, name)
            if listed is None:
                listed = getattr(sequence, fallback or name)
            values += [value for value, sampled in zip(listed, sequence.mask, strict=True) if sampled]
        return torch.tensor(values, dtype=torch.float32, device=device)

    def optional(name: str, fallback: str | None = None) -> Tensor | None:
        given = [getattr(sequence, name) is not None for sequence in batch]
        if not any(given):
            return None
        if not all(given) and fallback is None:
            missing = batch[given.index(False)]
            raise EngineError(f"a sequence of rollout {missing.rollout_id} has no {name}, while others have them")
        return column(name, fallback)

    return Tokens(
        column("logprobs"),
        column("advantages"),
        column("weights"),
        old_logprobs=optional("old_logprobs"),
        ref_logprobs=optional("ref_logprobs"),
        kl_weights=optional("kl_weights", "weights"),
        entropy_weights=optional("entropy_weights", "weights"),
        returns=optional("returns"),
        values=optional("values"),
        calls=_calls(batch, device) if calls else None,
    )


def _calls(batch: Sequence[TrainingSequence], device: str) -> Tensor:
    """The call of each trained token, counted over the batch."""
    found: list[int] = []
    count = 0
    for sequence in batch:
        owner = [-1] * len(sequence.tokens)
        for start, end in sequence.segments:
            owner[start:end] = [count] * (end - start)
            count += 1
        called = [call for call, sampled in zip(owner, sequence.mask, strict=True) if sampled]
        if -1 in called:
            raise EngineError(f"a trained token of rollout {sequence.rollout_id} is in no segment")
        found += called
    return torch.tensor(found, dtype=torch.int64, device=device)


def over_all_tokens(mask: Sequence[bool], ratios: Sequence[float], entropies: Sequence[float]) -> TokenNumbers:
    """The numbers of masked tokens at their places, and 1 and 0 at the others."""
    ratio, entropy = iter(ratios), iter(entropies)
    return TokenNumbers(
        [next(ratio) if trained else 1.0 for trained in mask], [next(entropy) if trained else 0.0 for trained in mask]
    )
