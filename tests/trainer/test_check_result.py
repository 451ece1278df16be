"""Warnings of a check, before anybody pays for more."""

import pytest

from agentlightning.trainer.check import CheckResult
from agentlightning.types import RetryPolicy, Rollout, Sampling


def checked(success: float, spread: float, tasks: int = 32) -> CheckResult:
    rollout = Rollout(
        id="r",
        run_id="run",
        task={},
        group_id="check:0",
        replica=0,
        mode="eval",
        step=0,
        sampling=Sampling(),
        retry=RetryPolicy(),
        priority=0,
        state="succeeded",
        attempt=1,
        lost=0,
        created_ns=0,
    )
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
