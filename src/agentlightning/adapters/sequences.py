"""Trajectories to sequences: the rows that an engine trains on, merged where one call's prompt continues another.

LightningRL drives it after credit and advantage. It knows nothing of rewards: an advantage and a weight per transition
are given, and merging changes how often a token is *read*, never how often or how strongly it is *trained*.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from agentlightning.types import Sequence, Trajectory, Transition

Aggregation = Literal["token_mean", "sequence_mean", "rollout_mean"]


def merge(rollout_id: str, transitions: Seq[Transition], advantages: Seq[float], weights: Seq[float]) -> list[Sequence]:
    """Sequences in which a transition follows the earlier one whose prompt and answer its own prompt begins with.

    `advantages` and `weights` hold one number per transition: each of its sampled tokens gets both. Of transitions with
    observations O and answers A (an answer's tokens are trained, marked with a star; all others are context):

        (O1, A1), (O1+A1+O2, A2), (O3, A3)        ->  O1 A1* O2 A2*   and   O3 A3*

    In a tree of calls the first branch continues the row; each further one becomes a row of its own, in which the
    shared answer is context, so that every sampled token is trained exactly once:

        (O1, A1), (O1+A1+O2, A2), (O1+A1+O3, A3)  ->  O1 A1* O2 A2*   and   O1 A1 O3 A3*

    Transitions of different temperatures never share a row. Costs O(tokens of all prompts) for a conversation.
    """
    rows: list[Sequence] = []
    for transition, advantage, weight in zip(transitions, advantages, weights, strict=True):
        row = _longest_beginning(transition, rows)
        if row is None:
            row = _empty_row(rollout_id, transition)
            rows.append(row)
        _append(row, transition, advantage, weight)
    return rows


def unmerged(
    rollout_id: str, transitions: Seq[Transition], advantages: Seq[float], weights: Seq[float]
) -> list[Sequence]:
    """One row a call: (O1, A1), (O1+A1+O2, A2) -> O1 A1* and O1 A1 O2 A2*. Trains the same tokens with the same weights."""
    rows = []
    for transition, advantage, weight in zip(transitions, advantages, weights, strict=True):
        row = _empty_row(rollout_id, transition)
        _append(row, transition, advantage, weight)
        rows.append(row)
    return rows


def token_weights(trajectories: Seq[Trajectory], aggregation: Aggregation) -> list[list[float]]:
    """The weight of each sampled token, one number per trajectory and transition; over a minibatch they sum to 1.

    They come from the original transitions, so that a merged row and its unmerged rows give the same loss:

        token_mean      1 / (sampled tokens of the minibatch)
        sequence_mean   1 / (transitions of the minibatch × tokens of this transition)
        rollout_mean    1 / (rollouts of the minibatch × tokens of this rollout)
    """
    lengths = [[len(transition.sampled_ids) for transition in trajectory.transitions] for trajectory in trajectories]
    if aggregation == "token_mean":
        total = sum(map(sum, lengths))
        return [[1.0 / total] * len(rollout) for rollout in lengths]
    if aggregation == "sequence_mean":
        count = sum(map(len, lengths))
        return [[1.0 / (count * length) for length in rollout] for rollout in lengths]
    return [[1.0 / (len(lengths) * sum(rollout))] * len(rollout) for rollout in lengths]


def _longest_beginning(transition: Transition, rows: list[Sequence]) -> Sequence | None:
    """The longest row that the prompt begins with, as a whole."""
    prompt = transition.prompt_ids
    best: Sequence | None = None
    for row in rows:
        length = len(row.tokens)
        if (
            length <= len(prompt)
            and row.temperature == transition.temperature
            and (best is None or length > len(best.tokens))
            and prompt[length - 1] == row.tokens[-1]  # turns most rows away without comparing them whole
            and prompt[:length] == row.tokens
        ):
            best = row
    return best


def _empty_row(rollout_id: str, transition: Transition) -> Sequence:
    return Sequence(
        rollout_id=rollout_id,
        tokens=[],
        mask=[],
        logprobs=[],
        advantages=[],
        weights=[],
        segments=[],
        temperature=transition.temperature,
    )


def _append(row: Sequence, transition: Transition, advantage: float, weight: float) -> None:
    """What the row lacks of the transition's prompt, as context, then its answer, trained."""
    context = transition.prompt_ids[len(row.tokens) :]
    answer = transition.sampled_ids
    start = len(row.tokens) + len(context)
    nothing = [0.0] * len(context)
    row.tokens.extend(context + answer)
    row.mask.extend([False] * len(context) + [True] * len(answer))
    row.logprobs.extend(nothing + transition.logprobs)
    row.advantages.extend(nothing + [advantage] * len(answer))
    row.weights.extend(nothing + [weight] * len(answer))
    row.segments.append((start, start + len(answer)))
