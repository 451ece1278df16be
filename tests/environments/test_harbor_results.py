"""What Harbor's results become, and which tasks are held out; trials are played in test_installed_kinds.py."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.environments.harbor import reach_gateway, split_names, trial_outcome
from agentlightning.errors import InfrastructureError, VerifierError
from agentlightning.records import JSON


def result(rewards: Any = None, exception: str | None = None) -> JSON:
    verified = None if rewards is None else {"rewards": rewards}
    failure = None if exception is None else {"exception_type": exception, "exception_message": "why"}
    return {"verifier_result": verified, "exception_info": failure}


def test_rewards_are_read_by_name() -> None:
    outcome = trial_outcome(result({"reward": 1.0, "style": 0.5}))
    assert (outcome.reward, outcome.success, outcome.metrics) == (1.0, True, {"style": 0.5, "agent_ended": 0.0})
    assert trial_outcome(result({"score": 0.25})).reward == 0.25


def test_an_agent_that_ran_out_of_time_keeps_its_reward() -> None:
    outcome = trial_outcome(result({"reward": 0.5}, "AgentTimeoutError"))
    assert (outcome.reward, outcome.success, outcome.metrics["agent_ended"]) == (0.5, False, 1.0)


@pytest.mark.parametrize(
    ("trial", "error", "sentence"),
    [
        (result({"reward": 0.0}, "RuntimeError"), InfrastructureError, "RuntimeError: why"),
        (result(None, "EnvironmentStartTimeoutError"), InfrastructureError, "EnvironmentStartTimeoutError"),
        (result(None, "RewardFileNotFoundError"), VerifierError, "RewardFileNotFoundError: why"),
        (result(None, "AgentTimeoutError"), VerifierError, "no reward"),
        (result(None), VerifierError, "has no verifier"),
        (result({"a": 1, "b": 0}), VerifierError, "a reward named 'reward' among a, b"),
    ],
)
def test_a_trial_without_a_valid_reward_is_an_error(trial: JSON, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        trial_outcome(trial)


def test_a_fifth_of_the_tasks_is_held_out_whatever_their_order() -> None:
    names = [f"task-{number}" for number in range(20)]
    train, val = (split_names(names, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (16, 4)
    assert sorted([*train, *val]) == sorted(names)
    assert split_names(names[::-1], "val") == val
    assert [len(split_names(["only"], split)) for split in ("train", "val")] == [1, 0]


async def test_a_container_that_does_not_reach_the_gateway_is_an_error_that_names_the_address() -> None:
    class Container:
        async def exec(self, command: str) -> Any:
            done = await asyncio.to_thread(subprocess.run, ["bash", "-c", command], capture_output=True, text=True)
            return SimpleNamespace(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        await reach_gateway(Container(), f"http://127.0.0.1:{port}/r/1/1/v1")
    with pytest.raises(InfrastructureError, match=f"does not reach the gateway at 127.0.0.1:{port}: .* host= "):
        await reach_gateway(Container(), f"http://127.0.0.1:{port}/r/1/1/v1")
