"""Sequences to train on, from literals."""

from __future__ import annotations

from typing import Any

from agentlightning.training_types import TrainingSequence


def sequence(tokens: list[int], sampled: list[tuple[int, int]], **changes: Any) -> TrainingSequence:
    """A training sequence whose sampled tokens are the given [start, end) ranges."""
    mask = [any(start <= i < end for start, end in sampled) for i in range(len(tokens))]
    settings: dict[str, Any] = {
        "rollout_id": "r",
        "tokens": tokens,
        "mask": mask,
        "logprobs": [-1.0 if m else 0.0 for m in mask],
        "advantages": [1.0 if m else 0.0 for m in mask],
        "weights": [1.0 if m else 0.0 for m in mask],
        "segments": sampled,
    }
    return TrainingSequence(**{**settings, **changes})
