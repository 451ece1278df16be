"""Rollout trees: how the rollouts of a group are numbered where they are sampled as trees.

Ji et al. 2025, "Tree Search for LLM Agent Reinforcement Learning" (Tree-GRPO, arXiv 2509.21240): M independent rollouts
begin a group, and in each of L rounds N rollouts are forked in each of the M trees, so that a group has M × (1 + L × N).
The trainer samples by these numbers; `credit/tree.py` is the credit. Pure: knows neither rollouts nor calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, PositiveInt

from agentlightning.algorithms.settings import check_settings
from agentlightning.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTree:
    """The form of a group's trees, the table `tree` of LightningRL."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    roots: PositiveInt = 2
    """Independent rollouts that begin a group: the paper's M."""
    rounds: PositiveInt = 1
    """Times that each tree is forked, once all its rollouts have finished: the paper's L."""

    def __post_init__(self) -> None:
        check_settings(self, "algorithm.tree")

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
                f"algorithm.group_size: expected {self.roots} × (1 + {self.rounds} × N) with tree = {{ roots = "
                f"{self.roots}, rounds = {self.rounds} }}, so {least}, {more}, …, got {group_size}"
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
