"""Which calls are learned from: whose they are, and what the others still count for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import build
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.critic import Gae
from agentlightning.algorithms.selection import own_groups, selection
from agentlightning.errors import AgentError, ConfigError
from agentlightning.protocols.system_prompts import prompt_name
from agentlightning.records import Call
from agentlightning.training_types import Trajectory


def call(**changes: Any) -> Call:
    written = {"model": "gpt-writer", "messages": [{"role": "user", "content": "write"}], "completion": {}}
    return build.call(**{**written, **changes})


def trajectory(name: str, reward: float, trained: str, rewards: tuple[float, ...] = ()) -> Trajectory:
    """A call for each letter of `trained`, of one token: y is the policy's own, n is context."""
    transitions = [
        build.transition(
            f"{name}/{place}",
            suffix_ids=[1, 10 + place],
            sampled_ids=[20 + place],
            trained=letter == "y",
            reward=rewards[place] if rewards else 0.0,
        )
        for place, letter in enumerate(trained)
    ]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=transitions)


# --- whose a call is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agents", "made", "expected"),
    [
        (None, call(), True),
        (None, call(policy="other"), False),
        (None, call(policy=""), False),
        (["writer"], call(agent="writer"), True),
        (["writer"], call(agent="critic"), False),
        (["gpt-writer"], call(), True),
        (["writer", "critic"], call(agent="critic"), True),
        (["writer"], call(agent="writer", policy="other"), False),
    ],
)
def test_a_call_is_selected_by_policy_agent_or_the_model_it_asked_for(
    agents: list[str] | None, made: Call, expected: bool
) -> None:
    assert selection("default", agents)(made) is expected


def test_a_predicate_sees_the_call_and_is_asked_beside_names(tmp_path: Path) -> None:
    file = tmp_path / "which.py"
    file.write_text("def long(call):\n    return len(call.messages[0]['content']) > 3\n")
    chosen = selection("default", [f"{file}:long", "critic"])
    short = call(messages=[{"role": "user", "content": "hi"}])
    assert chosen(call())
    assert not chosen(short)
    assert chosen(replace(short, agent="critic"))


def test_a_predicate_that_fails_or_says_no_truth_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def fails(call):\n    return call.nothing\n\n\ndef counts(call):\n    return 1\n")
    with pytest.raises(AgentError, match=r"agents predicate '.*wrong\.py:fails'"):
        selection("default", [f"{file}:fails"])(call())
    with pytest.raises(ConfigError, match="expected true or false, got int"):
        selection("default", [f"{file}:counts"])(call())
    with pytest.raises(ConfigError, match="missing"):
        selection("default", [f"{file}:missing"])


@pytest.mark.parametrize("agents", [[], "writer", [""], [3]])
def test_agents_are_a_list_of_names(agents: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.agents: expected a list of names"):
        LightningRL(agents=agents)


# --- what is learned from -----------------------------------------------------------------------------------------------


def test_only_the_policys_own_calls_are_trained_and_counted() -> None:
    group = [trajectory("a0", 1.0, "nyn"), trajectory("a1", 0.0, "nyy")]
    plan = LightningRL(minibatches=1).plan([group], seed=0)
    rows = [row for minibatch in plan.minibatches for row in minibatch]
    assert sorted(row.tokens for row in rows) == [[1, 11, 21], [1, 11, 21], [1, 12, 22]]
    assert sum(sum(row.weights) for row in rows) == pytest.approx(1.0)
    assert plan.stats["turns"] == 1.5
    assert plan.stats["tokens_sampled"] == plan.stats["tokens_trained"] == 3


def test_a_rollout_without_a_call_of_the_policy_is_in_no_statistics_of_it() -> None:
    alone = [trajectory("a0", 1.0, "y"), trajectory("a1", 0.0, "y")]
    absent = trajectory("a2", 1.0, "n")
    algorithm = LightningRL(minibatches=1)
    expected, plan = algorithm.plan([alone], seed=0), algorithm.plan([[*alone, absent]], seed=0)
    assert plan.minibatches == expected.minibatches
    assert plan.stats == expected.stats
    assert plan.outcomes == {"a0": "trained", "a1": "trained", "a2": "zero_variance"}


def test_credit_is_given_before_the_calls_of_others_leave() -> None:
    # The others' last call earned a step reward: by returns to go it is the merit of the own call before it.
    algorithm = LightningRL(minibatches=1, credit="step_rewards", advantage="reinforce")
    group = [trajectory("a0", 0.0, "yn", rewards=(0.0, 1.0)), trajectory("a1", 0.0, "yn")]
    [rows] = algorithm.plan([group], seed=0).minibatches
    assert sorted((row.rollout_id, row.tokens, row.advantages[-1]) for row in rows) == [
        ("a0", [1, 10, 20], 0.5),
        ("a1", [1, 10, 20], -0.5),
    ]


def test_step_rewards_of_context_are_earned_by_the_own_call_before_it() -> None:
    [[own]] = own_groups([[trajectory("a0", 0.0, "nynny", rewards=(5.0, 1.0, 2.0, 3.0, 4.0))]])
    assert [transition.reward for transition in own.transitions] == [6.0, 4.0]


def test_a_critic_is_asked_for_own_calls_alone() -> None:
    algorithm = LightningRL(advantage=Gae(lam=1.0, normalize_std=False), minibatches=1, group_size=1)
    group = [trajectory("a0", 1.0, "yn")]
    [[row]] = algorithm.plan([group], seed=0, values={"a0/0": [0.25]}).minibatches
    assert row.advantages[-1] == pytest.approx(0.75)


def test_leave_one_out_credit_compares_with_rollouts_in_which_the_policy_is_absent() -> None:
    named = [
        replace(one, transitions=[replace(each, agent="ny"[each.trained]) for each in one.transitions])
        for one in (trajectory("a0", 1.0, "ny"), trajectory("a1", 0.0, "n"))
    ]
    with_both = LightningRL(minibatches=1, credit="counterfactual").plan([named], seed=0)
    alone = LightningRL(minibatches=1, credit="counterfactual").plan([named[:1]], seed=0)
    assert with_both.outcomes["a0"] == "trained"
    assert alone.outcomes["a0"] == "zero_variance"


# --- calls beside the task ----------------------------------------------------------------------------------------------


def with_a_title() -> tuple[list[Call], str]:
    """The calls of an attempt with a title among them, and the name that its prompt gives it."""
    agent = prompt_name("You write titles.") or ""
    prompt = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": "Fix it"}]
    said = {"role": "assistant", "content": "A fix"}
    title = call(id="title", messages=prompt, completion=said, agent=agent, finished_ns=1)
    return [title, call(id="work", tools=[{"type": "function"}], started_ns=2)], agent


def test_calls_beside_the_task_are_context_unless_the_switch_or_their_name_says_otherwise(tmp_path: Path) -> None:
    calls, agent = with_a_title()
    (tmp_path / "which.py").write_text("def titles(call):\n    return call.id == 'title'\n")
    for agents, side_calls, chosen in (
        (None, "context", {"work"}),
        (None, "train", {"work", "title"}),
        (["gpt-writer"], "context", {"work"}),
        ([agent], "context", {"title"}),
        ([f"{tmp_path}/which.py:titles"], "context", {"title"}),
    ):
        assert selection("default", agents, side_calls).ids(calls) == chosen  # type: ignore[arg-type]
