"""A user's own rule, and what is refused of it."""

from __future__ import annotations

import pytest
from credit_trajectories import trajectory

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import CREDIT, credit_rule
from agentlightning.algorithms.settings import NamedPart, name_of
from agentlightning.errors import ConfigError
from agentlightning.training_types import Trajectory

GROUP = [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "z")]


@credit_rule("first")
def first(trajectory: Trajectory, group: list[Trajectory], *, weight: float = 1.0) -> list[float]:
    return [weight * trajectory.reward] + [0.0] * (len(trajectory.transitions) - 1)


def test_a_decorated_function_is_a_rule_and_is_found_again_by_its_place() -> None:
    own = LightningRL(credit=NamedPart(type=first.path, weight=0.5), advantage="reinforce")
    assert own.advantages(GROUP) == [[0.5, 0.0], [0.0]]
    assert name_of(LightningRL(credit=first).credit) == f"{__file__}:first"
    assert LightningRL(credit=first, advantage="reinforce").advantages(GROUP) == [[1.0, 0.0], [0.0]]


def half(trajectory: Trajectory, group: list[Trajectory], *, share: float = 0.5) -> list[float]:
    return [share * trajectory.reward] * len(trajectory.transitions)


def test_a_plain_function_is_given_from_python_as_it_is() -> None:
    own = LightningRL(credit=half, advantage="reinforce")
    assert name_of(own.credit) == f"{__file__}:half"
    assert own.advantages(GROUP) == [[0.5, 0.5], [0.0]]


def test_a_rule_of_the_library_given_as_itself_is_its_name() -> None:
    assert LightningRL(credit=CREDIT["last"]) == LightningRL(credit="last")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"wieght": 1.0}, "credit.wieght: no such setting; did you mean 'weight'?"),
        ({"weight": "much"}, "credit.weight: expected a valid number"),
        ({"weight": float("inf")}, "credit.weight: expected a finite number"),
    ],
)
def test_a_wrong_setting_of_a_rule_is_named(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LightningRL(credit=NamedPart(type=first.path, **given))
    assert sentence in str(caught.value)
