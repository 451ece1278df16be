"""How a check ends, and its warnings, before anybody pays for more."""

from dataclasses import replace

import pytest

import build
from agentlightning.errors import AgentError, NoCallsError
from agentlightning.trainer.check import CheckResult


def checked(success: float, spread: float, tasks: int = 32) -> CheckResult:
    rollout = build.rollout(group_id="check:0", mode="eval", reward=None)
    return CheckResult(rollout=rollout, attempts=[], calls=[], rewards=[], success=success, tasks=tasks, spread=spread)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (checked(0.01, 1.0), "base success 0.01 over 32 tasks is below 0.03"),
        (checked(0.5, 0.0), "all 32 tasks earned 0.5: a reward that is always the same teaches nothing"),
    ],
)
def test_a_base_success_that_nothing_can_be_learned_from_is_told(result: CheckResult, sentence: str) -> None:
    assert sentence in (result.warning or "")


@pytest.mark.parametrize("result", [checked(0.5, 1.0), checked(0.5, 0.0, tasks=1)])
def test_rewards_that_differ_and_one_task_alone_are_no_warning(result: CheckResult) -> None:
    assert result.warning is None


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
