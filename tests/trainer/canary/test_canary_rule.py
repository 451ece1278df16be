"""The rule of a canary: verdicts from sessions in order, and settings that contradict each other."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from agentlightning.config.canary import CanaryConfig, Measure
from agentlightning.errors import ConfigError
from agentlightning.trainer.canary.rule import CanaryRule, Verdict

REWARDS_ALONE = CanaryConfig(reward_margin=0.1, error_margin=None, alpha=0.05, min_sessions=20, max_sessions=400)


def alternating(config: CanaryConfig, measure: Measure, stable: float, canary: float, pairs: int = 1000) -> CanaryRule:
    """The rule after pairs of a stable and a canary session of these results, or after its verdict."""
    rule = CanaryRule(config)
    for _ in range(pairs):
        rule.record(measure, stable, canary=False)
        rule.record(measure, canary, canary=True)
        if rule.verdict is not None:
            break
    return rule


def trial(stable: float, canary: float, seed: int, share: float = 0.2) -> tuple[Verdict, int]:
    """The verdict over random sessions of these success rates, and the canary's sessions until then."""
    source, rule, count = random.Random(seed), CanaryRule(REWARDS_ALONE), 0
    while rule.verdict is None:
        of_canary = source.random() < share
        count += of_canary
        rule.record("reward", float(source.random() < (canary if of_canary else stable)), canary=of_canary)
    return rule.verdict, count


def test_a_canary_that_always_fails_is_rolled_back_before_it_has_the_least_sessions() -> None:
    rule = alternating(REWARDS_ALONE, "reward", 1.0, 0.0)
    assert rule.verdict == "roll_back"
    assert rule.figures()["reward"]["canary"] == {"sessions": 6, "mean": 0.0}
    assert rule.figures()["reward"]["worse"]["wealth"] >= rule.figures()["reward"]["worse"]["bound"] == 20


def test_a_canary_that_always_succeeds_is_promoted_with_the_least_sessions() -> None:
    rule = alternating(REWARDS_ALONE, "reward", 0.0, 1.0)
    assert rule.verdict == "promote"
    assert rule.figures()["reward"]["canary"]["sessions"] == 20


def test_it_is_undecided_after_the_most_sessions_and_the_rule_goes_on() -> None:
    config = CanaryConfig(reward_margin=0.01, error_margin=None, min_sessions=5, max_sessions=10)
    rule = alternating(config, "reward", 0.5, 0.5)
    verdicts = [rule.verdict]
    for _ in range(40):
        rule.record("reward", 1.0, canary=False)
        rule.record("reward", 0.0, canary=True)
    assert [*verdicts, rule.verdict] == ["undecided", "roll_back"]


def test_every_measure_has_to_be_shown_for_a_promotion_and_one_is_enough_to_roll_back() -> None:
    config = CanaryConfig(reward_margin=0.1, error_margin=0.05, slow_s=2.0, alpha=0.05, min_sessions=20)
    rule = CanaryRule(config)
    for _ in range(300):
        for canary in (False, True):
            rule.record("reward", float(canary), canary=canary)
            rule.record("error", 1.0, canary=canary)
    verdicts = [rule.verdict]  # nothing is known of the time yet
    for _ in range(300):
        for canary in (False, True):
            rule.record("slow", 1.0, canary=canary)
    verdicts.append(rule.verdict)
    for _ in range(60):
        rule.record("error", 1.0, canary=False)
        rule.record("error", 0.0, canary=True)
    assert [*verdicts, rule.verdict] == [None, "promote", "roll_back"]
    assert rule.figures()["error"]["worse"]["bound"] == 60


def test_a_measure_that_no_rule_is_about_says_nothing() -> None:
    assert alternating(REWARDS_ALONE, "error", 1.0, 0.0, pairs=50).verdict is None


def test_rewards_are_scaled_into_their_range() -> None:
    rule = CanaryRule(CanaryConfig(reward_range=(-1.0, 3.0)))
    assert [rule.scaled_reward(reward) for reward in (-2.0, -1.0, 0.0, 3.0, 9.0)] == [0.0, 0.0, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reward_range": (1.0, 1.0)}, "reward_range: expected the lowest reward, then a higher one"),
        ({"slow_margin": 0.1}, "slow_margin: has no effect without slow_s"),
        (
            {"reward_margin": None, "error_margin": None},
            "expected at least one of reward_margin, error_margin and slow_s",
        ),
        ({"min_sessions": 9, "max_sessions": 8}, "min_sessions: expected no more than max_sessions"),
        ({"reward_margin": 0.5}, "reward_margin: expected a number less than 0.5"),
    ],
)
def test_settings_that_mean_nothing_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        CanaryConfig(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("stable", [0.9, 0.75, 0.5])
def test_one_worse_by_15_is_rolled_back_in_19_of_20_trials_and_an_equal_one_in_1_of_20(stable: float) -> None:
    worse = Counter(trial(stable, stable - 0.15, seed)[0] for seed in range(20))
    equal = Counter(trial(stable, stable, seed)[0] for seed in range(20))
    assert worse["roll_back"] >= 19
    assert equal["roll_back"] <= 1
    assert equal["promote"] >= 10
