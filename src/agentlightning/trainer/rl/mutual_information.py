"""Mutual information of tasks and completions: how much what the policy says depends on what it was asked.

The training loop asks for it before a step's updates. Entropy alone does not tell a policy that answers each task in its own
way from one that says the same varied things to all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from agentlightning.engines.base import Engine, Metrics
from agentlightning.training_types import TrainingSequence, Transition


async def mutual_information(engine: Engine, policy: str, calls: Sequence[Transition], tasks: int) -> Metrics:
    """`from_scores` of the first completions of `tasks` conversations at most that began with different prompts; nothing
    where fewer than two did. Costs a forward pass over tasks² rows."""
    first: dict[tuple[int, ...], Transition] = {}
    for call in calls:
        if call.parent is None and call.sampled_ids and not call.images and len(first) < tasks:
            first.setdefault(tuple(call.suffix_ids), call)
    if len(first) < 2:
        return {}
    # No row is longer than the longest call: what a model has room for is not known here.
    longest = max(len(prompt) + len(call.sampled_ids) for prompt, call in first.items())
    room = longest - max(map(len, first))
    rows = [_row(prompt, call, room) for prompt in first for call in first.values()]
    numbers = await engine.logprobs(rows, policy)
    scores = [statistics.fmean(of_row[row.segments[0][0] :]) for row, of_row in zip(rows, numbers, strict=True)]
    count = len(first)
    return from_scores([scores[start : start + count] for start in range(0, len(scores), count)])


def from_scores(scores: Sequence[Sequence[float]]) -> Metrics:
    """mutual_information and prompt_retrieval of scores[i][j], the mean log-probability per token of completion j after
    prompt i, in nats.

    Wang et al. 2026, "RAGEN-2: Reasoning Collapse in Agentic RL" (arXiv 2604.06268), in-batch cross-scoring: the mean over j
    of s_jj - log mean_i exp s_ij, about 0 where completions do not depend on prompts (by chance below), log n at most; and
    the share of completions that are most probable after their own prompt, 1/n by chance (ties count in parts). There over
    reasoning tokens, here over all of the completion. [[0, -inf], [-inf, 0]]: log 2 and 1.
    """
    count = len(scores)
    information, retrieved = [], []
    for place in range(count):
        column = [row[place] for row in scores]
        top = max(column)
        mean = top + math.log(math.fsum(math.exp(score - top) for score in column) / count)
        information.append(column[place] - mean)
        retrieved.append(1 / column.count(top) if column[place] == top else 0.0)
    return {"mutual_information": statistics.fmean(information), "prompt_retrieval": statistics.fmean(retrieved)}


def _row(prompt: Sequence[int], call: Transition, room: int) -> TrainingSequence:
    sampled = call.sampled_ids[:room]
    tokens = [*prompt, *sampled]
    nothing = [0.0] * len(tokens)
    return TrainingSequence(
        rollout_id=call.call_id,
        tokens=tokens,
        mask=[False] * len(prompt) + [True] * len(sampled),
        logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        segments=[(len(prompt), len(tokens))],
        temperature=call.temperature,
    )
