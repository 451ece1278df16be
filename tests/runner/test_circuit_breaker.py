"""Causes that are not the agent's, as a worker reports them, and the pause that follows when they are many."""

from __future__ import annotations

from typing import Any

import pytest
from runner_bench import Bench

from agentlightning.errors import InfrastructureError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM
from agentlightning.runner.circuit_breaker import FIRST_PAUSE_S, MAX_PAUSE_S, MIN_ENDS, CircuitBreaker
from agentlightning.runner.result import RolloutResult


def opened(at: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    assert [breaker.add("Traceback:\nno sandbox", at) for _ in range(MIN_ENDS)] == [False] * (MIN_ENDS - 1) + [True]
    return breaker


def test_a_breaker_opens_where_most_ends_are_infrastructures_and_says_why() -> None:
    breaker = opened()
    assert breaker.wait_s(1.0) == FIRST_PAUSE_S - 1
    assert breaker.reason == (
        "5 of the last 5 attempts ended for want of infrastructure, the latest with: no sandbox; nothing is claimed for "
        "15 s, then one attempt is tried"
    )


def test_few_errors_among_many_good_ends_open_nothing() -> None:
    breaker = CircuitBreaker()
    assert not any(breaker.add("gone" if number % 3 == 0 else None, 0.0) for number in range(60))
    assert (breaker.wait_s(0.0), breaker.allowed(8, 3), breaker.reason) == (0.0, 8, "")


def test_after_the_pause_one_trial_at_a_time_is_claimed_until_it_goes_well() -> None:
    breaker = opened()
    assert (breaker.wait_s(FIRST_PAUSE_S), breaker.allowed(8, 0), breaker.allowed(7, 1)) == (0.0, 1, 0)
    assert breaker.add("still gone", FIRST_PAUSE_S)
    assert breaker.wait_s(FIRST_PAUSE_S) == 2 * FIRST_PAUSE_S
    assert not breaker.add(None, 3 * FIRST_PAUSE_S)
    assert (breaker.reason, breaker.allowed(8, 0)) == ("", 8)
    assert not breaker.add("again", 3 * FIRST_PAUSE_S)


def test_pauses_are_bounded_and_what_ran_when_one_began_does_not_count() -> None:
    breaker, now = opened(), 0.0
    assert not breaker.add("gone, too", 1.0)
    assert not breaker.add(None, 1.0)
    assert breaker.reason
    for _ in range(10):
        now += breaker.wait_s(now)
        assert breaker.add("gone", now)
    assert breaker.wait_s(now) == MAX_PAUSE_S


def raising(error: BaseException) -> Any:
    def score(task: JSON, result: RolloutResult) -> float:
        raise error

    return score


async def test_an_environment_that_broke_loses_the_attempt_and_pauses_its_worker(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        try:
            raise InfrastructureError("the sandbox is gone")
        except InfrastructureError as error:
            raise RuntimeError("a tool failed") from error

    queued = await bench.enqueue({}, max_lost=5)
    async with bench.worker(solve) as worker:
        [done] = await bench.settled(queued)
        assert (done.state, done.lost, done.cause, done.error) == ("failed", 5, "infra", "the sandbox is gone")
        assert worker.status().paused.startswith("5 of the last 5 attempts ended for want of infrastructure")
    assert {attempt.cause for attempt in await bench.attempts(done)} == {"infra"}


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (raising(ZeroDivisionError("mine")), "verifier"),
        (raising(VerifierError("the scorer broke")), "verifier"),
        (raising(InfrastructureError("its model is away")), "infra"),
        (lambda task, result: "no number", "verifier"),
        (lambda task, result: 1.0, "policy"),
    ],
)
async def test_a_reward_function_that_fails_is_the_verifiers_and_never_a_zero(
    bench: Bench, reward: Any, cause: str
) -> None:
    async def solve(task: JSON, llm: LLM) -> str:
        return "an answer"

    [queued] = await bench.enqueue({}, max_attempts=1, max_lost=1)
    async with bench.worker(solve, reward=reward):
        [done] = await bench.settled([queued])
    assert (done.cause, done.gave_up) == (cause, False)
    assert done.reward == (1.0 if cause == "policy" else None)


@pytest.mark.parametrize(
    ("returned", "cause"),
    [(VerifierError("its scorer broke"), "verifier"), (ValueError("mine"), "agent"), ("x", "agent")],
)
async def test_an_agents_own_failure_is_told_from_that_of_its_environments_scorer(
    bench: Bench, returned: Any, cause: str
) -> None:
    async def solve(task: JSON, llm: LLM) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    [queued] = await bench.enqueue({}, max_attempts=1)
    async with bench.worker(solve):
        [done] = await bench.settled([queued])
    assert (done.state, done.cause) == ("failed", cause)
