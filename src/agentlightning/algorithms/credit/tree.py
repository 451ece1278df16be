"""Tree credit: a call that several rollouts of a tree share is worth the mean of what they earned.

After Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning" (Tree-GRPO, arXiv 2509.21240): the advantage of a
rollout is its return compared with those of its tree (intra-tree) plus its return compared with those of the group
(inter-tree), each as GRPO has it. There a call that n rollouts share is trained n times, with the advantage of each. We
differ: it is trained once, in the row of the rollout that sampled it, with the mean of these n advantages.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import PositiveInt

from agentlightning.algorithms.advantage import grpo
from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.algorithms.settings import AlgorithmPart
from agentlightning.errors import ConfigError
from agentlightning.training_types import Trajectory


class Independent(AlgorithmPart):
    """Rollouts of a group that share nothing but their task."""

    type: Literal["independent"] = "independent"


class RolloutTree(AlgorithmPart):
    """Rollouts of a group that are sampled as trees: some begin it, the others are forked from them and share the calls
    before that place. M roots, and in each of L rounds N forks in each tree, make M × (1 + L × N) rollouts."""

    type: Literal["tree"] = "tree"
    roots: PositiveInt = 2
    """Independent rollouts that begin a group: the paper's M."""
    rounds: PositiveInt = 1
    """Times that each tree is forked, once all its rollouts have finished: the paper's L."""

    def branches(self, group_size: int) -> int:
        """Rollouts that a round adds to each tree, the paper's N. ConfigError where a group cannot be shared out so.

        >>> RolloutTree(roots=2, rounds=1).branches(8), RolloutTree(roots=2, rounds=3).branches(8)
        (3, 1)
        """
        forks, rest = divmod(group_size, self.roots)
        branches, more = divmod(forks - 1, self.rounds)
        if rest or more or branches < 1:
            least, more = (self.roots * (1 + self.rounds * each) for each in (1, 2))
            raise ConfigError(
                f"algorithm.group_size: expected {self.roots} × (1 + {self.rounds} × N) rollouts with {self.roots} roots "
                f"and {self.rounds} rounds, so {least}, {more}, …, got {group_size}"
            )
        return branches

    def replicas(self, tree: int, group_size: int) -> list[int]:
        """The numbers, in their group, of a tree's rollouts in the order in which they are sampled, its root first.

        >>> RolloutTree(roots=2, rounds=1).replicas(1, 8)
        [1, 5, 6, 7]
        """
        forks = self.rounds * self.branches(group_size)
        first = self.roots + tree * forks
        return [tree, *range(first, first + forks)]


@credit_rule("tree", each="group", reads_steps=False)
def tree(group: Sequence[Trajectory], *, divide: bool = True) -> list[Credit]:
    """The mean return of the rollouts that share the call, which the advantage compares with the group, plus the same
    number's comparison with its tree: (value - mean) / (deviation + 1e-4) over the returns of the tree.

    A tree is what shares calls; a rollout whose replay ended before its first call is one of its own.

    Rollout a of three calls earns 1; b, forked after the first of them, earns 0; c, which shares nothing, earns 0. The first
    call is worth 1/2, a's others 1, b's own 0. Without deviations they get 1/2 - 1/3 + 1/2 - 1/2 = 1/6; 1 - 1/3 + 1 - 1/2 =
    7/6; -1/3 - 1/2 = -5/6; c's -1/3 + 0.
    """
    paths = _paths(group)
    returns: defaultdict[str, list[float]] = defaultdict(list)
    for one, path in zip(group, paths, strict=True):
        for call_id in path:
            returns[call_id].append(one.reward)
    values = [[statistics.mean(returns[call.call_id]) for call in one.transitions] for one in group]
    found = [Credit(values=[]) for _ in group]
    for members in _trees(paths):
        rewards = [group[place].reward for place in members]
        within = grpo([values[place] for place in members], rewards, divide=divide)
        for place, bonus in zip(members, within, strict=True):
            found[place] = Credit(values=values[place], bonus=bonus)
    return found


def trees_of(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """By rollout, a number that the rollouts of one tree have in common."""
    return {
        trajectories[place].rollout_id: number
        for number, members in enumerate(_trees(_paths(trajectories)))
        for place in members
    }


def _paths(group: Sequence[Trajectory]) -> list[set[str]]:
    """The calls of each rollout, by the ids under which they were sampled."""
    origins = {mine: original for one in group for mine, original in one.replayed.items()}
    found = []
    for one in group:
        path = {call.call_id for call in one.transitions}
        for call_id in one.replayed:
            while call_id in origins:  # a fork of a fork repeats what that had repeated
                call_id = origins[call_id]
            path.add(call_id)
        found.append(path)
    return found


@dataclass(slots=True)
class _Tree:
    calls: set[str] = field(default_factory=set)
    members: list[int] = field(default_factory=list)


def _trees(paths: Sequence[set[str]]) -> list[list[int]]:
    """The places of the rollouts of each tree: those that are joined by calls that they share."""
    trees: list[_Tree] = []
    for place, path in enumerate(paths):
        joined = _Tree({*path}, [place])
        apart = []
        for one in trees:
            if one.calls.isdisjoint(path):
                apart.append(one)
            else:
                joined.calls |= one.calls
                joined.members += one.members
        trees = [*apart, joined]
    return [sorted(one.members) for one in trees]
