"""Returns of several agents that one policy plays: each is compared with itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.critic import Gae
from agentlightning.errors import ConfigError
from agentlightning.training_types import Trajectory, Transition

ZERO_SUM = {"white": {"reward": 1.0}, "black": {"reward": -1.0}}


def game(name: str, rewards: dict[str, float], *agents: str) -> Trajectory:
    """A call of one token by each agent in turn."""
    calls = [
        Transition(
            call_id=f"{name}/{place}",
            suffix_ids=[1, 10 + place],
            sampled_ids=[20 + place],
            logprobs=[-1.0],
            versions=[],
            agent=agent,
            model="player",
        )
        for place, agent in enumerate(agents)
    ]
    return Trajectory(
        rollout_id=name, group_id=name[0], reward=rewards["reward"], transitions=calls, rewards=dict(rewards)
    )


def signals(groups: list[list[Trajectory]], values: Any = None, **chosen: Any) -> dict[str, Any]:
    """Advantages by call."""
    algorithm = LightningRL(minibatches=1, group_size=2, **chosen)
    return {one.call.call_id: one for one in algorithm.plan(groups, seed=0, values=values).calls}


def test_what_white_gains_black_loses_and_neither_is_compared_with_the_other() -> None:
    won, lost = game("a", {"reward": 1.0}, "white", "black"), game("ab", {"reward": -1.0}, "white", "black")
    found = signals([[won, lost]], advantage="dr_grpo", agent_reward_weights=ZERO_SUM)
    assert {call: one.advantages for call, one in found.items()} == {"a/0": 1.0, "a/1": -1.0, "ab/0": -1.0, "ab/1": 1.0}
    assert [found[call].credit for call in ("a/0", "a/1")] == [1.0, -1.0]


def test_each_agent_has_the_mean_of_its_own_group() -> None:
    """White has 1, 0 and a mean of 0.5; black plays the second game alone, so that it has nothing to be compared with."""
    alone = game("a", {"reward": 0.0, "w": 1.0, "b": 5.0}, "white")
    both = game("ab", {"reward": 0.0, "w": 0.0, "b": 3.0}, "white", "black", "black")
    weights = {"white": {"w": 1.0}, "black": {"b": 2.0}}
    found = signals([[alone, both]], advantage="dr_grpo", agent_reward_weights=weights)
    assert {call: one.advantages for call, one in found.items()} == {"a/0": 0.5, "ab/0": -0.5, "ab/1": 0.0, "ab/2": 0.0}


def test_agents_without_weights_are_learned_from_by_the_rollouts_reward_and_a_model_name_counts_as_one() -> None:
    def named(trajectory: Trajectory) -> Trajectory:
        first, *rest = trajectory.transitions
        return replace(trajectory, transitions=[replace(first, agent=None, model="black"), *rest])

    won = named(game("a", {"reward": 1.0}, "", "judge"))
    lost = named(game("ab", {"reward": 0.0}, "", "judge"))
    weights = {"black": {"reward": -1.0}}
    found = signals([[won, lost]], advantage="dr_grpo", agent_reward_weights=weights)
    assert {call: one.advantages for call, one in found.items()} == {
        "a/0": -0.5,
        "a/1": 0.5,
        "ab/0": 0.5,
        "ab/1": -0.5,
    }


def test_a_rollout_without_an_agents_reward_is_dropped() -> None:
    whole = [game(name, {"reward": 1.0, "b": place}, "white", "black") for place, name in enumerate(("a", "ab"))]
    half = game("abc", {"reward": 0.0}, "white", "black")
    algorithm = LightningRL(minibatches=1, group_size=2, agent_reward_weights={"black": {"b": 1.0}})
    plan = algorithm.plan([[*whole, half]], seed=0)
    assert plan.outcomes == {"a": "trained", "ab": "trained", "abc": "invalid"}
    assert plan.stats["unrewarded"] == 1.0
    assert plan.stats["agents/black/reward_mean"] == 0.5


def test_a_critic_learns_the_return_of_the_agent_whose_call_it_is() -> None:
    groups = [[game("a", {"reward": 1.0}, "white", "black"), game("ab", {"reward": -1.0}, "black", "white")]]
    values = {call.call_id: [0.0] for one in groups[0] for call in one.transitions}
    critic = Gae(lam=1.0, normalize_std=False)
    chosen: dict[str, Any] = {"advantage": critic, "agent_reward_weights": ZERO_SUM}
    found = signals(groups, values, **chosen)
    assert {call: one.returns for call, one in found.items()} == {
        "a/0": [1.0],
        "a/1": [-1.0],
        "ab/0": [1.0],
        "ab/1": [-1.0],
    }
    plan = LightningRL(minibatches=1, group_size=2, **chosen).plan(groups, seed=0, values=values)
    assert plan.stats["agents/white/reward_mean"] == plan.stats["value_mean"] == 0.0


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        ({"agent_reward_weights": {"white": {}}}, "agent_reward_weights.white: expected a weight of at least one"),
        ({"agent_reward_weights": ZERO_SUM, "credit": "forked"}, "conflicts with credit = 'forked'.*fork_returns"),
    ],
)
def test_weights_that_would_do_nothing_or_that_a_rule_does_not_know_are_refused(
    refused: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LightningRL(**refused)


@settings(max_examples=20, deadline=None)
@given(
    games=st.lists(
        st.tuples(
            st.sampled_from([-1.0, 0.0, 1.0]), st.lists(st.sampled_from(["white", "black"]), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=5,
    ),
    credit=st.sampled_from(["uniform", "last", "discounted", "step_rewards", "gigpo"]),
)
def test_each_agent_gets_what_it_would_get_if_it_alone_were_trained_by_its_reward(
    games: list[tuple[float, list[str]]], credit: str
) -> None:
    group = [game("a" + "b" * place, {"reward": reward}, *agents) for place, (reward, agents) in enumerate(games)]
    found = signals([group], credit=credit, agent_reward_weights=ZERO_SUM)
    for agent, weights in ZERO_SUM.items():
        alone = [
            replace(one, transitions=[replace(call, trained=call.agent == agent) for call in one.transitions])
            for one in group
        ]
        expected = signals([alone], credit=credit, reward_weights=weights)
        own = {call: one for call, one in found.items() if one.call.agent == agent}
        assert {call: one.advantages for call, one in own.items()} == {
            call: one.advantages for call, one in expected.items()
        }
