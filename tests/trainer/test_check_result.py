"""How a check ends, and its warnings, before anybody pays for more."""

from dataclasses import replace
from pathlib import Path

import pytest

import build
from agentlightning.config.run import parse_config
from agentlightning.errors import AgentError, NoCallsError
from agentlightning.trainer.check import CheckResult, shared_fields, task_fields


def checked(success: float, spread: float, tasks: int = 32) -> CheckResult:
    rollout = build.rollout(group_id="check:0", mode="eval", reward=None)
    return CheckResult(rollout=rollout, attempts=[], calls=[], rewards=[], success=success, tasks=tasks, spread=spread)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (checked(0.01, 1.0), "base success 0.01 over 32 tasks is below 0.03"),
        (checked(0.5, 0.0), "all 32 tasks earned 0.5: a reward that is always the same teaches nothing"),
        (checked(0.5, 1.0), None),
        (checked(0.5, 0.0, tasks=1), None),
    ],
)
def test_a_base_success_that_nothing_can_be_learned_from_is_told(result: CheckResult, sentence: str | None) -> None:
    assert (result.warning is None) if sentence is None else sentence in (result.warning or "")


def test_a_check_whose_agent_ended_of_a_refused_call_names_its_field() -> None:
    result = checked(0.0, 0.0)
    rollout = replace(result.rollout, state="failed", warning="no model calls: 1 call refused: top_a 1")
    refused = replace(result, rollout=replace(rollout, refused=True)).failure
    assert isinstance(refused, AgentError)
    assert (refused.exit_code, str(refused)) == (
        1,
        "the agent failed on the first task: no model calls: 1 call refused: top_a 1",
    )
    assert str(replace(result, rollout=rollout).failure) == "the agent failed on the first task; its error is above"
    assert isinstance(result.failure, NoCallsError)


REWARD = """
def matches(truth, said, task):
    return truth == said and task.get("unit") in said


class Lenient:
    def score(self, task): return task["nothing of mine"]


async def score(row, result, *, strict=True):
    other = {"a": 1}
    expected = row["answer"] if strict else other["a"]
    return matches(expected, result.answer, row) or row["answer"] == row.get("alias", "") or result["output"]
"""


def test_the_fields_that_a_reward_function_reads_are_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    assert task_fields(f"{tmp_path}/reward.py:score") == {"answer", "alias", "unit"}
    assert task_fields(f"{tmp_path}/reward.py:nobody") == task_fields(f"{tmp_path}/none.py:score") == set()
    (tmp_path / "broken.py").write_text("def score(:")
    assert task_fields(f"{tmp_path}/broken.py:score") == set()


def test_a_check_says_which_fields_the_agent_gets_and_its_reward_is_computed_from(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f", "reward": f"{tmp_path}/reward.py:score"}}
    task = {"question": "?", "unit": "m", "answer": "42"}
    found = {}
    for private in ((), ("answer",), ("answer", "unit")):
        config = parse_config(table | {"data": {"train": "t", "private": private}})
        found[private] = replace(checked(0.5, 1.0), shared_fields=shared_fields(config, task)).privacy_note
    assert found[()] == (
        "the reward reads 'unit', 'answer' of the task, which the agent gets, too; name in data.private what the agent need "
        "not know, such as the answer"
    )
    assert found["answer",] is not None
    assert "'answer'" not in found["answer",]
    assert found["answer", "unit"] is None


def test_a_check_says_which_calls_look_like_titles() -> None:
    prompt = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": "Fix it"}]
    titles = [
        build.call(id=name, messages=prompt, completion={"role": "assistant", "content": "A fix"}) for name in "ab"
    ]
    work = build.call(id="work", tools=[{"type": "function"}])
    result = replace(checked(0.5, 1.0), calls=[*titles, work])
    assert result.side_calls == (
        '2 calls look like titles: they are context and not trained on (algorithm.side_calls = "train" changes that)'
    )
    assert replace(result, calls=[work]).side_calls is None
