"""A worker on the test's own event loop, against a real server."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from runner_bench import KEY, Bench, a_call

from agentlightning.config.agent import AirConfig
from agentlightning.records import JSON, Call, Reward, Span
from agentlightning.runner.agent import LLM, emit_reward
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.client import AgentLightningClient
from agentlightning.runner.result import RolloutResult
from agentlightning.tracing.air import Air


async def one(bench: Bench, agent: Any, task: JSON | None = None, **options: Any) -> Any:
    """The rollout that an agent made of a task."""
    [queued] = await bench.enqueue(task or {})
    async with bench.worker(agent, **options):
        [done] = await bench.settled([queued])
    return done


async def test_an_asynchronous_agents_return_value_is_the_reward(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        assert llm.base_url.startswith(bench.server.url)
        return task["x"] / 2

    done = await one(bench, solve, {"x": 1})
    assert (done.state, done.reward, done.attempt) == ("succeeded", 0.5, 1)
    [reward] = await bench.store.rewards([done.id])
    assert reward.source == "return"


async def test_a_synchronous_agent_runs_beside_the_loop(bench: Bench) -> None:
    names = []

    def solve(task: JSON, llm: LLM) -> bool:
        names.append(threading.current_thread() is threading.main_thread())
        return True

    done = await one(bench, solve)
    assert (done.reward, names) == (1.0, [False])


async def test_many_rollouts_run_at_a_time(bench: Bench) -> None:
    everybody = asyncio.Barrier(16)

    async def solve(task: JSON, llm: LLM) -> float:
        await everybody.wait()
        return 1.0

    queued = await bench.enqueue(*({"n": n} for n in range(32)))
    async with bench.worker(solve, concurrency=16):
        assert {rollout.state for rollout in await bench.settled(queued)} == {"succeeded"}


async def test_as_many_synchronous_agents_run_at_a_time(bench: Bench) -> None:
    everybody = threading.Barrier(8)

    def solve(task: JSON, llm: LLM) -> float:
        everybody.wait(60)
        return 1.0

    queued = await bench.enqueue(*({"n": n} for n in range(16)))
    async with bench.worker(solve, concurrency=8):
        assert {rollout.state for rollout in await bench.settled(queued)} == {"succeeded"}


def helper_of_the_agent(x: int) -> float:
    return 1 / x


async def test_an_agent_that_raises_fails_with_the_traceback_of_its_own_frames(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        return helper_of_the_agent(task["x"])

    done = await one(bench, solve, {"x": 0})
    assert done.state == "failed"
    assert "ZeroDivisionError: division by zero" in done.error
    assert "helper_of_the_agent" in done.error
    assert "runner/execution.py" not in done.error


async def test_a_failure_of_one_agent_leaves_its_siblings_alone(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        await asyncio.sleep(0)
        if task["bad"] == "raise":
            raise ValueError("x" * 100_000)
        if task["bad"] == "exit":
            raise SystemExit(4)
        if task["bad"] == "cancel":
            raise asyncio.CancelledError
        return 1.0

    queued = await bench.enqueue(*({"bad": bad} for bad in ("raise", "exit", "cancel", None, None, None)))
    async with bench.worker(solve):
        done = await bench.settled(queued)
    assert [rollout.state for rollout in done] == ["failed"] * 3 + ["succeeded"] * 3
    errors = [rollout.error or "" for rollout in done[:3]]
    assert len(errors[0]) < 8500
    assert "SystemExit(4)" in errors[1]
    assert "cancelled its own attempt" in errors[2]


async def test_an_error_of_the_worker_itself_ends_the_attempt_and_not_the_worker(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Air):
        def rewards(self, calls: Sequence[Call], spans: Iterable[Span] = ()) -> list[Reward]:
            raise RuntimeError("no such thing")

    async def solve(task: JSON, llm: LLM) -> float:
        return 1.0

    queued = await bench.enqueue({}, {})
    async with bench.worker(solve, air=Broken(AirConfig(), {})):
        done = await bench.settled(queued)
    assert [rollout.state for rollout in done] == ["failed", "failed"]
    assert all("the worker failed, not the agent: " in (rollout.error or "") for rollout in done)
    assert "no such thing" in caplog.text


async def test_an_attempt_is_retried_as_its_policy_says(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        task_attempts[task["n"]] += 1
        if task_attempts[task["n"]] < 3:
            raise RuntimeError(f"attempt {task_attempts[task['n']]}")
        return 1.0

    task_attempts = [0, 0]
    queued = [
        *await bench.enqueue({"n": 0}, max_attempts=3),
        *await bench.enqueue({"n": 1}, max_attempts=2),
    ]
    async with bench.worker(solve):
        done = await bench.settled(queued)
    assert [(rollout.state, rollout.attempt) for rollout in done] == [("succeeded", 3), ("failed", 2)]
    states = [attempt.state for attempt in await bench.attempts(done[0])]
    assert states == ["failed", "failed", "succeeded"]


async def test_an_asynchronous_agent_that_hangs_times_out_at_the_line_where_it_hung(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        if task["hang"]:
            await asyncio.Event().wait()
        return 1.0

    queued = [*await bench.enqueue({"hang": True}, timeout_s=0.2), *await bench.enqueue({"hang": False})]
    async with bench.worker(solve):
        done = await bench.settled(queued)
    assert [rollout.state for rollout in done] == ["failed", "succeeded"]
    [attempt] = await bench.attempts(done[0])
    assert attempt.state == "timed_out"
    assert "took longer than its 0.2 s" in (attempt.error or "")
    assert "await asyncio.Event().wait()" in (attempt.error or "")


async def test_a_synchronous_agent_that_is_late_but_ends_costs_no_process(bench: Bench) -> None:
    def solve(task: JSON, llm: LLM) -> float:
        while CURRENT.get().interruption is None:
            time.sleep(0.01)  # in the agent's thread
        return 1.0

    [queued] = await bench.enqueue({}, timeout_s=0.1)
    async with bench.worker(solve) as worker:
        [done] = await bench.settled([queued])
        [attempt] = await bench.attempts(done)
        assert attempt.state == "timed_out"
        assert not worker._hung


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "the agent's return value: expected a finite number, got nan"),
        ("0.5", "the agent's return value: expected a finite number, got str '0.5'"),
        (None, "the attempt has no final reward"),
    ],
)
async def test_a_reward_that_is_no_number_fails_the_attempt_with_one_sentence(
    bench: Bench, value: object, sentence: str
) -> None:
    async def solve(task: JSON, llm: LLM) -> object:
        return value

    done = await one(bench, solve)
    assert done.state == "failed"
    assert sentence in done.error
    assert "Traceback" not in done.error


async def test_rewards_emitted_from_threads_and_tasks_are_recorded(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> None:
        call = replace(a_call(llm, "hello"), run_id=bench.run_id)
        await bench.store.append_calls([call])
        await asyncio.gather(asyncio.to_thread(emit_reward, 0.1, "step", f"chatcmpl-{call.id}"))
        emit_reward(0.25)
        emit_reward(0.75)

    done = await one(bench, solve)
    assert done.reward == 0.75
    assert sorted(r.value for r in await bench.store.rewards([done.id])) == [0.1, 0.25, 0.75]


async def test_a_step_reward_of_no_call_fails_the_attempt_alone(bench: Bench) -> None:
    everybody = asyncio.Barrier(2)

    async def solve(task: JSON, llm: LLM) -> float:
        if task["bad"]:
            emit_reward(1.0, call_id="no-such-call")
        await everybody.wait()
        return 1.0

    queued = await bench.enqueue({"bad": True}, {"bad": False})
    async with bench.worker(solve):
        bad, good = await bench.settled(queued)
    assert (bad.state, good.state) == ("failed", "succeeded")
    assert "got no-such-call" in (bad.error or "")


async def test_a_synchronous_agent_emits_rewards(bench: Bench) -> None:
    def solve(task: JSON, llm: LLM) -> None:
        emit_reward(0.5)

    assert (await one(bench, solve)).reward == 0.5


async def test_a_reward_function_sees_the_recorded_calls(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> None:
        await bench.store.append_calls([replace(a_call(llm, "it is 4"), run_id=bench.run_id)])

    done = await one(bench, solve, reward=lambda task, result: len(result.calls) * ("4" in result.answer))
    assert (done.reward, done.warning) == (1.0, None)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_reward_function_judges_the_output(bench: Bench, asynchronous: bool) -> None:
    async def solve(task: JSON, llm: LLM) -> str:
        return "4"

    def score(task: JSON, result: RolloutResult) -> float:
        return float(result.answer == task["answer"])

    async def score_later(task: JSON, result: RolloutResult) -> float:
        return score(task, result)

    done = await one(bench, solve, {"answer": "4"}, reward=score_later if asynchronous else score)
    assert done.reward == 1.0
    [reward] = await bench.store.rewards([done.id])
    assert reward.source == "function"


async def test_a_reward_function_that_raises_fails_the_attempt_and_says_whose_fault_it_was(bench: Bench) -> None:
    def score(task: JSON, result: RolloutResult) -> float:
        return task["missing"]

    async def solve(task: JSON, llm: LLM) -> None: ...

    done = await one(bench, solve, reward=score)
    assert done.state == "failed"
    assert "the reward function failed: KeyError: 'missing'" in done.error


async def test_a_reward_function_that_returns_nothing_is_told_so(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> None: ...

    done = await one(bench, solve, reward=lambda task, result: None)
    assert "the reward function's value: expected a finite number, got NoneType None" in done.error


async def test_a_number_returned_beside_a_reward_function_is_a_contradiction(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        return 0.5

    done = await one(bench, solve, reward=lambda task, result: 1.0)
    assert done.state == "failed"
    assert "give the reward in one way only" in done.error


async def test_an_attempt_without_a_call_names_a_proxy_variable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://10.0.0.1:3128")

    async def solve(task: JSON, llm: LLM) -> float:
        return 1.0

    done = await one(bench, solve)
    assert done.state == "succeeded"
    assert "HTTP_PROXY is set where the worker runs" in done.warning


async def test_an_agent_whose_lease_is_lost_is_stopped_and_reports_nothing(bench: Bench) -> None:
    stopped = asyncio.Event()

    async def solve(task: JSON, llm: LLM) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return 1.0

    [queued] = await bench.enqueue({})
    async with bench.worker(solve, heartbeat_s=0.1):
        await bench.running(1)
        assert await bench.store.cancel([queued.id]) == 1
        await asyncio.wait_for(stopped.wait(), 60)
    [attempt] = await bench.attempts(queued)
    assert attempt.error is None or "took" not in attempt.error


async def test_a_lease_is_kept_while_its_agent_runs(bench: Bench) -> None:
    ends: list[int] = []

    async def solve(task: JSON, llm: LLM) -> float:
        while len(set(ends)) < 4:
            [attempt] = await bench.attempts(queued)
            ends.append(attempt.lease_expires_ns)
            await asyncio.sleep(0.01)  # until the heartbeat has moved the lease's end three times
        return 1.0

    [queued] = await bench.enqueue({})
    async with bench.worker(solve, heartbeat_s=0.1):
        [done] = await bench.settled([queued])
    assert (done.state, done.attempt, done.lost) == ("succeeded", 1, 0)
    assert ends[0] < ends[-1]


async def test_a_worker_that_stops_gives_its_attempts_time_and_loses_the_rest(bench: Bench) -> None:
    both, stopped = asyncio.Barrier(3), asyncio.Event()

    async def solve(task: JSON, llm: LLM) -> float:
        await both.wait()
        await (stopped if task["ends"] else asyncio.Event()).wait()
        return 1.0

    short, long = await bench.enqueue({"ends": True}, {"ends": False})
    async with bench.worker(solve, drain_timeout_s=1.0) as worker:
        await both.wait()
        worker.stop()
        stopped.set()
        await bench.settled([short])
    assert [attempt.state for attempt in await bench.attempts(short)] == ["succeeded"]
    [attempt] = await bench.attempts(long)
    assert (attempt.state, attempt.error) == ("lost", "the worker was stopped")


async def test_the_client_claims_and_finishes_without_a_worker(bench: Bench) -> None:
    good, bad = await bench.enqueue({"x": 1}, {"x": 2})
    async with AgentLightningClient(bench.server.url, KEY, run_id=bench.run_id) as client:
        first, second = await client.claim(limit=2)
        assert client.llm(first).base_url == f"{bench.server.url}/r/{good.id}/1/v1"
        assert await client.heartbeat([first, second]) == [True, True]
        assert await client.finish(first, 0.5)
        assert await client.finish(second, state="failed", error="it broke")
        assert not await client.finish(first, 1.0)
    done = await bench.settled([good, bad])
    assert [(rollout.state, rollout.reward, rollout.error) for rollout in done] == [
        ("succeeded", 0.5, None),
        ("failed", None, "it broke"),
    ]


async def test_a_claim_that_waits_starts_as_soon_as_work_arrives(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        return 1.0

    async with bench.worker(solve):
        await asyncio.sleep(0.1)
        before = time.monotonic()
        await bench.settled(await bench.enqueue({}))
        assert time.monotonic() - before < 15  # the request for work stays open for 20 s


async def of_async_openai(task: JSON, llm: LLM) -> float:
    return float((await llm.async_openai().models.list()).object == "list")


def of_openai(task: JSON, llm: LLM) -> float:
    return float(llm.openai(max_retries=0).models.list().object == "list")


async def of_async_anthropic(task: JSON, llm: LLM) -> float:
    return float(isinstance((await llm.async_anthropic().models.list()).data, list))


def of_anthropic(task: JSON, llm: LLM) -> float:
    return float(isinstance(llm.anthropic(max_retries=0).models.list().data, list))


def of_openai_with_arguments(task: JSON, llm: LLM) -> float:
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.sync_http_client)
    return float(client.models.list().object == "list")


@pytest.mark.parametrize(
    "solve", [of_async_openai, of_openai, of_async_anthropic, of_anthropic, of_openai_with_arguments]
)
async def test_ready_clients_reach_the_gateway_past_a_proxy_variable(
    bench: Bench, solve: Callable[[JSON, LLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    queued = await bench.enqueue(*({"n": n} for n in range(4)))
    async with bench.worker(solve):
        done = await bench.settled(queued)
    assert [(rollout.state, rollout.reward) for rollout in done] == [("succeeded", 1.0)] * 4
