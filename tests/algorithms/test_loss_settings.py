"""The settings of LightningRL that make an engine's loss, its weights and the updates of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agentlightning.algorithms import LightningRL
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, TrainingSequence, Trajectory, Transition

EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "name": ({"loss": "cispo"}, "cispo"),
    "clip_low": ({"clip_low": 0.1}, 0.1),
    "clip_high": ({"clip_high": 0.4}, 0.4),
    "dual_clip": ({"dual_clip": 3.0}, 3.0),
    "importance": ({"importance": "call", "ratio": "old_policy"}, "call"),
    "importance_cap": ({"importance": "token", "importance_cap": 1.5}, 1.5),
    "ratio_mask": ({"ratio_mask": "token"}, "token"),
    "ratio_mask_low": ({"ratio_mask": "token", "ratio_mask_low": 0.8}, 0.8),
    "ratio_mask_high": ({"ratio_mask": "token", "ratio_mask_high": 2.0}, 2.0),
    "off_policy_kl": ({"off_policy_kl": 0.5}, 0.5),
    "kl": ({"kl": 0.01}, 0.01),
    "kl_estimator": ({"kl": 0.01, "kl_estimator": "k1"}, "k1"),
    "entropy": ({"entropy": 0.02}, 0.02),
    "value": ({"advantage": "gae", "critic": {"backbone_grad_scale": 0.5}}, 0.5),
    "value_clip": ({"advantage": "gae", "critic": {"clip": 0.2}}, 0.2),
}


def trajectory(name: str, reward: float, *lengths: int) -> Trajectory:
    transitions = [
        Transition(
            call_id=f"{name}/{place}",
            suffix_ids=[1, place],
            sampled_ids=[2] * length,
            logprobs=[-1.0] * length,
            versions=[],
        )
        for place, length in enumerate(lengths)
    ]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=transitions)


GROUP = [trajectory("a0", 1.0, 4, 1), trajectory("a1", 0.0, 2), trajectory("a2", 1.0, 3), trajectory("a3", 0.0, 1)]


def test_every_field_of_the_loss_is_listed_here() -> None:
    assert set(EFFECTS) | {"settings", "code_hash"} == {
        field.name for field in dataclasses.fields(Loss)
    }  # of plug-ins: test_plugins.py


@pytest.mark.parametrize("field", EFFECTS)
def test_every_field_of_the_loss_is_a_setting(field: str) -> None:
    """Kill switch: a setting that went nowhere would leave the field as it is by default."""
    settings, value = EFFECTS[field]
    assert getattr(LightningRL(**settings).loss_terms, field) == value
    assert getattr(LightningRL().loss_terms, field) != value


@pytest.mark.parametrize(("loss", "low", "high"), [("ppo_clip", 0.2, 0.28), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 0.28)])
def test_a_loss_comes_with_the_bounds_of_its_paper(loss: Any, low: float, high: float) -> None:
    terms = LightningRL(loss=loss).loss_terms
    assert (terms.clip_low, terms.clip_high) == (low, high)
    assert LightningRL(loss=loss, clip_low=0.0).loss_terms.clip_low == 0.0


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


def test_kl_and_entropy_are_aggregated_their_own_way() -> None:
    algorithm = LightningRL(
        minibatches=1, kl=0.1, kl_aggregation="rollout_mean", entropy=0.1, entropy_aggregation="sequence_mean"
    )
    [rows] = algorithm.plan([GROUP], seed=0).minibatches
    assert weights(rows, "weights")["a0"] == {round(1 / 11, 9)}
    assert weights(rows, "kl_weights")["a0"] == {round(1 / 20, 9)}
    assert weights(rows, "entropy_weights")["a0"] == {round(1 / 20, 9), round(1 / 5, 9)}
    [plain] = LightningRL(minibatches=1, kl=0.1, entropy=0.1).plan([GROUP], seed=0).minibatches
    assert {row.kl_weights for row in plain} == {row.entropy_weights for row in plain} == {None}


def test_a_fixed_length_weighs_every_token_alike_whatever_is_in_the_minibatch() -> None:
    algorithm = LightningRL(minibatches=2, aggregation="fixed_length", fixed_length=10)
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
    assert LightningRL(loss="reinforce", importance="token", epochs=2).loss_terms.importance == "token"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"loss": "sft"},
            "algorithm.loss: expected one of cispo, gspo, ppo_clip, reinforce, or file.py:name of your own, got 'sft'",
        ),
        ({"loss_settings": {"c": 1}}, "algorithm.loss_settings: has no effect with loss = 'ppo_clip', which has none"),
        ({"epochs": 0}, "algorithm.epochs: expected a number greater than 0, got 0"),
        (
            {"loss": "reinforce", "minibatches": 1, "epochs": 2},
            "algorithm.epochs: expected 1 with loss = 'reinforce' without importance, whose gradient holds for fresh "
            "samples only, got 2",
        ),
        (
            {"loss": "reinforce", "minibatches": 1, "clip_low": 0.2},
            "algorithm.clip_low: has no effect with loss = 'reinforce'",
        ),
        (
            {"loss": "reinforce", "minibatches": 1, "ratio": "old_policy"},
            "algorithm.ratio: 'old_policy' has no effect with loss = 'reinforce', which has no ratio",
        ),
        ({"ratio": "old"}, "algorithm.ratio: expected 'rollout' or 'old_policy', got 'old'"),
        ({"importance": "row"}, "algorithm.importance: expected 'token' or 'call', got 'row'"),
        ({"ratio_mask": []}, "algorithm.ratio_mask: expected 'token' or 'call', got []"),
        ({"kl": "0.1"}, "algorithm.kl: expected a valid number, got '0.1'"),
        ({"kl": None}, "algorithm.kl: expected a valid number, got None"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator: expected 'k1', 'k2' or 'k3', got 'k4'"),
        ({"kl_aggregation": "token_mean"}, "algorithm.kl_aggregation: has no effect with kl = 0"),
        ({"entropy_aggregation": "token_mean"}, "algorithm.entropy_aggregation: has no effect with entropy = 0"),
        (
            {"aggregation": "fixed_length"},
            "algorithm.fixed_length: expected a number of tokens, which the aggregation 'fixed_length' divides by",
        ),
        (
            {"advantage": "dr_grpo"},
            "algorithm.fixed_length: expected a number of tokens, which the aggregation 'fixed_length' divides by; it comes "
            "with advantage = 'dr_grpo'",
        ),
        (
            {"advantage": "dr_grpo", "loss": "gspo", "fixed_length": 10},
            "algorithm.aggregation: expected one, since loss = 'gspo' comes with 'sequence_mean' and advantage = 'dr_grpo' "
            "with 'fixed_length'",
        ),
        ({"fixed_length": 100}, "algorithm.fixed_length: has no effect without an aggregation 'fixed_length'"),
        ({"clip_low": 1.5}, "algorithm.clip_low: expected a number less than or equal to 1, got 1.5"),
        ({"ratio_mask_low": 1.0}, "algorithm.ratio_mask_low: expected a number less than 1, got 1.0"),
        ({"ratio_mask_high": 1}, "algorithm.ratio_mask_high: expected a number greater than 1, got 1"),
        ({"importance_cap": 0}, "algorithm.importance_cap: expected a number greater than 0, got 0"),
        ({"off_policy_kl": -0.1}, "algorithm.off_policy_kl: expected a number greater than or equal to 0, got -0.1"),
        ({"kl": -1.0}, "algorithm.kl: expected a number greater than or equal to 0, got -1.0"),
        ({"kl": float("inf")}, "algorithm.kl: expected a finite number, got inf"),
        ({"dual_clip": True}, "algorithm.dual_clip: expected a valid number, got True"),
        ({"reward_weights": 3}, "algorithm.reward_weights: expected a table, got 3"),
        (
            {"credit": "grouped_gae", "credit_settings": {"baseline": "turn", "key": "keys.py:state"}},
            "algorithm.credit_settings.key: has no effect with baseline = 'turn'",
        ),
        (
            {"credit": "forked", "credit_settings": {"calls": 0, "choose": "variance"}},
            "algorithm.credit_settings.choose: has no effect with calls = 0",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LightningRL(**settings)
    assert str(caught.value) == sentence
