"""AIR in a worker: when an attempt ends, the rules' rewards are in the store with its end, whatever that end was."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runner_bench import DEADLINE_S, Bench, a_call

from agentlightning.config.agent import AirConfig
from agentlightning.config.base import parse_settings
from agentlightning.errors import ConfigError
from agentlightning.records import JSON, Call, Rollout, Span
from agentlightning.runner.agent import LLM
from agentlightning.runner.air import load_air
from agentlightning.tracing.air import Air, air_of

RULES: dict[str, Any] = {"truncated": -0.5, "tool_error": -0.25}


def air(own: Any = None) -> Air:
    rules = {**RULES, **({} if own is None else {"mine": {"weight": 1.0, "run": "rules.py:mine"}})}
    made = air_of(parse_settings(AirConfig, {"rules": rules}, "air"), lambda spec: own)
    assert made is not None
    return made


async def told(bench: Bench, rollout: Rollout) -> list[tuple[str, float, str]]:
    rewards = await bench.store.rewards([rollout.id])
    return sorted((reward.name, reward.value, reward.source) for reward in rewards)


def cut(llm: LLM) -> Call:
    """A call whose answer was cut at its limit."""
    return replace(a_call(llm, "and so"), finish_reason="length", started_ns=1, finished_ns=time.time_ns())


async def agent(bench: Bench, llm: LLM) -> None:
    """One call that was cut, and a tool that failed after it."""
    call = cut(llm)
    await bench.store.append_calls([call])
    span = Span(
        id=f"{call.rollout_id}.{call.attempt}.{1:016x}",
        run_id=bench.run_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        name="execute_tool sql",
        attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "sql"},
        status="error",
        started_ns=time.time_ns(),
        finished_ns=time.time_ns(),
    )
    await bench.store.append_spans([span])


@pytest.mark.parametrize("end", ["reward", "none", "failure"])
async def test_the_rules_rewards_are_there_when_the_rollout_is_finished_however_it_ended(
    bench: Bench, end: str
) -> None:
    async def solve(task: JSON, llm: LLM) -> float | None:
        await agent(bench, llm)
        if end == "failure":
            raise ValueError("no")
        return 1.0 if end == "reward" else None

    [rollout] = await bench.solved(solve, {"n": 1}, air=air())
    own = [("reward", 1.0, "return")] if end == "reward" else []
    assert await told(bench, rollout) == [("air.tool_error", -0.25, "air"), ("air.truncated", -0.5, "air"), *own]
    [call] = await bench.store.calls([rollout.id])
    steps = [reward.call_id for reward in await bench.store.rewards([rollout.id]) if reward.source == "air"]
    assert steps == [call.id, call.id]
    assert rollout.state == ("succeeded" if end == "reward" else "failed")
    assert ("has no final reward" in (rollout.error or "")) == (end == "none")


async def test_each_attempt_is_judged_by_its_own_record(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        if llm.base_url.split("/")[-2] == "1":
            await agent(bench, llm)
            raise ValueError("no")
        await bench.store.append_calls([cut(llm)])
        return 1.0

    async with bench.worker(solve, air=air()):
        [rollout] = await bench.settled(await bench.enqueue({"n": 1}, max_attempts=2))
    latest = [reward.name for reward in await bench.store.rewards([rollout.id]) if reward.attempt == 2]
    assert sorted(latest) == ["air.truncated", "reward"]


async def test_a_rule_of_ones_own_that_raises_fails_the_attempt_by_name(bench: Bench) -> None:
    async def solve(task: JSON, llm: LLM) -> float:
        await agent(bench, llm)
        return 1.0

    async with bench.worker(solve, air=air(lambda step, earlier: 1 / 0)):
        for rollout in await bench.settled(await bench.enqueue({"n": 1}, {"n": 2})):
            assert rollout.state == "failed"
            assert rollout.error == "air.rules.mine failed: ZeroDivisionError: division by zero"


async def test_a_slow_rule_of_ones_own_does_not_hold_up_other_attempts(bench: Bench) -> None:
    quick = asyncio.Event()

    def waits(step: Any, earlier: Any) -> float:
        slow = step.call.completion["content"] == "slow"
        if slow:
            asyncio.run_coroutine_threadsafe(quick.wait(), loop).result(DEADLINE_S)
        return 1.0

    async def solve(task: JSON, llm: LLM) -> float:
        await bench.store.append_calls([a_call(llm, task["kind"])])
        return 1.0

    loop = asyncio.get_running_loop()
    async with bench.worker(solve, air=air(waits)):
        slow, fast = await bench.enqueue({"kind": "slow"}, {"kind": "fast"})
        await bench.settled([fast])
        quick.set()
        [rollout] = await bench.settled([slow])
    assert ("air.mine", 1.0, "air") in await told(bench, rollout)


def test_a_rule_of_ones_own_is_found_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    source = ("def mine(step, earlier): return 0.5", "def wrong(step): ...", "async def slow(step, earlier): ...")
    file.write_text("\n".join(source))
    made = load_air({"rules": {"mine": {"weight": 1.0, "run": f"{file}:mine"}}})
    assert made is not None
    assert made.own["mine"](None, []) == 0.5  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected to be callable as \(step, earlier\)"):
        load_air({"rules": {"wrong": {"weight": 1.0, "run": f"{file}:wrong"}}})
    with pytest.raises(ConfigError, match="expected a plain function"):
        load_air({"rules": {"slow": {"weight": 1.0, "run": f"{file}:slow"}}})


async def test_a_worker_killed_before_the_end_leaves_no_rewards_of_its_attempt_and_its_successor_gives_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    run = await bench.store.create_run("air", {"air": {"rules": {"calls": {"weight": -0.5, "budget": 1}}}})
    own = Bench(bench.server, bench.store, run.id)
    source = f"""
import asyncio, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from runner_bench import KEY, a_call
from agentlightning.store.client import LightningStoreClient

async def solve(task, llm):
    async with LightningStoreClient({bench.server.url!r}, KEY) as store:
        for number in range(3):
            await store.append_calls([a_call(llm, str(number))])
    if task["hangs"] and llm.base_url.split("/")[-2] == "1":
        await asyncio.sleep(60)
    return 1.0
"""
    options = ("--agent", own.file(tmp_path, source), "--worker-id", "one")
    [rollout] = await own.enqueue({"hangs": True})
    first = own.worker_process(*options, "--lease-s", "3", "--heartbeat-s", "0.1")
    while len(await own.store.calls([rollout.id])) < 3:
        assert first.poll() is None
        await asyncio.sleep(0.02)
    first.kill()
    first.wait()
    second = own.worker_process(*options)
    [rollout] = await own.settled([rollout])
    second.terminate()
    second.wait(DEADLINE_S)
    rewards = [reward for reward in await own.store.rewards([rollout.id]) if reward.source == "air"]
    assert [(reward.attempt, reward.value) for reward in rewards] == [(2, -0.5), (2, -0.5)]
    assert [reward.call_id for reward in rewards] == [call.id for call in await own.store.calls([rollout.id])][1:]
