"""The settings of LightningRL that make an engine's loss, its weights and the updates of a step."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import build
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.losses import FixedLength, Gspo, KlTerm, PpoClip
from agentlightning.algorithms.settings import as_table
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, TrainingSequence, Trajectory

EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "name": ({"loss": "cispo"}, "cispo"),
    "clip_low": ({"loss": {"clip_low": 0.1}}, 0.1),
    "clip_high": ({"loss": {"type": "gspo", "clip_high": 0.4}}, 0.4),
    "dual_clip": ({"loss": {"type": "ppo_clip", "dual_clip": 3.0}}, 3.0),
    "importance": ({"correction": {"type": "importance", "level": "call"}}, "call"),
    "importance_cap": ({"correction": {"type": "importance", "cap": 1.5}}, 1.5),
    "ratio_mask": ({"correction": "ratio_mask"}, "token"),
    "ratio_mask_low": ({"correction": {"type": "ratio_mask", "low": 0.8}}, 0.8),
    "ratio_mask_high": ({"correction": {"type": "ratio_mask", "high": 2.0}}, 2.0),
    "off_policy_kl": ({"correction": {"type": "off_policy_mask", "max_kl": 0.5}}, 0.5),
    "kl": ({"kl": 0.01}, 0.01),
    "kl_estimator": ({"kl": {"coefficient": 0.01, "estimator": "k1"}}, "k1"),
    "entropy": ({"entropy": 0.02}, 0.02),
    "value": ({"advantage": {"type": "gae", "backbone_grad_scale": 0.5}}, 0.5),
    "value_clip": ({"advantage": {"type": "gae", "clip": 0.2}}, 0.2),
}


def trajectory(name: str, reward: float, *lengths: int) -> Trajectory:
    calls = [
        build.transition(f"{name}/{at}", suffix_ids=[1, at], sampled_ids=[2] * length)
        for at, length in enumerate(lengths)
    ]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=calls)


GROUP = [trajectory("a0", 1.0, 4, 1), trajectory("a1", 0.0, 2), trajectory("a2", 1.0, 3), trajectory("a3", 0.0, 1)]


def test_every_field_of_the_loss_is_listed_here() -> None:
    of_plugins = {"settings", "code_hash"}  # see test_plugins.py
    assert set(EFFECTS) | of_plugins == {field.name for field in dataclasses.fields(Loss)}


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_of_the_loss_is_a_setting(field: str) -> None:
    """Kill switch: a setting that went nowhere would leave the field as it is by default."""
    settings, value = EFFECTS[field]
    assert getattr(LightningRL(**settings).loss_terms, field) == value
    assert getattr(LightningRL().loss_terms, field) != value


@pytest.mark.parametrize(("loss", "low", "high"), [("ppo_clip", 0.2, 0.28), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 4.0)])
def test_a_loss_comes_with_the_bounds_of_its_paper(loss: Any, low: float, high: float) -> None:
    terms = LightningRL(loss=loss).loss_terms
    assert (terms.clip_low, terms.clip_high) == (low, high)
    assert LightningRL(loss={"type": loss, "clip_low": 0.0}).loss_terms.clip_low == 0.0  # type: ignore[arg-type]


def test_only_a_kl_needs_a_reference() -> None:
    assert LightningRL(kl=0.1).needs_reference
    assert not LightningRL().needs_reference


def weights(rows: list[TrainingSequence], column: str) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for row in rows:
        values = getattr(row, column)
        found.setdefault(row.rollout_id, set()).update(
            round(value, 9) for value, sampled in zip(values, row.mask, strict=True) if sampled
        )
    return found


def test_a_fixed_length_weighs_every_token_alike_whatever_is_in_the_minibatch() -> None:
    algorithm = LightningRL(minibatches=2, aggregation=FixedLength(length=10))
    for rows in algorithm.plan([GROUP], seed=0).minibatches:
        assert set().union(*weights(rows, "weights").values()) == {round(1 / 20, 9)}


def test_every_epoch_goes_over_every_rollout_once_in_an_order_of_its_own() -> None:
    groups = [[dataclasses.replace(one, rollout_id=f"{g}{one.rollout_id}") for one in GROUP] for g in "xyz"]
    algorithm = LightningRL(epochs=3, minibatches=2)
    plan = algorithm.plan(groups, seed=1)
    assert len(plan.minibatches) == 6
    epochs = [plan.minibatches[start : start + 2] for start in (0, 2, 4)]
    placed = [[{row.rollout_id for row in minibatch} for minibatch in epoch] for epoch in epochs]
    for epoch in placed:
        assert set.union(*epoch) == {one.rollout_id for group in groups for one in group}
        assert not set.intersection(*epoch)
    assert placed[0] != placed[1] != placed[2]
    assert plan.stats["sequences"] == sum(map(len, epochs[0]))
    assert algorithm.plan(groups, seed=1) == plan
    once = dataclasses.replace(algorithm, epochs=1)
    assert once.plan(groups, seed=1).minibatches == plan.minibatches[:2]


@pytest.mark.parametrize("advantage", ["gae", "reinforce", "reinforce_pp"])
def test_a_group_may_be_one_rollout_where_nothing_is_compared_within_it(advantage: str) -> None:
    assert LightningRL(advantage=advantage, group_size=1).group_size == 1


def test_reinforce_takes_several_updates_where_importance_corrects_for_the_earlier_ones() -> None:
    assert LightningRL(loss="reinforce", correction="importance", epochs=2).loss_terms.importance == "token"


@pytest.mark.parametrize(
    ("settings", "old_logprobs"),
    [
        ({}, False),
        ({"correction": "old_policy"}, True),
        ({"correction": "importance"}, True),  # of the ratio to the sampler it would be the square
        ({"correction": "importance", "loss": "reinforce"}, False),
        ({"correction": "ratio_mask"}, False),
    ],
)
def test_importance_sampling_takes_a_loss_s_ratio_to_the_old_policy(
    settings: dict[str, Any], old_logprobs: bool
) -> None:
    assert LightningRL(**settings).old_logprobs is old_logprobs


def test_a_name_a_table_and_an_object_are_one_setting() -> None:
    given: list[Any] = ["gspo", {"type": "gspo"}, Gspo()]
    assert [LightningRL(loss=one).loss for one in given] == [Gspo()] * 3
    assert LightningRL(loss={"clip_high": 0.3}).loss == PpoClip(clip_high=0.3)  # type: ignore[arg-type]
    assert [LightningRL(kl=one).kl for one in (0.1, KlTerm(coefficient=0.1))] == [KlTerm(coefficient=0.1)] * 2


def test_a_table_of_plain_values_makes_the_same_algorithm() -> None:
    one = LightningRL(loss=PpoClip(dual_clip=3.0), credit="gigpo", aggregation=FixedLength(length=3), kl=0.1)
    assert LightningRL(**json.loads(json.dumps(as_table(one)))) == one


RULES = "counterfactual, decisive, discounted, forked, gigpo, grouped_gae, judge, last, learned, step_rewards, tree, uniform"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"group_size": 1}, "group_size: expected a whole number of at least 2 with advantage = 'grpo', got 1"),
    ({"minibatches": 0}, "minibatches: expected a number greater than 0, got 0"),
    ({"dynamic_sampling": 1}, "dynamic_sampling: expected a valid boolean, got 1"),
    ({"entropy": float("nan")}, "entropy: expected a finite number, got nan"),
    ({"solved_bonus": -1}, "solved_bonus: expected a number greater than or equal to 0, got -1"),
    ({"reward_weights": {"answer": "1"}}, "reward_weights.answer: expected a valid number, got '1'"),
    ({"reward_weights": 3}, "reward_weights: expected a table, got 3"),
    ({"credit": "luck"}, f"credit: expected one of {RULES}, or file.py:name of your own, got 'luck'"),
    ({"credit": {"type": "uniform", "gamma": 0.5}}, "credit.gamma: no such setting; known here: none"),
    (
        {"advantage": "gea"},
        "advantage: expected one of dr_grpo, grpo, maxrl, reinforce, reinforce_pp, reinforce_pp_baseline, rloo, "
        "or file.py:name of your own, got 'gea'",
    ),
    (
        {"advantage": {"type": "rloo", "normalize_std": False}},
        "advantage.normalize_std: no such setting; 'rloo' has none",
    ),
    ({"advantage": {"type": "gae", "lambda": 1.0}}, "advantage.lambda: no such setting; did you mean 'lam'?"),
    (
        {"advantage": "gae", "credit": "last"},
        "credit: expected none with advantage = 'gae', whose critic is one, got 'last'",
    ),
    (
        {"loss": "sft"},
        "loss: expected one of cispo, gspo, ppo_clip, reinforce, or file.py:name of your own, got 'sft'",
    ),
    ({"loss": {"clip_low": 1.5}}, "loss.clip_low: expected a number less than or equal to 1, got 1.5"),
    (
        {"loss": {"type": "gspo", "dual_clip": 3.0}},
        "loss.dual_clip: no such setting; known here: type, clip_low, clip_high",
    ),
    (
        {"loss": "reinforce", "minibatches": 1, "epochs": 2},
        "epochs: expected 1 with loss = 'reinforce' without importance sampling, whose gradient holds for fresh samples "
        "only, got 2",
    ),
    (
        {"correction": "old"},
        "correction: expected one of 'old_policy', 'importance', 'ratio_mask', 'off_policy_mask', got 'old'",
    ),
    ({"correction": {"type": "importance", "level": "row"}}, "correction.level: expected 'token' or 'call', got 'row'"),
    ({"correction": {"type": "ratio_mask", "low": 1.0}}, "correction.low: expected a number less than 1, got 1.0"),
    ({"kl": "0.1"}, "kl.coefficient: expected a valid number, got '0.1'"),
    ({"kl": {"estimator": "k4"}}, "kl.estimator: expected 'k1', 'k2' or 'k3', got 'k4'"),
    (
        {"aggregation": "mean"},
        "aggregation: expected one of fixed_length, rollout_mean, sequence_mean, token_mean, or file.py:name of your "
        "own, got 'mean'",
    ),
    ({"aggregation": "fixed_length"}, "aggregation.length: is required"),
    ({"rollouts": "forest"}, "rollouts: expected one of 'independent', 'tree', got 'forest'"),
    (
        {"rollouts": "tree", "group_size": 7},
        "group_size: expected 2 × (1 + 1 × N) rollouts with 2 roots and 1 rounds, so 4, 6, …, got 7",
    ),
    ({"credit": "tree"}, "credit: 'tree' is the credit of rollouts = 'tree', which brings it along"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_a_wrong_setting_is_named_with_what_was_expected(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LightningRL(**settings)
    assert str(caught.value) == f"algorithm.{sentence}"


@pytest.mark.parametrize("settings", [{"credit": "gigpo"}, {"advantage": "rloo"}])
def test_trees_bring_their_credit_along_which_compares_by_groups(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.rollouts: 'tree' brings its credit along.* got '"):
        LightningRL(rollouts="tree", **settings)
