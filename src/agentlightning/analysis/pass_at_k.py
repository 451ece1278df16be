"""pass@k and best-of-k: the chance that one of k tries solves a task, and the mean reward of the best of k.

``agl eval --attempts`` prints them. Both are unbiased for k up to the tries of a task; intervals are over tasks. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentlightning.analysis.intervals import Interval, paired_bootstrap
from agentlightning.analysis.task_rates import solving_reward
from agentlightning.errors import InputError
from agentlightning.records import Rollout
from agentlightning.store.summaries import task_key
from agentlightning.trainer.task_sampler import earned, is_try


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Tries at one task that say something about the policy."""

    tag: str
    solved: list[bool]
    rewards: list[float]
    """0 where a try failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """The tasks of one tag that were tried at least k times."""

    tag: str
    """'' for all tasks."""
    k: int
    tasks: int
    solved: Interval | None
    """pass@k; None for fewer than two tasks, which have no spread."""
    best: Interval | None
    """Mean reward of the best of k."""


def pass_at_k(tries: int, solved: int, k: int) -> float:
    """The chance that at least one of k tries solves, of a task that `solved` of `tries` solved: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1. Of 4 tries of which 1 solved, half of the 6
    pairs have it: pass@2 is 0.5, where 1 - (1 - 1/4)^2 would be 0.44. InputError for k above the tries.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= tries:
        raise InputError(f"k: expected 1 to {tries}, the tries of the task, got {k}")
    return 1.0 - math.comb(tries - solved, k) / math.comb(tries, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """The expected highest of k rewards that are drawn without putting back: of rewards 0 and 1 it is pass@k.

    The i-th smallest is the highest of C(i - 1, k - 1) of the C(n, k) choices. InputError for k above the rewards.

    >>> best_of_k([0.0, 0.5, 1.0], 2)
    0.8333333333333334
    """
    count = len(rewards)
    if not 1 <= k <= count:
        raise InputError(f"k: expected 1 to {count}, the tries of the task, got {k}")
    chosen = [math.comb(place, k - 1) * reward for place, reward in enumerate(sorted(rewards))]
    return math.fsum(chosen) / math.comb(count, k)


def read_tries(rollouts: Sequence[Rollout], solved: Mapping[str, bool], tag: str | None = None) -> list[Tries]:
    """The tries at each task of finished rollouts. solved: by rollout, where it was said; else a task is solved by the
    highest reward of them all. tag: a field of the tasks. InputError where no task has it."""
    told = [rollout for rollout in rollouts if is_try(rollout)]
    enough = solving_reward([reward for one in told if (reward := earned(one)) is not None])
    by_task = defaultdict[str, list[Rollout]](list)
    for one in told:
        by_task[task_key(one.task)].append(one)
    if tag is not None and told and not any(tag in one.task for one in told):
        raise InputError(f"--tag: no task has the field {tag!r}")

    def is_solved(one: Rollout) -> bool:
        if solved:
            return solved.get(one.id, False)
        reward = earned(one)
        return enough is not None and reward is not None and reward >= enough

    return [
        Tries(
            tag="" if tag is None else str(tries[0].task.get(tag, "")),
            solved=[is_solved(one) for one in tries],
            rewards=[earned(one) or 0.0 for one in tries],
        )
        for tries in by_task.values()
    ]


def pass_rows(tasks: Sequence[Tries], attempts: int) -> list[PassRow]:
    """Rows for k = 1, 2, 4, … up to the attempts: of all tasks, then of each tag. A task that was tried fewer than k times,
    since what failed was not the agent's doing, is left out of k."""
    tags = sorted({one.tag for one in tasks} - {""})
    return [_row(tasks if not tag else [one for one in tasks if one.tag == tag], tag, k)
            for tag in ("", *tags) for k in _powers(attempts)]  # fmt: skip


def _powers(most: int) -> list[int]:
    """
    >>> _powers(6)
    [1, 2, 4, 6]
    """
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def _row(tasks: Sequence[Tries], tag: str, k: int) -> PassRow:
    tried = [one for one in tasks if len(one.solved) >= k]
    return PassRow(
        tag=tag,
        k=k,
        tasks=len(tried),
        solved=paired_bootstrap([pass_at_k(len(one.solved), sum(one.solved), k) for one in tried]),
        best=paired_bootstrap([best_of_k(one.rewards, k) for one in tried]),
    )
