"""The interface of a credit rule: a function with settings, called for a trajectory, for a group, or once for a whole step.

Rules are made here, by `credit_rule`; LightningRL drives them through `Rule.credits`, which checks whatever they return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from agentlightning.algorithms.settings import function_settings
from agentlightning.errors import ConfigError, boundary
from agentlightning.runtime.code_loader import path_of_code
from agentlightning.training_types import Trajectory

Each = Literal["trajectory", "group", "step"]
HISTORY = 4
"""Earlier steps that a rule of `needs` "history" is given where it has no setting of that name."""
SCORE_DIGITS = 10
"""Decimals of a score that are compared: step rewards that add up to 0 leave rounding errors, which advantages would be
divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The credit of one rollout's calls; the lists have one entry per transition."""

    values: list[float]
    """The reward of each call, in units of the rollout's reward."""
    shares: list[float] | None = None
    """The share of its group's baseline that each call is compared with: 0 for a difference already. None: 1."""
    bonus: list[float] | None = None
    """Added to the advantage as it is."""
    score: float | None = None
    """The number by which the rollout as a whole is compared with the others of its group. None: its reward."""

    @property
    def left_out(self) -> list[bool]:
        """True for calls that the rule leaves out: with a value of 0 that is compared with nothing."""
        shares = self.shares or [1.0] * len(self.values)
        return [value == share == 0 for value, share in zip(self.values, shares, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The inputs of a rule besides the groups of the step. The same evidence gives the same credit."""

    history: Sequence[Sequence[Trajectory]] = ()
    """Groups of earlier steps, oldest first."""
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """A judge's scores of each rollout."""
    fork_returns: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=lambda: MappingProxyType({}))
    """By rollout and call: the returns of forks that sampled from that call on."""


SIGNATURES: Mapping[Each, tuple[str, ...]] = MappingProxyType(
    {"trajectory": ("trajectory", "group"), "group": ("group",), "step": ("groups", "evidence")}
)
"""Positional arguments of a rule, by what it is called for."""
Returned = list[float] | Credit
CreditRule = Callable[..., Any]
"""`each` decides: (trajectory, its group) -> Returned; (group) -> [Returned]; (groups, evidence) -> [[Returned]]. Settings
follow as keyword-only arguments."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A credit rule by name."""

    name: str
    function: CreditRule
    each: Each = "trajectory"
    needs: tuple[str, ...] = ()
    """Parts that the evidence must hold, by name; `trainer.credit_inputs` gathers each by settings of the rule:
    "scores" (url, key_env, model, instructions), "history" (history: steps, else HISTORY), "fork_returns" (forks, calls)."""
    reads_steps: bool = True
    """True where step rewards make a difference to it."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.function(*args, **settings)

    @property
    def path(self) -> str:
        """The text that names the rule in a configuration, so that another process finds it."""
        ours = self.function.__module__.startswith("agentlightning.")
        return self.name if ours else path_of_code(self.function, "algorithm.credit")

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` checked against the function's keyword-only arguments. ConfigError for an unknown or a wrong one."""
        return function_settings(self.function, given, "credit")

    def credits(
        self, groups: Sequence[Sequence[Trajectory]], evidence: Evidence, settings: Mapping[str, Any]
    ) -> list[list[Credit]]:
        """Runs the rule. ConfigError if it returns something else than one finite number per transition."""
        with boundary(f"credit rule {self.name!r}"):
            if self.each == "step":
                returned = self.function(groups, evidence, **settings)
            elif self.each == "group":
                returned = [self.function(group, **settings) for group in groups]
            else:
                returned = [[self.function(trajectory, group, **settings) for trajectory in group] for group in groups]
        self._require_one_each(len(groups), returned, "groups")
        for group, rollouts in zip(groups, returned, strict=True):
            self._require_one_each(len(group), rollouts, "rollouts")
        return [
            [self._checked(trajectory, credit) for trajectory, credit in zip(group, rollouts, strict=True)]
            for group, rollouts in zip(groups, returned, strict=True)
        ]

    def _checked(self, trajectory: Trajectory, returned: Any) -> Credit:
        credit = returned if isinstance(returned, Credit) else Credit(values=returned)
        for name in ("values", "shares", "bonus"):
            numbers = getattr(credit, name)
            if numbers is None and name != "values":
                continue
            self._require_one_each(
                len(trajectory.transitions), numbers, f"transitions of rollout {trajectory.rollout_id}"
            )
            if not all(_finite(number) for number in numbers):
                raise ConfigError(
                    f"credit rule {self.name!r}: expected finite numbers for rollout {trajectory.rollout_id}, "
                    f"got {numbers!r:.80}"
                )
        if credit.score is None:
            return credit
        if not _finite(credit.score):
            raise ConfigError(f"credit rule {self.name!r}: expected a finite score, got {credit.score!r}")
        return replace(credit, score=round(credit.score, SCORE_DIGITS))

    def _require_one_each(self, count: int, returned: Any, what: str) -> None:
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != count:
            got = f"{len(returned)}" if isinstance(returned, Sequence) else type(returned).__name__
            raise ConfigError(
                f"credit rule {self.name!r}: expected a list with one entry for each of {count} {what}, got {got}"
            )


def credit_rule(
    name: str,
    each: Each = "trajectory",
    needs: tuple[str, ...] = (),
    *,
    reads_steps: bool = True,
) -> Callable[[CreditRule], Rule]:
    """Make a function a credit rule; its keyword-only arguments become settings, checked by their annotations.

    >>> @credit_rule("first")
    ... def first(trajectory, group, *, weight: float = 1.0):
    ...     return [weight * trajectory.reward] + [0.0] * (len(trajectory.transitions) - 1)
    """

    def make(function: CreditRule) -> Rule:
        return Rule(name, function, each, needs, reads_steps)

    return make


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)
