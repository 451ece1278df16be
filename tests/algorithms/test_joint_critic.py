"""A critic that reads what all agents of a rollout were told and said, while each policy reads its own prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapters.joint_transcript import joint_transcript
from agentlightning.adapters.sequences import merge
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.critic import Critic
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.trainer.rl.policy_update import check_fit, critic_values
from agentlightning.trainer.schedules import check_joint_rows, schedules_of
from agentlightning.training_types import ImageInput, TrainingSequence, Trajectory, Transition


def call(name: str, told: list[int], said: list[int], parent: Transition | None = None, **changes: Any) -> Transition:
    return Transition(
        call_id=name,
        suffix_ids=told,
        sampled_ids=said,
        logprobs=[-0.5] * len(said),
        versions=[],
        parent=parent,
        **changes,
    )


def relay(name: str = "r", reward: float = 1.0, **of_checker: Any) -> Trajectory:
    """A writer, a checker that was told nothing of it, and the writer again."""
    first = call(f"{name}1", [1, 2], [3])
    checker = call(f"{name}2", [4], [5, 6], temperature=0.5, **of_checker)
    second = call(f"{name}3", [7], [8], first)
    return Trajectory(rollout_id=name, group_id="g", reward=reward, transitions=[first, checker, second])


def rows_of(chain: list[Transition]) -> list[TrainingSequence]:
    return merge("r", chain, range(len(chain)), [0.0] * len(chain))


def test_the_calls_of_all_agents_are_one_row_in_their_order() -> None:
    [row] = rows_of(joint_transcript(relay().transitions, 100))
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.segments == [(2, 3), (4, 6), (7, 8)]
    assert row.calls == ["r1", "r2", "r3"]


def test_a_call_of_a_context_that_is_no_transition_is_shown_once() -> None:
    context = call("context", [1], [2])
    first, second = call("a", [3], [4], context), call("b", [5], [6], context)
    [row] = rows_of(joint_transcript([first, second], 100))
    assert row.tokens == [1, 2, 3, 4, 5, 6]


def test_a_transcript_that_is_too_long_goes_on_with_its_latest_half() -> None:
    """Six tokens at most: the third call's two do not fit behind six, so it follows [4] and [5, 6], which are three."""
    first, second = rows_of(joint_transcript(relay().transitions, 6))
    assert first.tokens == [1, 2, 3, 4, 5, 6]
    assert second.tokens == [4, 5, 6, 7, 8]
    assert second.segments == [(4, 5)]


def test_images_stay_at_their_placeholders() -> None:
    shown = [ImageInput(hash="i", start=0, end=1)]
    first, second = call("a", [9, 1], [2], images=shown), call("b", [9], [3], images=shown)
    [row] = rows_of(joint_transcript([first, second], 100))
    assert [(one.start, one.end) for one in row.images] == [(0, 1), (3, 4)]
    _, second_row = rows_of(joint_transcript([first, second], 4))
    assert [second_row.tokens[one.start] for one in second_row.images] == [9]


def test_the_policy_learns_from_its_prompts_and_the_critic_from_the_transcript() -> None:
    """λ = 1, all values 0: every own token's return is the reward. token_mean: each of the two own calls' tokens has 1/4."""
    group = [relay("r", 1.0, trained=False), relay("s", 0.0, trained=False)]
    values = {one.call_id: [0.0] * len(one.sampled_ids) for each in group for one in each.transitions}
    algorithm = LightningRL(
        group_size=2,
        minibatches=1,
        advantage="gae",
        critic=Critic(view="joint", lam=1.0, clip=0.2),
        normalize_std=False,
    )
    plan = algorithm.plan([group], seed=0, values=values)
    assert plan.loss.value is None
    [own], [joint] = plan.minibatches, plan.critic_minibatches
    assert sorted(row.tokens for row in own) == [[1, 2, 3, 7, 8]] * 2
    assert all(row.returns is None for row in own)
    assert plan.critic_loss is not None
    assert (plan.critic_loss.value, plan.critic_loss.value_clip) == (0.1, 0.2)
    found = {row.rollout_id: row for row in joint}
    assert found["r"].tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["r"].weights == [0, 0, 0.25, 0, 0, 0, 0, 0.25]
    assert found["r"].returns == [0, 0, 1, 0, 0, 0, 0, 1]
    assert found["s"].returns == [0] * 8
    assert not any(one for row in joint for one in row.advantages)
    assert [one.returns for one in plan.calls] == [[1.0], [1.0], [0.0], [0.0]]


class Values:
    """An engine whose value of a token is the sum of the row's tokens before it."""

    async def values(self, rows: list[TrainingSequence], policy: str) -> list[list[float]]:
        return [[float(sum(row.tokens[:place])) for place in range(len(row.tokens))] for row in rows]


@pytest.mark.parametrize(
    ("view", "expected"),
    [("own", {"r1": [3], "r3": [13]}), ("joint", {"r1": [3], "r2": [10, 15], "r3": [28]})],
)
async def test_a_joint_critic_is_asked_behind_all_that_was_said_before(view: Any, expected: dict[str, Any]) -> None:
    algorithm = LightningRL(advantage="gae", critic=Critic(view=view), group_size=2)
    groups = [[relay(trained=False)]]
    assert await critic_values(cast(Any, Values()), "default", algorithm, groups) == expected


@pytest.mark.parametrize("merged", [True, False])
async def test_the_transcript_is_one_row_whether_the_policys_rows_are_merged_or_not(merged: bool) -> None:
    algorithm = LightningRL(advantage="gae", critic=Critic(view="joint"), group_size=2, merge=merged)
    found = await critic_values(cast(Any, Values()), "default", algorithm, [[relay()]])
    assert found == {"r1": [3], "r2": [10, 15], "r3": [28]}


@settings(deadline=None)
@given(data=st.data(), max_tokens=st.integers(2, 30))
def test_every_sampled_token_is_in_one_row_after_the_calls_before_it(data: st.DataObject, max_tokens: int) -> None:
    calls: list[Transition] = []
    for place in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from([None, *calls]))
        told = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        said = data.draw(st.lists(st.integers(10, 19), min_size=1, max_size=3))
        calls.append(call(str(place), told, said, parent))
    rows = rows_of(joint_transcript(calls, max_tokens))
    trained = [token for row in rows for token, own in zip(row.tokens, row.mask, strict=True) if own]
    assert trained == [token for one in calls for token in one.sampled_ids]
    for row in rows:
        longest = max(len(one.suffix_ids) + len(one.sampled_ids) for one in calls)
        assert len(row.tokens) <= max(max_tokens, longest)
    whole = [token for one in calls for token in (*one.suffix_ids, *one.sampled_ids)]
    assert rows_of(joint_transcript(calls, 10_000))[0].tokens == whole


def test_settings_that_would_do_nothing_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"max_joint_tokens: has no effect with view = 'own'"):
        Critic(max_joint_tokens=100)


RUN = {
    "agent": {"run": "a.py:f"},
    "data": {"train": "t"},
    "algorithm": {"advantage": "gae", "critic": {"view": "joint"}},
}


def test_policies_of_different_models_have_no_joint_critic() -> None:
    policies = {"white": {"model": "w"}, "black": {"model": "b", "frozen": True}}
    with pytest.raises(
        ConfigError, match=r"policies\.white\.algorithm\.critic\.view: 'joint'.*black has another model"
    ):
        schedules_of(parse_config(RUN | {"policies": policies}))
    alike = {"white": {"model": "w"}, "black": {"snapshot_of": "white"}}
    assert list(schedules_of(parse_config(RUN | {"policies": alike}))) == ["white"]


def test_rows_that_the_model_has_no_context_for_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')

    def check(critic: dict[str, Any]) -> None:
        algorithm = {"advantage": "gae", "critic": critic}
        check_joint_rows(schedules_of(parse_config(RUN | {"model": {"path": "m"}, "algorithm": algorithm})), tmp_path)

    check({"view": "joint", "max_joint_tokens": 64})
    check({"view": "own"})
    with pytest.raises(ConfigError, match=r"critic\.max_joint_tokens: the model's context holds 64 tokens, got 8192"):
        check({"view": "joint"})


def test_an_engine_without_a_value_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from agentlightning.engines.support import Support\n\n\nclass Plain:\n"
        "    support = Support(engine='plain')\n\n    def __init__(self, setup):\n        pass\n"
    )
    config = parse_config({"model": {"path": "m"}, **RUN, "engine": {"name": f"{tmp_path}/plain.py:Plain"}})
    algorithm = LightningRL(advantage="gae", critic=Critic(view="joint"), loss="reinforce", minibatches=1)
    with pytest.raises(ConfigError, match=r"algorithm: the engine 'plain'.*a critic as configured"):
        check_fit(algorithm, config)
