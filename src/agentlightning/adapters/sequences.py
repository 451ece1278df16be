"""Trajectories to sequences: the rows that an engine trains on, merged where one call continues another.

LightningRL drives it after credit and advantage. It knows nothing of rewards: advantages and weights are given, by
transition or by token, and merging changes how often a token is *read*, never how often or how strongly it is *trained*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import compress, takewhile
from types import MappingProxyType
from typing import Any, Literal

from agentlightning.training_types import ImageInput, TrainingSequence, Trajectory, Transition

Aggregation = Literal["token_mean", "sequence_mean", "rollout_mean", "fixed_length"]
PerToken = float | Sequence[float]
"""Of one transition: a number for all its sampled tokens, or one for each."""
NOTHING: Mapping[str, Sequence[PerToken]] = MappingProxyType({})


def merge(
    rollout_id: str,
    transitions: Sequence[Transition],
    advantages: Sequence[PerToken],
    weights: Sequence[PerToken],
    others: Mapping[str, Sequence[PerToken]] = NOTHING,
    *,
    apart: bool = False,
) -> list[TrainingSequence]:
    """Sequences in which a transition follows the nearest call before it in its tree that ends one.

    `advantages` and `weights` hold one entry per transition, for its sampled tokens; `others` the same for optional fields
    of `TrainingSequence`, such as kl_weights. With observations O and completions A (a completion's tokens are trained,
    marked with a star; all others are context):

        (O1, A1), (O1+A1+O2, A2), (O3, A3)        ->  O1 A1* O2 A2*   and   O3 A3*

    In a tree of calls the first branch continues the row; each further one becomes a row of its own, in which the
    shared completion is context, so that every sampled token is trained exactly once:

        (O1, A1), (O1+A1+O2, A2), (O1+A1+O3, A3)  ->  O1 A1* O2 A2*   and   O1 A1 O3 A3*

    Tokens that a call's grammar forced are context, too. Transitions of different temperatures never share a row. Costs
    O(tokens of the rows): no prompt is built or compared.
    With `apart` each call is a row of its own, and the same tokens are trained: O1 A1*, O1 A1 O2 A2*.
    """
    rows: list[TrainingSequence] = []
    ends: dict[str, TrainingSequence] = {}  # by the call whose completion a row ends with
    for place, transition in enumerate(transitions):
        before = None if apart else _end_of_row(transition, ends)
        if before is None:
            row = _empty_row(rollout_id, transition, others)
            rows.append(row)
        else:
            row = ends.pop(before.call_id)
        ends[transition.call_id] = row
        _append(row, transition, before, place, {"advantages": advantages, "weights": weights, **others})
    return rows


def by_call(rows: Sequence[TrainingSequence], numbers: Sequence[Sequence[float]]) -> list[list[float]]:
    """Numbers of an engine for the tokens of `rows`, by transition and sampled token.

    The rows must have been made with each transition's place, 0, 1, 2, …, as its advantage: that is how a merged row's
    calls are told apart. Rows O1 A1* O2 A2* and O3 A3* of transitions (1, 3, 2) give [numbers of A1, A3, A2].
    """
    found: dict[int, list[float]] = {}
    for row, of_tokens in zip(rows, numbers, strict=True):
        for start, end in row.segments:
            found[int(row.advantages[start])] = list(of_tokens[start:end])
    return [found[place] for place in range(len(found))]


def until_last_signal(row: TrainingSequence) -> TrainingSequence | None:
    """The row up to the end of its last call with an advantage; None where no trained token has one.

    A policy loss has no gradient in what is cut off, nor does anything before it read it. O1 A1* O2 A2* with the
    advantages 0.5 and 0: O1 A1*. Calls are whole, so that ratios of a call are what they were.
    """
    learned = [any(compress(row.advantages[start:end], row.mask[start:end])) for start, end in row.segments]
    if not any(learned):
        return None
    calls = len(learned) - learned[::-1].index(True)
    end = row.segments[calls - 1][1]
    if end == len(row.tokens):
        return row
    per_call = ("segments", "decodings", "calls")
    images = [image for image in row.images if image.end <= end]
    columns = {one.name: getattr(row, one.name) for one in fields(row)}
    lists = {name: value for name, value in columns.items() if isinstance(value, list) and name != "images"}
    shorter: dict[str, Any] = {name: value[: calls if name in per_call else end] for name, value in lists.items()}
    return replace(row, **shorter, images=images)


def token_weights(
    trajectories: Sequence[Trajectory], aggregation: Aggregation, fixed_length: int | None = None
) -> list[list[float]]:
    """The weight of each trained token, one number per trajectory and transition.

    They come from the original transitions, so that a merged row and its unmerged rows give the same loss. Tokens that a
    grammar forced count nowhere, nor do transitions and rollouts that have no others. Over a minibatch weights sum to 1,
    except for the last:

        token_mean      1 / (trained tokens of the minibatch)
        sequence_mean   1 / (transitions of the minibatch × tokens of this transition)
        rollout_mean    1 / (rollouts of the minibatch × tokens of this rollout)
        fixed_length    1 / (rollouts of the minibatch × fixed_length)

    fixed_length: Liu et al. 2025, "Dr. GRPO" (arXiv 2503.20783), section 3.2: a constant in place of each completion's own
    length, so that no token counts less because its rollout was long.
    """
    lengths = [[transition.trained_tokens for transition in trajectory.transitions] for trajectory in trajectories]
    rollouts = sum(map(any, lengths))
    if aggregation == "token_mean":
        total = sum(map(sum, lengths))
        return [[1.0 / total if length else 0.0 for length in rollout] for rollout in lengths]
    if aggregation == "sequence_mean":
        count = sum(length > 0 for rollout in lengths for length in rollout)
        return [[1.0 / (count * length) if length else 0.0 for length in rollout] for rollout in lengths]
    if aggregation == "fixed_length":
        if fixed_length is None:
            raise ValueError("fixed_length: expected a number of tokens")
        return [[1.0 / (rollouts * fixed_length) if length else 0.0 for length in rollout] for rollout in lengths]
    return [[1.0 / (rollouts * sum(rollout)) if length else 0.0 for length in rollout] for rollout in lengths]


def spread(numbers: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """The numbers at the places of the mask, and 0 at the others. [1, 2] over [True, False, True]: [1, 0, 2]."""
    given = iter(numbers)
    return [next(given) if here else 0.0 for here in mask]


def _end_of_row(transition: Transition, ends: Mapping[str, TrainingSequence]) -> Transition | None:
    """The nearest ancestor whose completion ends a row of the same temperature; None: the transition begins a row."""
    node = transition.parent
    while node is not None:
        row = ends.get(node.call_id)
        if row is not None and row.temperature == transition.temperature:
            return node
        node = node.parent
    return None


def _empty_row(rollout_id: str, transition: Transition, others: Mapping[str, Sequence[PerToken]]) -> TrainingSequence:
    optional: dict[str, Any] = {name: [] for name in others}
    return TrainingSequence(
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


def _append(
    row: TrainingSequence,
    transition: Transition,
    before: Transition | None,
    place: int,
    columns: Mapping[str, Sequence[PerToken]],
) -> None:
    """Appends the prompt's tokens after `before`, with which the row ends, as context, then the completion, trained."""
    context: list[tuple[list[int], list[ImageInput]]] = [(transition.suffix_ids, transition.images)]
    node = transition.parent
    while node is not None and (before is None or node.call_id != before.call_id):
        context += ((node.sampled_ids, []), (node.suffix_ids, node.images))
        node = node.parent
    for ids, images in reversed(context):
        at = len(row.tokens)
        row.images.extend(replace(image, start=at + image.start, end=at + image.end) for image in images)
        row.tokens.extend(ids)
    start, sampled, mask = len(row.tokens), transition.sampled_ids, transition.mask
    unread = start - len(row.mask)
    row.tokens.extend(sampled)
    row.mask.extend([False] * unread + mask)
    row.logprobs.extend([0.0] * unread + transition.logprobs)
    for name, values in columns.items():
        value = values[place]
        each = [value] * len(sampled) if isinstance(value, int | float) else list(value)
        if len(each) != len(sampled):
            raise ValueError(f"{name}: expected {len(sampled)} numbers for call {transition.call_id}, got {len(each)}")
        if name != "advantages":  # by these `by_call` tells calls apart, also where all of one was forced
            each = [number if trained else 0.0 for number, trained in zip(each, mask, strict=True)]
        getattr(row, name).extend([0.0] * unread + each)
    if transition.decoding:
        row.decodings.extend({} for _ in range(len(row.segments) - len(row.decodings)))
        row.decodings.append(transition.decoding)
    row.segments.append((start, start + len(sampled)))
    row.calls.append(transition.call_id)


# --- rows of whole completions, for losses that compare completions and not tokens --------------------------------------


def completion_rows(trajectory: Trajectory, weights: Sequence[float] | None = None) -> list[TrainingSequence]:
    """The rows of one rollout, whose trained tokens are what the model wrote.

    weights: of each transition's tokens; None: 0. Rows are computed at temperature 1, whatever they were sampled at: the
    loss is about the model, not about its sampling.
    """
    plain = [replace(transition, temperature=1.0) for transition in trajectory.transitions]
    nothing = [0.0] * len(plain)
    given = nothing if weights is None else weights
    return merge(trajectory.rollout_id, plain, nothing, given)


def log_ratios(completions: Sequence[Sequence[TrainingSequence]], logprobs: Iterable[Sequence[float]]) -> list[float]:
    """log(policy / reference) of each completion, the sum over the trained tokens of all its rows, which have ref_logprobs;
    `logprobs` are the policy's of the rows, one after another."""
    values = iter(logprobs)
    return [
        math.fsum(
            now - ref
            for row in rows
            for now, ref, trained in zip(next(values), row.ref_logprobs or (), row.mask, strict=True)
            if trained
        )
        for rows in completions
    ]


def mismatched_completions(trajectories: Sequence[Trajectory], longest: int) -> list[list[TrainingSequence]]:
    """Each completion beside another task's opening, the prompt of the first call of the one before it: all rows of it.

    Ethayarajh et al. (2024), KTO, section 4.1: another example's y beside this x, from which the baseline is estimated. Of
    the completions before it (the last one comes before the first), the nearest that opens otherwise counts; where all open
    alike there is none. A completion with a row of more than `longest` tokens is left out. Stars mark trained tokens:

        (Q1 a* x b*), (Q2 c*)   ->   (Q2 a* x b*), (Q1 c*)
    """
    openings = [trajectory.transitions[0].path[0] for trajectory in trajectories]
    found = []
    for place, trajectory in enumerate(trajectories):
        own = openings[place]
        before = (openings[place - back] for back in range(1, len(openings)))
        other = next((one for one in before if (one.suffix_ids, one.images) != (own.suffix_ids, own.images)), None)
        if other is None:
            continue
        rows = completion_rows(_beside(trajectory, own, other))
        if max(len(row.tokens) for row in rows) <= longest:
            found.append(rows)
    return found


def _beside(trajectory: Trajectory, own: Transition, other: Transition) -> Trajectory:
    """The trajectory with `other`'s prompt in place of the opening of each of its conversations."""
    moved: dict[str, Transition] = {}
    for transition in trajectory.transitions:
        parent = None
        for node in transition.path:
            if node.call_id not in moved:
                moved[node.call_id] = _opened(node, own, other) if parent is None else replace(node, parent=parent)
            parent = moved[node.call_id]
    return replace(trajectory, transitions=[moved[one.call_id] for one in trajectory.transitions])


def _opened(first: Transition, own: Transition, other: Transition) -> Transition:
    """The first call of a conversation beside `other`'s prompt. One whose messages go on from those of `own`, as where a
    template drops earlier reasoning, keeps what follows them, so that rows that could not be merged have the prompts that
    they have merged: with `own` Q g and `other` R g (g the tokens that ask for an answer), Q a x g becomes R a x g."""
    shared = len(first.suffix_ids)
    if own.messages and first.messages[: len(own.messages)] == own.messages:
        alike = (one == two for one, two in zip(first.suffix_ids, own.suffix_ids, strict=False))
        shared = sum(takewhile(bool, alike))
        cut = max(0, len(other.suffix_ids) - (len(own.suffix_ids) - shared))
    else:
        cut = len(other.suffix_ids)
    kept = [
        replace(image, start=image.start + cut - shared, end=image.end + cut - shared)
        for image in first.images
        if image.start >= shared
    ]
    return replace(
        first,
        suffix_ids=other.suffix_ids[:cut] + first.suffix_ids[shared:],
        images=[image for image in other.images if image.end <= cut] + kept,
    )
