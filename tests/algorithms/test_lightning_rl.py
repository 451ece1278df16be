from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapters.sequences import Aggregation, token_weights
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.losses import FixedLength
from agentlightning.training_types import TrainingSequence, Trajectory
from build import group, trajectory


def test_a_group_of_two_by_hand() -> None:
    # rewards 1 and 0: mean 0.5, sample deviation sqrt(0.5); 2 rollouts of 2 calls of 2 tokens
    plan = LightningRL(minibatches=1).plan([group("a", 1.0, 0.0)], seed=0)
    [minibatch] = plan.minibatches
    by_rollout = {row.rollout_id: row for row in minibatch}
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert by_rollout["a0"].tokens == [1, 10, 10, 2, 11, 11]
    assert by_rollout["a0"].advantages == pytest.approx([0, expected, expected, 0, expected, expected])
    assert by_rollout["a1"].advantages == pytest.approx([0, -expected, -expected, 0, -expected, -expected])
    assert by_rollout["a1"].weights == [0, 1 / 8, 1 / 8, 0, 1 / 8, 1 / 8]
    assert plan.outcomes == {"a0": "trained", "a1": "trained"}
    assert plan.stats == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": math.sqrt(0.5),
            "groups_with_signal": 1.0,
            "solved_groups": 0.0,
            "unsolved_groups": 0.0,
            "turns": 2.0,
            "tokens_sampled": 8.0,
            "tokens_trained": 8.0,
            "zero_variance": 0.0,
            "sequences": 2.0,
        }
    )


def forced(one: Trajectory, *spans: list[int]) -> Trajectory:
    """The rollout with a grammar on each call that forced these sampled tokens."""
    return replace(one, transitions=[replace(call, decoding={"forced": [*spans]}) for call in one.transitions])


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp_baseline"])
def test_forced_tokens_count_in_no_length_and_a_rollout_of_them_alone_trains_nothing(advantage: str) -> None:
    rollouts = group("a", 1.0, 0.0, 1.0)
    some = [forced(rollouts[0], [0, 1]), rollouts[1], forced(rollouts[2], [0, 2])]
    plan = LightningRL(minibatches=1, advantage=advantage).plan([some], seed=0)
    assert plan.outcomes == {"a0": "trained", "a1": "trained", "a2": "zero_variance"}
    assert (plan.stats["tokens_sampled"], plan.stats["tokens_trained"]) == (12.0, 6.0)
    [minibatch] = plan.minibatches
    rows = {row.rollout_id: row for row in minibatch}
    assert (rows.keys(), rows["a0"].mask) == ({"a0", "a1"}, [False, False, True, False, False, True])
    assert rows["a1"].weights == pytest.approx([0, 1 / 6, 1 / 6, 0, 1 / 6, 1 / 6])
    if advantage != "grpo":  # 1/3 on 2 tokens and -2/3 on 4: mean -1/3, sample variance 0.8/3
        assert rows["a0"].advantages[2] == pytest.approx((2 / 3) / math.sqrt(0.8 / 3))
    nothing = LightningRL(minibatches=1, advantage=advantage).plan([[some[2], replace(some[2], reward=0.0)]], seed=0)
    assert nothing.minibatches == []


def test_rollouts_of_a_group_without_variance_are_dropped_and_counted() -> None:
    plan = LightningRL(minibatches=1).plan([group("a", 1.0, 0.0), group("b", 0.7, 0.7, 0.7), group("c", 0.0)], seed=0)
    assert plan.outcomes == {"a0": "trained", "a1": "trained"} | dict.fromkeys(
        ["b0", "b1", "b2", "c0"], "zero_variance"
    )
    assert {row.rollout_id for row in plan.minibatches[0]} == {"a0", "a1"}
    assert weight(plan.minibatches[0]) == pytest.approx(8 / 24)  # the tokens of all six rollouts count
    assert plan.stats["groups_with_signal"] == pytest.approx(1 / 3)
    assert plan.stats["zero_variance"] == pytest.approx(4 / 6)
    assert (plan.stats["tokens_sampled"], plan.stats["tokens_trained"]) == (24.0, 8.0)


def weight(minibatch: list[TrainingSequence]) -> float:
    return math.fsum(weight for row in minibatch for weight in row.weights)


def test_a_success_among_failures_weighs_as_one_of_all_that_were_sampled() -> None:
    """Rewards [1, 0 x 7] under plain REINFORCE, where a failure has no gradient."""
    algorithm = LightningRL(advantage="reinforce", loss="reinforce", minibatches=1)
    [minibatch] = algorithm.plan([group("a", 1.0, *[0.0] * 7)], seed=0).minibatches
    assert {row.rollout_id for row in minibatch} == {"a0"}
    assert weight(minibatch) == pytest.approx(1 / 8)


@pytest.mark.parametrize("kl", [0.0, 1e-6])
@pytest.mark.parametrize("informative", [8, 32])
def test_the_updates_of_a_step_weigh_alike_however_many_groups_are_solved_and_whatever_the_kl(
    informative: int, kl: float
) -> None:
    """8 of 32 groups informative: four updates of a quarter each, not one of all of them."""
    groups = [
        [trajectory(f"{place}-{member}", float(member % 2 == 0) if place < informative else 0.0) for member in range(8)]
        for place in range(32)
    ]
    plan = LightningRL(minibatches=4, kl=kl).plan(groups, seed=0)
    assert len(plan.minibatches) == 4
    for minibatch in plan.minibatches:
        signal = [row for row in minibatch if any(row.advantages)]
        assert len({row.rollout_id for row in signal}) == 2 * informative
        assert weight(signal) == pytest.approx(informative / 32)
        assert len({row.rollout_id for row in minibatch}) == (64 if kl else 2 * informative)


@pytest.mark.parametrize(("rewards", "updates"), [([1, 0], 1), ([1, 0, 1], 1), ([1, 0, 1, 0, 1], 2), ([1, 0] * 9, 4)])
def test_no_update_rests_on_a_single_rollout(rewards: list[float], updates: int) -> None:
    groups = [group("a", *rewards), group("b", *[0.0] * 20)]
    plan = LightningRL(minibatches=4).plan(groups, seed=0)
    assert len(plan.minibatches) == updates
    assert min(len({row.rollout_id for row in minibatch}) for minibatch in plan.minibatches) >= 2


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    groups = [group("a", 0.1 + 0.2, 0.3, 0.3), group("b", 1.0, 0.0)]
    plan = LightningRL(dynamic_sampling=True).plan(groups, seed=0)
    assert plan.outcomes == dict.fromkeys(["a0", "a1", "a2"], "zero_variance") | dict.fromkeys(["b0", "b1"], "trained")
    assert (plan.resample, plan.stats["groups_with_signal"]) == (["a"], 0.5)
    close = LightningRL().plan([group("a", 1.0, 1.0 + 1e-7)], seed=0)
    assert set(close.outcomes.values()) == {"trained"}


@pytest.mark.parametrize("credit", ["step_rewards", "gigpo", "discounted", "grouped_gae"])
def test_step_rewards_that_add_up_to_the_same_but_for_rounding_are_no_signal(credit: str) -> None:
    one, other = group("a", 0.3, 0.3)
    steps = [(0.1, 0.2), (0.2, 0.1)] if credit == "grouped_gae" else [(0.1 + 0.2, 0.0), (0.3, 0.0)]
    found = [
        replace(each, transitions=[replace(call, reward=step) for call, step in zip(each.transitions, of, strict=True)])
        for each, of in zip((one, other), steps, strict=True)
    ]
    if credit == "grouped_gae":  # the same steps, in another order of their sum
        found = [replace(found[0], reward=0.1 + 0.2), replace(found[0], rollout_id="a1", reward=0.3)]
    plan = LightningRL(credit=credit).plan([found], seed=0)
    assert set(plan.outcomes.values()) == {"zero_variance"}


def test_the_recipe_of_reinforce_pp_baseline_replaces_solved_groups_and_whitens_over_the_others() -> None:
    """OpenRLHF: reinforce_baseline, dynamic filtering, a KL loss of k2."""
    groups = [group("a", 1.0, 0.0, 0.0), group("b", 1.0, 1.0, 1.0)]
    algorithm = LightningRL(advantage="reinforce_pp_baseline", dynamic_sampling=True, kl=0.01)
    plan = algorithm.plan(groups, seed=0)
    assert plan.resample == ["b"]
    assert (plan.loss.kl, plan.loss.kl_estimator) == (0.01, "k2")
    alone = algorithm.plan(groups[:1], seed=0)
    assert plan.minibatches == alone.minibatches
    first = next(row for row in plan.minibatches[0] if row.rollout_id == "a0")
    # 2/3 on 4 tokens, -1/3 on 8: mean 0, sample variance 24/9/11
    assert max(first.advantages) == pytest.approx((2 / 3) / math.sqrt(24 / 9 / 11))
    assert LightningRL(kl=0.01).loss_terms.kl_estimator == "k3"


def test_truncated_completions_can_be_left_out_of_the_loss_and_are_still_compared() -> None:
    one, other, third = group("a", 0.0, 1.0, 0.0)
    cut = replace(one, transitions=[one.transitions[0], replace(one.transitions[1], truncated=True)])
    all_cut = replace(third, transitions=[replace(call, truncated=True) for call in third.transitions])
    [rows] = LightningRL(truncated="mask").plan([[cut, other, all_cut]], seed=0).minibatches
    found = {row.rollout_id: row for row in rows}
    assert {name: sum(row.mask) for name, row in found.items()} == {"a0": 2, "a1": 4}
    assert weight(rows) == pytest.approx(1.0)  # over the six tokens that are left
    expected = (2 / 3) / (statistics.stdev([0.0, 1.0, 0.0]) + 1e-4)  # the baseline is that of all three
    assert max(found["a1"].advantages) == pytest.approx(expected)
    assert len(LightningRL().plan([[cut, other, all_cut]], seed=0).minibatches[0]) == 3


@pytest.mark.parametrize(("tokens", "penalty"), [(79, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_the_soft_penalty_falls_over_the_last_tokens(tokens: int, penalty: float) -> None:
    """DAPO, equation 13, with a limit of 100 and a buffer of 20."""
    rollouts = [trajectory("a0", 1.0, calls=1, length=tokens), trajectory("a1", 0.0, calls=2)]
    algorithm = LightningRL(truncated={"type": "soft_penalty", "length": 100, "buffer": 20})
    [settled] = algorithm.settled([rollouts])
    assert [one.reward for one in settled] == [1.0 + penalty, 0.0]


@pytest.mark.parametrize("replaced", [4, 36])
def test_groups_that_dynamic_sampling_replaced_take_no_update_away(replaced: int) -> None:
    groups = [group("a", 1.0, 0.0, 1.0, 0.0), group("b", *[0.0] * replaced)]
    plan = LightningRL(dynamic_sampling=True, minibatches=4).plan(groups, seed=0)
    assert [weight(minibatch) for minibatch in plan.minibatches] == pytest.approx([1.0] * 2)


@pytest.mark.parametrize("term", ["kl", "entropy"])
def test_kl_and_entropy_are_of_all_rollouts(term: str) -> None:
    """DeepSeekMath (2024), equation 3: the KL term is outside of the advantage, so every completion has one."""
    groups = [group("a", 1.0, 0.0), group("b", 1.0, 1.0)]
    plan = LightningRL(**{term: 0.1}).plan(groups, seed=0)  # type: ignore[arg-type]
    rows = {row.rollout_id: row for minibatch in plan.minibatches for row in minibatch}
    assert rows.keys() == {"a0", "a1", "b0", "b1"}
    assert not any(rows["b0"].advantages)
    assert [weight(minibatch) for minibatch in plan.minibatches] == pytest.approx([1.0])
    assert plan.outcomes["b0"] == "zero_variance"


def test_the_solved_bonus_trains_solved_groups_and_leaves_failed_ones_out() -> None:
    plan = LightningRL(minibatches=1, solved_bonus=0.3).plan([group("a", 1.0, 1.0), group("b", 0.0, 0.0)], seed=0)
    assert plan.outcomes == {"a0": "trained", "a1": "trained", "b0": "zero_variance", "b1": "zero_variance"}
    assert {max(row.advantages) for row in plan.minibatches[0]} == {0.3}


def test_the_seed_decides_the_minibatches_and_nothing_else() -> None:
    groups = [group("a", 1.0, 0.0, 0.0, 1.0), group("b", 1.0, 0.0, 0.5, 0.25)]
    algorithm = LightningRL(minibatches=4)
    assert algorithm.plan(groups, seed=3) == algorithm.plan(groups, seed=3)
    one, other = algorithm.plan(groups, seed=3), algorithm.plan(groups, seed=4)
    assert one.minibatches != other.minibatches
    assert (one.outcomes, one.stats) == (other.outcomes, other.stats)


rewards = st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(rewards, st.integers(1, 3)), max_size=4),
    st.integers(1, 5),
    st.sampled_from(["token_mean", "sequence_mean", "rollout_mean"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_every_sampled_token_of_a_trained_rollout_is_trained_once(
    drawn: list[tuple[list[float], int]],
    minibatches: int,
    aggregation: str,
    dynamic_sampling: bool,
    seed: int,
) -> None:
    groups = [group("abcd"[index], *values, calls=calls) for index, (values, calls) in enumerate(drawn)]
    algorithm = LightningRL(minibatches=minibatches, aggregation=aggregation, dynamic_sampling=dynamic_sampling)
    plan = algorithm.plan(groups, seed)
    placed = [{row.rollout_id for row in minibatch} for minibatch in plan.minibatches]
    trained = {rollout for rollout, outcome in plan.outcomes.items() if outcome == "trained"}
    assert sum(map(len, placed)) == len(trained)  # no rollout is split over minibatches
    assert set().union(*placed) == trained
    for one in (one for members in groups for one in members):
        tokens = sum(sum(row.mask) for part in plan.minibatches for row in part if row.rollout_id == one.rollout_id)
        sampled = sum(len(transition.sampled_ids) for transition in one.transitions)
        assert tokens == (sampled if one.rollout_id in trained else 0)
    for minibatch in plan.minibatches:
        assert 0 < weight(minibatch) <= 1.0 + 1e-9
        assert weight(minibatch) == pytest.approx(1.0) or not dynamic_sampling


def test_a_rollout_without_a_known_reward_is_dropped_and_counted() -> None:
    plan = LightningRL(minibatches=1).plan([group("a", 1.0, 0.0, math.nan)], seed=0)
    assert plan.outcomes == {"a0": "trained", "a1": "trained", "a2": "invalid"}
    assert plan.stats["unrewarded"] == 1.0
    assert plan.stats["reward_mean"] == 0.5


def test_dynamic_sampling_names_the_groups_from_which_nothing_is_learned() -> None:
    groups = [group("a", 1.0, 0.0), group("b", 1.0, 1.0), group("c", math.nan, math.nan)]
    assert LightningRL(dynamic_sampling=True).plan(groups, 0).resample == ["b", "c"]


@pytest.mark.parametrize(
    ("settings", "aggregation"),
    [
        ({}, "token_mean"),
        ({"loss": "gspo"}, "sequence_mean"),
        ({"aggregation": FixedLength(length=10)}, "fixed_length"),
        ({"loss": "gspo", "aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_a_loss_comes_with_the_aggregation_of_its_paper(settings: dict[str, Any], aggregation: Aggregation) -> None:
    calls = [trajectory("a0", 1.0, calls=1, length=4), trajectory("a1", 0.0, calls=3, length=2)]
    [minibatch] = LightningRL(minibatches=1, **settings).plan([calls], seed=0).minibatches
    expected = token_weights(calls, aggregation, 10)
    found = {row.rollout_id: [one for one in row.weights if one] for row in minibatch}
    assert found["a0"] == pytest.approx(expected[0] * 4)
    assert found["a1"] == pytest.approx([one for one in expected[1] for _ in range(2)])


def test_reinforce_pp_has_the_kl_in_the_reward_of_each_token_and_none_in_the_loss() -> None:
    groups = [group("a", 1.0, 0.0)]
    algorithm = LightningRL(advantage="reinforce_pp", kl=0.1, minibatches=1)
    reference = {
        call.call_id: [-1.0, -1.5] for one in groups[0] for call in one.transitions
    }  # sampled with -1: gaps 0, 0.5
    plan = algorithm.plan(groups, seed=0, reference=reference)
    togo = [1 - 0.1, 1 - 0.1, 1 - 0.05, 1 - 0.05]
    tokens = [*togo, *(one - 1 for one in togo)]
    deviation = statistics.stdev(tokens)
    expected = [(one - statistics.fmean(tokens)) / deviation for one in tokens]
    rows = {row.rollout_id: row for row in plan.minibatches[0]}
    found = [
        value
        for key in ("a0", "a1")
        for value, sampled in zip(rows[key].advantages, rows[key].mask, strict=True)
        if sampled
    ]
    assert found == pytest.approx(expected, abs=1e-6)
    assert plan.loss.kl == 0
    assert algorithm.needs_reference
    assert plan.stats["ref_kl"] == pytest.approx(0.25)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline"])
def test_calls_that_a_credit_rule_leaves_out_are_not_trained_by_a_normalisation_over_the_step(advantage: str) -> None:
    algorithm = LightningRL(advantage=advantage, credit="last")
    found = [row for members in (group("a", 1.0, 0.0), group("b", 1.0, 0.0)) for row in algorithm.advantages(members)]
    assert [first for first, _ in found] == [0.0] * 4

    assert found[0][1] > 0 > found[1][1]


@pytest.mark.parametrize(
    ("groups", "solved", "unsolved"),
    [
        ([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)], 0.25, 0.5),
        ([(0.0, 0.0), (0.0, 0.0)], 0.0, 1.0),  # with one reward alone, above 0 is success
        ([(1.0, 1.0), (1.0, 1.0)], 1.0, 0.0),
        ([(0.4, 0.4), (-1.0, 1.0)], 0.0, 0.0),  # alike, and neither the best nor the worst
    ],
)
def test_groups_in_which_all_succeed_or_all_fail_are_counted_apart(
    groups: list[tuple[float, ...]], solved: float, unsolved: float
) -> None:
    stats = LightningRL(group_size=2).plan([group(chr(97 + i), *each) for i, each in enumerate(groups)], seed=0).stats
    assert (stats["solved_groups"], stats["unsolved_groups"]) == (solved, unsolved)
