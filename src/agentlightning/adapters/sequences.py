"""Trajectories to sequences: the rows that an engine trains on, merged where one call's prompt continues another.

LightningRL drives it after credit and advantage. It knows nothing of rewards: advantages and weights are given, by
transition or by token, and merging changes how often a token is *read*, never how often or how strongly it is *trained*.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any, Literal

from agentlightning.types import Sequence, Trajectory, Transition

Aggregation = Literal["token_mean", "sequence_mean", "rollout_mean", "fixed_length"]
PerToken = float | Seq[float]
"""Of one transition: a number for all its sampled tokens, or one for each."""
NOTHING: Mapping[str, Seq[PerToken]] = MappingProxyType({})


def merge(
    rollout_id: str,
    transitions: Seq[Transition],
    advantages: Seq[PerToken],
    weights: Seq[PerToken],
    others: Mapping[str, Seq[PerToken]] = NOTHING,
) -> list[Sequence]:
    """Sequences in which a transition follows the earlier one whose prompt and answer its own prompt begins with.

    `advantages` and `weights` hold one entry per transition, for its sampled tokens; `others` the same for optional fields
    of `Sequence`, such as kl_weights. Of transitions with observations O and answers A (an answer's tokens are trained,
    marked with a star; all others are context):

        (O1, A1), (O1+A1+O2, A2), (O3, A3)        ->  O1 A1* O2 A2*   and   O3 A3*

    In a tree of calls the first branch continues the row; each further one becomes a row of its own, in which the
    shared answer is context, so that every sampled token is trained exactly once:

        (O1, A1), (O1+A1+O2, A2), (O1+A1+O3, A3)  ->  O1 A1* O2 A2*   and   O1 A1 O3 A3*

    Transitions of different temperatures never share a row. Costs O(tokens of all prompts) for a conversation.
    """
    rows: list[Sequence] = []
    for place, transition in enumerate(transitions):
        row = _longest_beginning(transition, rows)
        if row is None:
            row = _empty_row(rollout_id, transition, others)
            rows.append(row)
        _append(row, transition, place, {"advantages": advantages, "weights": weights, **others})
    return rows


def unmerged(
    rollout_id: str,
    transitions: Seq[Transition],
    advantages: Seq[PerToken],
    weights: Seq[PerToken],
    others: Mapping[str, Seq[PerToken]] = NOTHING,
) -> list[Sequence]:
    """One row a call: (O1, A1), (O1+A1+O2, A2) -> O1 A1* and O1 A1 O2 A2*. Trains the same tokens with the same weights."""
    rows = []
    for place, transition in enumerate(transitions):
        row = _empty_row(rollout_id, transition, others)
        _append(row, transition, place, {"advantages": advantages, "weights": weights, **others})
        rows.append(row)
    return rows


def by_call(rows: Seq[Sequence], numbers: Seq[Seq[float]]) -> list[list[float]]:
    """What an engine said of each token of `rows`, by transition and sampled token.

    The rows must have been made with each transition's place, 0, 1, 2, …, as its advantage: that is how a merged row's
    calls are told apart. Rows O1 A1* O2 A2* and O3 A3* of transitions (1, 3, 2) give [numbers of A1, A3, A2].
    """
    found: dict[int, list[float]] = {}
    for row, ofrow in zip(rows, numbers, strict=True):
        for start, end in row.segments:
            found[int(row.advantages[start])] = list(ofrow[start:end])
    return [found[place] for place in range(len(found))]


def token_weights(
    trajectories: Seq[Trajectory], aggregation: Aggregation, fixed_length: int | None = None
) -> list[list[float]]:
    """The weight of each sampled token, one number per trajectory and transition.

    They come from the original transitions, so that a merged row and its unmerged rows give the same loss. Over a
    minibatch they sum to 1, except for the last:

        token_mean      1 / (sampled tokens of the minibatch)
        sequence_mean   1 / (transitions of the minibatch × tokens of this transition)
        rollout_mean    1 / (rollouts of the minibatch × tokens of this rollout)
        fixed_length    1 / (rollouts of the minibatch × fixed_length)

    fixed_length: Liu et al. 2025, "Dr. GRPO" (arXiv 2503.20783), section 3.2: a constant in place of each answer's own
    length, so that no token counts less because its rollout was long.
    """
    lengths = [[len(transition.sampled_ids) for transition in trajectory.transitions] for trajectory in trajectories]
    if aggregation == "token_mean":
        total = sum(map(sum, lengths))
        return [[1.0 / total] * len(rollout) for rollout in lengths]
    if aggregation == "sequence_mean":
        count = sum(map(len, lengths))
        return [[1.0 / (count * length) for length in rollout] for rollout in lengths]
    if aggregation == "fixed_length":
        if fixed_length is None:
            raise ValueError("fixed_length: expected a number of tokens")
        return [[1.0 / (len(lengths) * fixed_length)] * len(rollout) for rollout in lengths]
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


def _empty_row(rollout_id: str, transition: Transition, others: Mapping[str, Seq[PerToken]]) -> Sequence:
    optional: dict[str, Any] = {name: [] for name in others}
    return Sequence(
        rollout_id=rollout_id,
        tokens=[],
        mask=[],
        logprobs=[],
        advantages=[],
        weights=[],
        segments=[],
        temperature=transition.temperature,
        **optional,
    )


def _append(row: Sequence, transition: Transition, place: int, columns: Mapping[str, Seq[PerToken]]) -> None:
    """What the row lacks of the transition's prompt, as context, then its answer, trained."""
    context = transition.prompt_ids[len(row.tokens) :]
    answer = transition.sampled_ids
    start = len(row.tokens) + len(context)
    nothing = [0.0] * len(context)
    row.tokens.extend(context + answer)
    row.mask.extend([False] * len(context) + [True] * len(answer))
    row.logprobs.extend(nothing + transition.logprobs)
    for name, values in columns.items():
        value = values[place]
        each = [value] * len(answer) if isinstance(value, int | float) else list(value)
        if len(each) != len(answer):
            raise ValueError(f"{name}: expected {len(answer)} numbers for call {transition.call_id}, got {len(each)}")
        getattr(row, name).extend(nothing + each)
    row.segments.append((start, start + len(answer)))
