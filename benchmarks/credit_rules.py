"""Contestants of the credit suite: credit rules with their settings, and two controls.

`credit_cell.py` trains by them. All but what stands here is equal. The settings are the project's defaults, but for those
of `forked_lean` and of the critic; nothing was tuned for any rule, and the learning rate is the one that suits `uniform`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import Credit, credit_rule
from agentlightning.training_types import Trajectory, Transition
from credit_tasks import DECIDES

GROUP, MINIBATCHES = 8, 2


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way of assigning credit."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of LightningRL."""
    steps: bool = False
    """True where step rewards are shown to it."""
    coin: bool = False
    """True where the rewards of training are a coin's."""
    air: dict[str, Any] = field(default_factory=dict)
    """A table [air]: intermediate rewards by rules over the record."""
    needs_key: bool = False
    """True where it makes sense only on tasks with calls whose text the agent ignores."""
    packed: bool = False
    """True where what rows of an update begin with is computed once (`packing = "prefix_tree"`)."""
    needs_truth: bool = False
    """True where it reads which call decides."""

    def algorithm(self) -> LightningRL:
        return LightningRL(group_size=GROUP, minibatches=MINIBATCHES, **self.settings)


def action(transition: Transition) -> str:
    """Returns what the agents of the suite read of a completion; all that they do not read is the same action."""
    text = str(transition.completion["content"])
    return text if re.match(r"<|Answer: |Route: |door ", text) else ""


@credit_rule("oracle", each="group", reads_steps=False)
def oracle(group: Sequence[Trajectory]) -> list[Credit]:
    """The reward less the group's mean for the call that decides, and nothing for the others."""
    mean = statistics.fmean(one.reward for one in group)
    return [Credit(values=true_credit(one, mean), shares=[0.0] * len(one.transitions)) for one in group]


def true_credit(trajectory: Trajectory, mean: float) -> list[float]:
    """What each call of a rollout should earn, where one is known to decide; `mean` is its group's reward."""
    return [(trajectory.reward - mean) * one.rewards.get(DECIDES, 0.0) for one in trajectory.transitions]


def _credit(name: str, **settings: Any) -> dict[str, Any]:
    return {"credit": {"type": name, **settings}}


def _air() -> Contestant:
    rules = {"tool_error": -0.2, "repeated_state": -0.2}
    table = {"text_tool_error": "^(error|empty|none)$", "rules": rules}
    return Contestant(settings=_credit("step_rewards"), air=table)


CONTESTANTS = {
    "uniform": Contestant(),
    "last": Contestant(settings=_credit("last")),
    "discounted": Contestant(settings=_credit("discounted")),
    "step_rewards": Contestant(settings=_credit("step_rewards"), steps=True),
    "gigpo": Contestant(settings=_credit("gigpo")),
    "grouped_gae": Contestant(settings=_credit("grouped_gae")),
    "counterfactual": Contestant(settings=_credit("counterfactual")),
    "counterfactual_key": Contestant(settings=_credit("counterfactual", key=f"{__file__}:action"), needs_key=True),
    "learned": Contestant(settings=_credit("learned")),
    "decisive": Contestant(settings=_credit("decisive")),
    "decisive_key": Contestant(settings=_credit("decisive", key=f"{__file__}:action"), needs_key=True),
    "forked": Contestant(settings=_credit("forked")),
    "forked_lean": Contestant(settings=_credit("forked", forks=2, calls=1)),
    "gae": Contestant(settings={"advantage": {"type": "gae", "learning_rate": 0.003, "backbone_grad_scale": 0.3}}),
    "packed": Contestant(packed=True),
    "tree": Contestant(settings={"rollouts": "tree"}, packed=True),
    "air": _air(),
    "random_reward": Contestant(coin=True),
    "oracle": Contestant(settings=_credit(f"{__file__}:oracle"), needs_truth=True),
}
