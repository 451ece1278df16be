"""Credit assignment: a rule turns a trajectory's reward into one reward per transition.

A rule is a function named in `CREDIT`, or a user's own, named by its place: ``file.py:name``.
It may see the whole group, since some rules compare rollouts. See `rule.py` for what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentlightning.algorithms.credit.counterfactual import counterfactual
from agentlightning.algorithms.credit.decisive import decisive
from agentlightning.algorithms.credit.forked import forked
from agentlightning.algorithms.credit.gigpo import gigpo
from agentlightning.algorithms.credit.grouped_gae import grouped_gae
from agentlightning.algorithms.credit.judge import judge
from agentlightning.algorithms.credit.learned import learned
from agentlightning.algorithms.credit.outcome import discounted, last, uniform
from agentlightning.algorithms.credit.rule import SIGNATURES, Credit, Evidence, Rule, credit_rule
from agentlightning.algorithms.credit.step_rewards import step_rewards
from agentlightning.algorithms.credit.tree import tree
from agentlightning.runtime.code_loader import check_signature, load_plugin

__all__ = ["CREDIT", "Credit", "Evidence", "Rule", "credit_rule", "find_rule"]

CREDIT: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            uniform,
            last,
            discounted,
            step_rewards,
            gigpo,
            grouped_gae,
            forked,
            tree,
            counterfactual,
            learned,
            decisive,
            judge,
        )
    }
)


def find_rule(name: str) -> Rule:
    """The rule of that name, of an entry point, or the one that ``file.py:name`` or ``package.module:name`` names.
    ConfigError where there is none."""
    if name in CREDIT:
        return CREDIT[name]
    found = load_plugin("credit", name, CREDIT)
    rule = found if isinstance(found, Rule) else Rule(name, found)
    check_signature(rule.function, SIGNATURES[rule.each], f"credit rule {name!r}", settings=True)
    return rule
