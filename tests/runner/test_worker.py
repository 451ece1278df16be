"""A worker on the test's own event loop, against a real server."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from runner_bench import DEADLINE_S, KEY, Bench, a_call

from agentlightning.config.agent import AirConfig
from agentlightning.records import JSON, Call, Reward, Span
from agentlightning.runner.agent import LLM, emit_reward
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.client import AgentLightningClient
from agentlightning.tracing.air import Air


async def one(bench: Bench, agent: Any, task: JSON | None = None, **options: Any) -> Any:
    """The rollout that an agent made of a task."""
    [done] = await bench.solved(agent, task or {}, **options)
    return done


async def test_an_asynchronous_agents_return_value_is_the_reward(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        assert llm.base_url.startswith(bench.server.url)
        return task["x"] / 2

    done = await one(bench, solve, {"x": 1})
    assert (done.state, done.reward, done.attempt) == ("succeeded", 0.5, 1)
    [reward] = await bench.store.rewards([done.id])
    assert reward.source == "return"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_as_many_rollouts_run_at_a_time_as_a_worker_has_places_for(bench: Bench, asynchronous: bool) -> None:
    everybody, threads = asyncio.Barrier(8), threading.Barrier(8)

    def plain(task: JSON, llm: LLM) -> float:
        assert threading.current_thread() is not threading.main_thread()
        threads.wait(DEADLINE_S)
        return 1.0

    async def coroutine(task: JSON, llm: LLM) -> float:
        await everybody.wait()
        return 1.0

    queued = await bench.enqueue(*({"n": n} for n in range(16)))
    async with bench.worker(coroutine if asynchronous else plain, concurrency=8):
        assert {rollout.state for rollout in await bench.settled(queued)} == {"succeeded"}


async def test_an_agent_that_raises_fails_with_the_traceback_of_its_own_frames(bench: Bench) -> None:
    def divide(x: int) -> float:
        return 1 / x

    async def solve(task: JSON, llm: LLM) -> float:
        if task["what"] == "long":
            raise ValueError("x" * 100_000)
        if task["what"] == "cancel":
            raise asyncio.CancelledError
        return divide(0)

    queued = await bench.enqueue(*({"what": what} for what in ("divide", "long", "cancel")))
    async with bench.worker(solve):
        done = await bench.settled(queued)
    divided, long, cancelled = (rollout.error or "" for rollout in done)
    assert "ZeroDivisionError: division by zero" in divided
    assert "in divide" in divided
    assert "runner/execution.py" not in divided
    assert len(long) < 8500
    assert "cancelled its own attempt" in cancelled


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
        (iter(()), "expected a finite number"),
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
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(emit_reward, True))

    done = await one(bench, solve)
    assert done.reward == 1.0
    rewards = await bench.store.rewards([done.id])
    assert sorted((r.value, r.name, r.source) for r in rewards) == [
        (0.1, "step", "emitted"),
        (0.25, "reward", "emitted"),
        (1.0, "reward", "emitted"),
    ]
    assert [r.call_id for r in rewards if r.name == "step"] == [call.id for call in await bench.store.calls([done.id])]


@pytest.mark.parametrize(
    ("returned", "judge", "sentence"),
    [
        ("4", lambda task, result: task["missing"], "the reward function failed: KeyError: 'missing'"),
        ("4", lambda task, result: None, "the reward function's value: expected a finite number, got NoneType None"),
        (0.5, lambda task, result: 1.0, "give the reward in one way only"),
    ],
)
async def test_a_reward_function_that_gives_no_reward_fails_the_attempt_and_says_whose_fault_it_was(
    bench: Bench, returned: object, judge: Callable[..., Any], sentence: str
) -> None:
    async def solve(task: JSON, llm: LLM) -> object:
        return returned

    done = await one(bench, solve, reward=judge)
    assert done.state == "failed"
    assert sentence in done.error


async def test_a_step_reward_of_no_call_fails_the_attempt_alone(bench: Bench) -> None:
    everybody = asyncio.Barrier(2)

    async def solve(task: JSON, llm: LLM) -> float:
        if task["bad"]:
            emit_reward(1.0, call_id="no-such-call")
        await everybody.wait()
        return 1.0

    bad, good = await bench.solved(solve, {"bad": True}, {"bad": False})
    assert (bad.state, good.state) == ("failed", "succeeded")
    assert "got no-such-call" in (bad.error or "")


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


async def of_async_openai(task: JSON, llm: LLM) -> float:
    return float((await llm.async_openai().models.list()).object == "list")


def of_openai(task: JSON, llm: LLM) -> float:
    return float(llm.openai(max_retries=0).models.list().object == "list")


async def of_async_anthropic(task: JSON, llm: LLM) -> float:
    return float(isinstance((await llm.async_anthropic().models.list()).data, list))


def of_anthropic(task: JSON, llm: LLM) -> float:
    return float(isinstance(llm.anthropic(max_retries=0).models.list().data, list))


@pytest.mark.parametrize("solve", [of_async_openai, of_openai, of_async_anthropic, of_anthropic])
async def test_ready_clients_reach_the_gateway_past_a_proxy_variable(
    bench: Bench, solve: Callable[[JSON, LLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    done = await one(bench, solve)
    assert (done.state, done.reward) == ("succeeded", 1.0)
