"""Advantage gae: from a critic's values to the rows that an engine trains on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import build
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.critic import Estimate, Gae, bilevel_gae, estimates, explained, gae
from agentlightning.training_types import Trajectory


def trajectory(name: str, reward: float, lengths: tuple[int, ...], steps: tuple[float, ...] = ()) -> Trajectory:
    """Calls of so many tokens, each with a prompt of its own."""
    transitions = [
        build.transition(f"{name}/{at}", suffix_ids=[1, at], sampled_ids=[2] * length, reward=(steps or (0.0,) * 9)[at])
        for at, length in enumerate(lengths)
    ]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=transitions)


PAIR = [trajectory("a0", 1.0, (2, 1)), trajectory("a1", 0.0, (1,))]
VALUES = {"a0/0": [0.25, 0.5], "a0/1": [0.5], "a1/0": [0.5]}
RAW = Gae(call_gamma=0.5, lam=1.0, normalize_std=False)


def test_two_rollouts_by_hand() -> None:
    # as two calls by hand, below; the other rollout: 0 - 0.5
    first, second = estimates(PAIR, VALUES, RAW)
    assert first == Estimate(
        advantages=[[0.25, 0.0], [0.5]],
        returns=[[0.5, 0.5], [1.0]],
        values=[[0.25, 0.5], [0.5]],
        masks=[[True] * 2, [True]],
        rewards=[0.0, 1.0],
    )
    assert second == Estimate(advantages=[[-0.5]], returns=[[0.0]], values=[[0.5]], masks=[[True]], rewards=[0.0])


def test_tokens_that_a_grammar_forced_are_no_actions_of_the_critic() -> None:
    # [forced, 0.25, forced, 0.5] and a call that was forced as a whole are the pair above with calls of 2 and 1 tokens
    calls = trajectory("a0", 1.0, (4, 2)).transitions
    calls = [
        replace(call, decoding={"forced": spans})
        for call, spans in zip(calls, [[[0, 1], [2, 3]], [[0, 2]]], strict=True)
    ]
    some = Trajectory(rollout_id="a0", group_id="a", reward=1.0, transitions=calls)
    [one] = estimates([some], {"a0/0": [9.0, 0.25, 9.0, 0.5], "a0/1": [9.0, 0.5]}, RAW)
    assert (one.advantages, one.returns) == ([[0.25, 0.0], [0.5]], [[0.5, 0.5], [1.0]])
    assert one.by_token(one.returns) == [[0.0, 0.5, 0.0, 0.5], [0.0, 0.0]]
    assert explained([one]) == {"value_mean": 0.375}
    whole = Trajectory(rollout_id="b", group_id="b", reward=0.0, transitions=calls[1:])
    values = {"a0/0": [9.0, 0.25, 9.0, 0.5], "a0/1": [9.0, 0.5]}
    white = estimates([some, whole], values, Gae(call_gamma=0.5, lam=1.0))
    assert white[0].advantages[0] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert (white[0].advantages[1], white[1].advantages) == ([0.0], [[0.0]])


def test_a_call_earns_its_step_rewards_and_the_last_one_the_final_reward_too() -> None:
    [one] = estimates(
        [trajectory("a", 1.0, (1, 1), (0.5, 0.25))], {"a/0": [0.0], "a/1": [0.0]}, Gae(normalize_std=False)
    )
    assert one.returns == [[0.5 + 0.95 * 1.25], [1.25]]


def test_normalised_advantages_have_mean_0_and_deviation_1_over_tokens() -> None:
    long = [trajectory("a0", 1.0, (6,)), trajectory("a1", 0.0, (1,))]
    found = estimates(long, {"a0/0": [0.5] * 6, "a1/0": [0.5]}, Gae(lam=1.0))
    # six tokens of 0.5 and one of -0.5: mean 2.5 / 7, sample variance 1 / 7
    assert found[0].advantages == [[pytest.approx((0.5 - 2.5 / 7) * math.sqrt(7))] * 6]
    assert found[1].advantages == [[pytest.approx((-0.5 - 2.5 / 7) * math.sqrt(7))]]
    assert found[0].returns == [[1.0] * 6]


def test_a_critic_that_knows_everything_explains_all_and_a_constant_nothing() -> None:
    def of(values: list[float]) -> dict[str, float]:
        return explained(
            [
                Estimate(
                    advantages=[[0.0] * 4],
                    returns=[[0.0, 0.0, 1.0, 1.0]],
                    values=[values],
                    masks=[[True] * 4],
                    rewards=[1.0],
                )
            ]
        )

    assert of([0.0, 0.0, 1.0, 1.0]) == {"value_mean": 0.5, "explained_variance": 1.0}
    assert of([0.3] * 4)["explained_variance"] == pytest.approx(0.0)
    assert of([1.0, 1.0, 0.0, 0.0])["explained_variance"] == pytest.approx(-3.0)
    assert explained(
        [Estimate(advantages=[[0.0]], returns=[[1.0]], values=[[0.5]], masks=[[True]], rewards=[1.0])]
    ) == {"value_mean": 0.5}
    assert explained([]) == {}


def test_a_plan_has_an_advantage_and_a_return_for_every_token() -> None:
    critic = Gae(call_gamma=0.5, lam=1.0, clip=0.2, backbone_grad_scale=0.5, normalize_std=False)
    algorithm = LightningRL(advantage=critic, minibatches=1)
    plan = algorithm.plan([PAIR], seed=0, values=VALUES)
    [rows] = plan.minibatches
    tokens = {
        name: [number for row in rows for number, trained in zip(getattr(row, name), row.mask, strict=True) if trained]
        for name in ("advantages", "returns", "values")
    }
    by_hand = [(0.25, 0.5, 0.25), (0.0, 0.5, 0.5), (0.5, 1.0, 0.5), (-0.5, 0.0, 0.5)]
    assert sorted(zip(*tokens.values(), strict=True)) == sorted(by_hand)
    assert (plan.loss.value, plan.loss.value_clip) == (0.5, 0.2)
    assert plan.stats["value_mean"] == pytest.approx(1.75 / 4)
    assert set(plan.outcomes.values()) == {"trained"}


def test_a_solved_bonus_is_added_to_every_token() -> None:
    algorithm = LightningRL(advantage=Gae(normalize_std=False), solved_bonus=0.25, minibatches=1)
    plan = algorithm.plan([[trajectory("a", 1.0, (2,))]], 0, values={"a/0": [1.0, 1.0]})
    assert plan.minibatches[0][0].advantages[-2:] == [0.25, 0.25]


def test_gae_without_values_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="values: gae needs"):
        LightningRL(advantage="gae").plan([PAIR], seed=0)


def test_an_engine_keeps_a_value_head_for_a_critic_alone() -> None:
    assert LightningRL(advantage=Gae(learning_rate=0.5)).critic_learning_rate == 0.5
    assert LightningRL().critic_learning_rate is None


def test_two_actions_by_hand() -> None:
    # δ = [0 + 0.5 - 0.5, 1 + 0 - 0.5] = [0, 0.5]; Â_1 = 0.5, Â_0 = 0 + 0.5 × 0.5
    assert gae([0.0, 1.0], [0.5, 0.5], 1.0, 0.5) == ([0.25, 0.5], [0.75, 1.0])


def test_two_calls_by_hand() -> None:
    # outer, over the last tokens' values: δ = [0 + 0.5 × 0.5 - 0.5, 1 - 0.5] = [-0.25, 0.5], γλ = 0.5: [0, 0.5]
    # inner, call 1 of values [0.25, 0.5]: its return 0.5 at its end: δ = [0.5 - 0.25, 0.5 - 0.5] = [0.25, 0]
    advantages, returns = bilevel_gae([0.0, 1.0], [[0.25, 0.5], [0.5]], call_gamma=0.5)
    assert advantages == [[0.25, 0.0], [0.5]]
    assert returns == [[0.5, 0.5], [1.0]]


def test_a_call_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token in each call"):
        bilevel_gae([1.0], [[]])


calls = st.lists(
    st.tuples(st.floats(-1, 1), st.lists(st.floats(-1, 1), min_size=1, max_size=4)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=50)
@given(calls)
def test_without_discount_both_levels_are_one(drawn: list[tuple[float, list[float]]]) -> None:
    # γ = λ = 1: every token's advantage is what is still to come less its own value, whoever groups the tokens
    rewards, values = [reward for reward, _ in drawn], [tokens for _, tokens in drawn]
    flat_rewards = [value for reward, tokens in drawn for value in [0.0] * (len(tokens) - 1) + [reward]]
    flat, _ = gae(flat_rewards, [value for tokens in values for value in tokens])
    both, _ = bilevel_gae(rewards, values, call_gamma=1.0)
    assert [value for tokens in both for value in tokens] == pytest.approx(flat, abs=1e-9)
