"""Budget: the use that a search has made of its rollouts and tokens.

Counted along the search's own path, from recorded calls: a search that is run again from its start counts the same, and ends
where it would have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.config.optimizer import OptimizeConfig
from agentlightning.errors import BudgetSpentError
from agentlightning.records import Call
from agentlightning.trainer.used_tokens import used_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchUsage:
    """Tokens of some calls."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0

    def __add__(self, other: SearchUsage) -> SearchUsage:
        return SearchUsage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens


def usage_of(calls: Sequence[Call]) -> SearchUsage:
    """Tokens of these calls; an external model that reports no usage counts as nothing."""
    tokens = [used_tokens(call) for call in calls]
    return SearchUsage(
        prompt_tokens=sum(prompt for prompt, _ in tokens), sampled_tokens=sum(sampled for _, sampled in tokens)
    )


@dataclass(slots=True)
class Budget:
    """The bounds of one search, and what it has used."""

    bounds: OptimizeConfig
    rollouts: int = 0
    used: SearchUsage = SearchUsage()

    def check(self, rollouts: int = 0) -> None:
        """BudgetSpentError where so many more rollouts would pass their bound, or the tokens are spent."""
        bounds, used = self.bounds, self.used
        if self.rollouts + rollouts > bounds.max_rollouts:
            raise BudgetSpentError(
                f"The budget of {bounds.max_rollouts} rollouts is spent: {self.rollouts} were run, and the next "
                f"{rollouts} would pass it (optimize.max_rollouts)."
            )
        if bounds.max_tokens is not None and used.tokens >= bounds.max_tokens:
            raise BudgetSpentError(
                f"The budget of {bounds.max_tokens} tokens is spent: {used.tokens} were used (optimize.max_tokens)."
            )
