"""How busy workers and sampler were, reckoned from the records of a step's rollouts."""

from __future__ import annotations

from typing import Any

import build
from agentlightning.records import Call, Rollout
from agentlightning.trainer.load_trajectories import S, TimeTally

ALL_KNOWN = {"workers/slots": 4.0, "sampler/slots": 8.0}


def rollout(name: str, queued: float, started: float | None, finished: float | None) -> Rollout:
    times = {"started_ns": started, "finished_ns": finished}
    return build.rollout(
        name, created_ns=int(queued * S), **{key: None if one is None else int(one * S) for key, one in times.items()}
    )


def call(of: str, started: float, finished: float, tokens: int = 10, policy: str = "default", **changed: Any) -> Call:
    given = {"id": f"{of}-{started}", "sampled_ids": [1] * tokens, "prompt_tokens": 0, "policy": policy} | changed
    return build.call(build.rollout(of), started_ns=int(started * S), finished_ns=int(finished * S), **given)


def test_a_rollouts_time_is_waiting_model_calls_what_lies_between_them_and_what_comes_after() -> None:
    tally = TimeTally()
    tally.add(
        [rollout("a", 0, 1, 9), rollout("b", 0, 3, 5)],
        [call("a", 2, 4), call("a", 3, 5), call("a", 6, 7), call("b", 3, 4), call("b", 4, 5, policy="")],
    )
    found = tally.metrics(10.0, ALL_KNOWN)
    assert found["rollout/queued_s"] == 2.0
    assert (found["rollout/duration_s"], found["rollout/duration_max_s"]) == (5.0, 8.0)
    assert found["rollout/model_s"] == (4 + 1) / 2  # 2 to 5 and 6 to 7; an external model is none of the policy's
    assert found["rollout/after_calls_s"] == (2 + 1) / 2
    assert found["rollout/between_calls_s"] == (8 + 2 - 5 - 3) / 2
    assert (found["workers/running_mean"], found["workers/busy_share"]) == (1.0, 0.25)
    assert found["workers/queued_mean"] == 0.4
    assert found["sampler/busy_share"] == 0.4  # 2 to 5, 6 to 7
    assert found["sampler/calls_mean"] == (2 + 2 + 1 + 1) / 4
    assert found["sampler/tokens_per_s"] == 10.0
    assert (found["workers/slots"], found["sampler/slots"]) == (4.0, 8.0)


def test_the_gateway_is_busy_with_calls_to_any_model() -> None:
    tally = TimeTally()
    tally.add([rollout("a", 0, 1, 9)], [call("a", 2, 4), call("a", 3, 7, policy=""), call("a", 8, 9, policy="")])

    found = tally.metrics(10.0, ALL_KNOWN)

    assert (found["sampler/busy_share"], found["gateway/busy_share"]) == (0.2, 0.6)


def test_a_step_costs_what_its_calls_used() -> None:
    used = {"prompt_tokens": 100, "sampled_tokens": 20}
    tally = TimeTally()
    tally.add(
        [rollout("a", 0, 1, 9)],
        [
            call("a", 2, 4, prompt_tokens=30),
            call("a", 2, 4, id="x.1", prompt_tokens=30),  # another choice of one prompt
            call("a", 4, 5, policy="", model="gpt-5", usage=used, tokens=0),
            call("a", 5, 6, policy="", model="gpt-mini", usage=used, tokens=0),
        ],
    )

    found = tally.metrics(10.0, ALL_KNOWN, external=True)

    assert (found["cost/prompt_tokens"], found["cost/sampled_tokens"], found["cost/agent_s"]) == (30.0, 20.0, 8.0)
    assert found["cost/external_tokens"] == 240.0
    assert "cost/external_tokens" not in tally.metrics(10.0, ALL_KNOWN)
