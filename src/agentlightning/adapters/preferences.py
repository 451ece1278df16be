"""Trajectories to rows of whole completions, for losses that compare completions, not tokens. Pure.

The offline trainer drives it. A completion is all that the model wrote in one rollout; where its calls continue each other
it is one row, in which everything else is context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentlightning.adapters.sequences import merge
from agentlightning.training_types import ImageInput, TrainingSequence, Trajectory


def completion_rows(trajectory: Trajectory, weights: Sequence[float] | None = None) -> list[TrainingSequence]:
    """The rows of one rollout, whose trained tokens are what the model wrote.

    weights: of each transition's tokens; None: 0. Rows are computed at temperature 1, whatever they were sampled at: the
    loss is about the model, not about its sampling.
    """
    plain = [replace(transition, temperature=1.0) for transition in trajectory.transitions]
    nothing = [0.0] * len(plain)
    given = nothing if weights is None else weights
    return merge(trajectory.rollout_id, plain, nothing, given)


def mismatched_rows(completions: Sequence[Sequence[TrainingSequence]], longest: int) -> list[TrainingSequence]:
    """Each completion beside another task's opening: what precedes its first call is that of the one before it.

    Ethayarajh et al. (2024), KTO, section 4.1: another example's y beside this x, from which the baseline is estimated. Of
    the completions before it (the last one comes before the first), the nearest that opens otherwise counts; where all open
    alike there is none. A completion of several rows gives one estimate for each. Rows of more than `longest` tokens are
    left out. Stars mark trained tokens:

        (Q1 a* x b*), (Q2 c*)   ->   (Q2 a* x b*), (Q1 c*)
    """
    openings = [_opening(rows[0]) for rows in completions]
    found = []
    for place, rows in enumerate(completions):
        before = [openings[(place - back) % len(completions)] for back in range(1, len(completions))]
        other = next((opening for opening in before if opening != openings[place]), None)
        if other is not None:
            found += [
                _beside(row, other) for row in rows if len(row.tokens) - row.segments[0][0] + len(other[0]) <= longest
            ]
    return found


def _opening(row: TrainingSequence) -> tuple[list[int], list[ImageInput]]:
    """Return what precedes the first trained token: tokens, and the images among them."""
    start = row.segments[0][0]
    return row.tokens[:start], [image for image in row.images if image.end <= start]


def _beside(row: TrainingSequence, other: tuple[list[int], list[ImageInput]]) -> TrainingSequence:
    opening, images = other
    start = row.segments[0][0]
    nothing = [0.0] * len(opening)
    moved = len(opening) - start
    later = [image for image in row.images if image.start >= start]
    return replace(
        row,
        tokens=opening + row.tokens[start:],
        images=images + [replace(image, start=image.start + moved, end=image.end + moved) for image in later],
        mask=[False] * len(opening) + row.mask[start:],
        logprobs=nothing + row.logprobs[start:],
        advantages=nothing + row.advantages[start:],
        weights=nothing + row.weights[start:],
        segments=[(first + moved, end + moved) for first, end in row.segments],
        ref_logprobs=None,
    )
