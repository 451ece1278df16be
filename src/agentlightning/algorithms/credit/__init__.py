"""Credit assignment: a rule turns a trajectory's reward into one reward per transition.

A rule is a function named in `CREDIT`, or a user's own, named by its place: ``file.py:name``.
It may see the whole group, since some rules compare rollouts. See `rule.py` for what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentlightning.algorithms.credit.counterfactual import counterfactual
from agentlightning.algorithms.credit.gigpo import gigpo
from agentlightning.algorithms.credit.judge import judge
from agentlightning.algorithms.credit.learned import learned
from agentlightning.algorithms.credit.outcome import discounted, last, uniform
from agentlightning.algorithms.credit.rule import Credit, Evidence, Rule, credit_rule
from agentlightning.algorithms.credit.step_rewards import step_rewards
from agentlightning.errors import ConfigError
from agentlightning.runner.user_code import load

__all__ = ["CREDIT", "Credit", "Evidence", "Rule", "credit_rule", "find_rule", "path_of"]

CREDIT: Mapping[str, Rule] = MappingProxyType(
    {rule.name: rule for rule in (uniform, last, discounted, step_rewards, gigpo, counterfactual, learned, judge)}
)


def find_rule(name: str) -> Rule:
    """The rule of that name, or the one that ``file.py:name`` or ``package.module:name`` names. ConfigError where
    there is none."""
    if name in CREDIT:
        return CREDIT[name]
    if ":" not in name:
        known = ", ".join(sorted(CREDIT))
        raise ConfigError(f"algorithm.credit: expected one of {known}, or file.py:name of a custom rule, got {name!r}")
    found = load(name, None, "credit rule")
    if isinstance(found, Rule):
        return found
    load(name, ("trajectory", "group"), "credit rule")
    return Rule(name, found)


def path_of(rule: Rule) -> str:
    """The text that names `rule` in a configuration, so that a run can be resumed by another process."""
    if CREDIT.get(rule.name) is rule:
        return rule.name
    code = getattr(rule.function, "__code__", None)
    name = getattr(rule.function, "__qualname__", "<")
    if code is None or "<" in name or not code.co_filename.endswith(".py"):
        raise ConfigError(
            f"algorithm.credit: the rule {rule.name!r} cannot be found again by another process; put it at the top of a "
            "file and give file.py:name"
        )
    return f"{code.co_filename}:{name}"
