"""Every way in which users' code can end: its attempt ends with a traceback, its siblings and its worker go on."""

import asyncio
import concurrent.futures
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Exit
from runner_bench import DEADLINE_S, SHORT_LEASE, Bench

from agentlightning.config.agent import AirConfig, AirRuleConfig
from agentlightning.errors import AgentError, boundary
from agentlightning.records import JSON, Rollout
from agentlightning.runner.agent import LLM
from agentlightning.runner.attempt import attributed_task
from agentlightning.runner.result import RolloutResult
from agentlightning.runner.shared_process import run_loop
from agentlightning.runner.user_code import load
from agentlightning.tracing.air import Air


class PanicException(BaseException):
    """Rust code panicked: pyo3's own, which tokenizers and polars raise, derives from BaseException alone, too."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


def endless() -> None:
    endless()


def chained() -> None:
    error: BaseException | None = None
    for _ in range(5000):
        try:
            raise ValueError("one of many") from error
        except ValueError as latest:
            error = latest
    assert error is not None
    raise error


def raising(error: BaseException) -> Callable[[], Any]:
    def end() -> None:
        raise error

    return end


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "SystemExit": (lambda: sys.exit(3), "SystemExit"),
    "KeyboardInterrupt": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "CancelledError": (raising(asyncio.CancelledError()), "CancelledError"),
    "CancelledError of a thread pool": (raising(concurrent.futures.CancelledError()), "CancelledError"),
    "GeneratorExit": (raising(GeneratorExit()), "GeneratorExit"),
    "StopIteration": (lambda: next(iter(())), "StopIteration"),
    "StopAsyncIteration": (raising(StopAsyncIteration()), "StopAsyncIteration"),
    "BaseException": (raising(BaseException("bare")), "BaseException: bare"),
    "BaseExceptionGroup": (raising(BaseExceptionGroup("two", [SystemExit(1), ValueError("v")])), "BaseExceptionGroup"),
    "a panic": (raising(PanicException("rust")), "PanicException: rust"),
    "pytest's Exit": (raising(Exit("enough")), "Exit: enough"),
    "pytest.skip": (lambda: pytest.skip("not here"), "Skipped: not here"),
    "RecursionError": (endless, "RecursionError"),
    "a chain of causes": (chained, "ValueError"),
    "MemoryError": (raising(MemoryError()), "MemoryError"),
    "no text": (raising(Unspeakable()), "Unspeakable"),
    "half a character": (raising(ValueError("\udc80 \0")), "ValueError"),
}


async def check_each_fails_alone(bench: Bench, agent: Callable[..., Any], **options: Any) -> list[Rollout]:
    """A rollout ends in each way, beside others of the same agent that succeed; returns those that failed."""
    ends = [*ENDS, None, None]
    *failed, one, other = await bench.solved(agent, *({"end": end} for end in ends), **options)
    assert [(done.state, done.attempt) for done in (one, other)] == [("succeeded", 1)] * 2
    for end, done in zip(ENDS, failed, strict=True):
        assert (done.state, done.attempt) == ("failed", 1), end
        assert ENDS[end][1] in (done.error or ""), end
    return failed


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_an_agent_that_ends_in_any_way_fails_with_its_traceback_and_alone(
    bench: Bench, asynchronous: bool
) -> None:
    def plain(task: JSON, llm: LLM) -> float:
        if task["end"]:
            ENDS[task["end"]][0]()
        return 1.0

    async def coroutine(task: JSON, llm: LLM) -> float:
        await asyncio.sleep(0)
        return plain(task, llm)

    await check_each_fails_alone(bench, coroutine if asynchronous else plain)


async def test_a_reward_function_that_ends_in_any_way_fails_its_attempt_alone(bench: Bench) -> None:
    def solve(task: JSON, llm: LLM) -> None:
        return None

    def reward(task: JSON, result: RolloutResult) -> float:
        if task["end"]:
            ENDS[task["end"]][0]()
        return 1.0

    for failed in await check_each_fails_alone(bench, solve, reward=reward):
        assert "the agent" not in (failed.error or "").splitlines()[-1]


async def test_a_rule_of_air_that_ends_in_any_way_fails_its_attempt_alone(bench: Bench) -> None:
    ends = ["SystemExit", "CancelledError", "StopIteration", "a panic"]

    class Custom(Air):
        def rewards(self, calls: Any, spans: Any = ()) -> list[Any]:
            with boundary("air.rules.mine"):
                if left:
                    ENDS[left.pop()][0]()
            return []

    left = ends.copy()

    async def solve(task: JSON, llm: LLM) -> float:
        return 1.0

    queued = await bench.enqueue(*[{}] * 6, max_attempts=1)
    config = AirConfig(rules={"mine": AirRuleConfig(weight=1, run="a.py:f")})
    async with bench.worker(solve, air=Custom(config, {"mine": lambda *_: None})):
        done = await bench.settled(queued)
    assert sorted(one.state for one in done) == ["failed"] * 4 + ["succeeded"] * 2
    errors = "".join(one.error or "" for one in done)
    assert all(ENDS[end][1] in errors for end in ends)


@pytest.mark.parametrize(
    "end", [name for name in ENDS if name not in ("KeyboardInterrupt", "CancelledError", "no text")]
)
def test_a_boundary_lets_nothing_through_but_ctrl_c(end: str) -> None:
    with pytest.raises(AgentError, match="the thing failed: "), boundary("the thing"):
        ENDS[end][0]()


@pytest.mark.parametrize(
    "source", ["raise GeneratorExit", "import pytest\npytest.skip('not here', allow_module_level=True)"]
)
def test_a_file_that_ends_while_it_is_imported_is_one_sentence(tmp_path: Path, source: str) -> None:
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(AgentError, match="cannot be imported"):
        load(f"{tmp_path / 'agent.py'}:solve")


# --- the worker's process ------------------------------------------------------------------------------------------

SHARED = """
import asyncio, os, signal, sys, threading

def fork(end):
    child = os.fork()
    if child == 0:
        end()
    return child

async def forked_in_a_coroutine():
    child = fork(lambda: sys.exit(7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

async def task_exits():
    asyncio.create_task(exits(), name="exits")
    await asyncio.sleep(600)

async def exits():
    sys.exit(5)

async def callback_exits():
    asyncio.get_running_loop().call_soon(sys.exit, 6)
    await asyncio.sleep(0.2)

async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.2)

async def cancels_every_task():
    await asyncio.sleep(0.5)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0.2)

def late(*_):
    raise TimeoutError("too late")

async def alarmed_while_it_waits():
    await asyncio.sleep(1.0)  # a process has one alarm: the other agent's is over
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    await asyncio.sleep(600)

async def alarmed_while_it_computes():
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            pass
    except TimeoutError:
        pass

def thread_exits():
    def late():
        os._exit(9)
    thread = threading.Thread(target=late)
    thread.start()
    thread.join()

async def solve(task, llm):
    what = task["do"]
    if what == "os._exit":
        os._exit(4)
    elif what == "thread":
        await asyncio.to_thread(thread_exits)
    elif what == "sibling":
        await asyncio.sleep(2.0)
    else:
        await globals()[what]()
    return 1.0
"""


@pytest.mark.slow
async def test_what_would_end_a_worker_process_ends_one_attempt(bench: Bench, tmp_path: Path) -> None:
    fails = {
        "os._exit": "SystemExit",
        "task_exits": "SystemExit: 5",
        "alarmed_while_it_waits": "TimeoutError: too late",
    }
    goes_on = [
        "thread",
        "callback_exits",
        "stops_the_loop",
        "alarmed_while_it_computes",
        "cancels_every_task",
        "forked_in_a_coroutine",
        "sibling",
    ]
    queued = await bench.enqueue(*({"do": do} for do in (*fails, *goes_on)), max_attempts=1, timeout_s=60)
    agent = bench.file(tmp_path, SHARED)
    worker = bench.worker_process("--agent", agent, "--concurrency", "16", *SHORT_LEASE)
    done = await bench.settled(queued)
    assert worker.poll() is None
    assert [(one.state, one.lost) for one in done] == [("failed", 0)] * len(fails) + [("succeeded", 0)] * len(goes_on)
    for one, sign in zip(done, fails.values(), strict=False):
        assert sign in (one.error or "")
        assert "agent.py" in (one.error or "")


def test_ctrl_c_before_agents_run_ends_the_loop() -> None:
    async def work() -> int:
        asyncio.get_running_loop().call_soon(ENDS["KeyboardInterrupt"][0])
        await asyncio.sleep(600)
        return 0

    with pytest.raises(KeyboardInterrupt):
        run_loop(work(), "asyncio", attributed_task, lambda: False)


# --- event loops and alarms ----------------------------------------------------------------------------------------

NESTED = """
import asyncio
import nest_asyncio2

async def solve(task, llm):
    nest_asyncio2.apply()
    async def inner():
        await asyncio.sleep(0.01)
        return 1.0
    return asyncio.run(inner())
"""
PLAIN = """
import os, signal

def timed(result):
    def late(*_):
        raise TimeoutError("too late")
    try:
        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(5)
    except ValueError:
        return 0.0  # as math_verify: swallowed, so that every answer is wrong
    try:
        return result
    finally:
        signal.alarm(0)

def solve(task, llm):
    what = task["do"]
    if what == "os._exit":
        os._exit(4)
    if what == "fork":
        child = os.fork()
        if child == 0:
            return 0.0  # forgets to end
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return timed(1.0) if what == "alarm" else 1.0

def answer(task, llm):
    return "42"

def reward(task, result):
    return {"right": timed(0.5), "length": len(result.answer)}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event_loop", "state", "sign"),
    [("auto", "failed", 'set agent.event_loop = "asyncio", or make'), ("asyncio", "succeeded", "")],
)
async def test_nest_asyncio_works_on_asyncios_own_loop_and_elsewhere_says_what_to_do(
    bench: Bench, tmp_path: Path, event_loop: str, state: str, sign: str
) -> None:
    pytest.importorskip("nest_asyncio2")
    run = await bench.store.create_run("nested", {"agent": {"event_loop": event_loop}})
    bench.run_id = run.id
    queued = await bench.enqueue({}, {}, max_attempts=1)
    bench.worker_process("--agent", bench.file(tmp_path, NESTED), *SHORT_LEASE)
    done = await bench.settled(queued)
    assert [one.state for one in done] == [state] * 2
    assert sign in (done[0].error or "")


@pytest.mark.parametrize(
    ("act", "advice"),
    [
        (lambda: asyncio.get_event_loop(), "a plain function runs in a thread"),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL), "make the agent a program"),
    ],
)
async def test_an_error_of_the_agents_place_says_what_to_do(bench: Bench, act: Callable[[], Any], advice: str) -> None:
    def solve(task: JSON, llm: LLM) -> float:
        act()
        return 1.0

    [done] = await bench.solved(solve, {})
    assert advice in (done.error or "")


@pytest.mark.slow
async def test_a_plain_agent_that_exits_or_forks_harms_no_sibling_and_alarms_work_in_reward_functions_alone(
    bench: Bench, tmp_path: Path
) -> None:
    queued = await bench.enqueue(*({"do": do} for do in ("os._exit", "alarm", "fork", "nothing")), max_attempts=1)
    agent = bench.file(tmp_path, PLAIN)
    worker = bench.worker_process("--agent", agent, *SHORT_LEASE)
    done = await bench.settled(queued)
    assert [(one.state, one.lost) for one in done] == [("failed", 0)] * 2 + [("succeeded", 0)] * 2
    assert "SIGALRM" in (done[1].error or "")
    assert "agent.command" in (done[1].error or "")
    worker.terminate()
    assert await asyncio.to_thread(worker.wait, DEADLINE_S) == 0
    queued = await bench.enqueue({}, {}, max_attempts=1)
    file = agent.rpartition(":")[0]
    bench.worker_process("--agent", f"{file}:answer", "--reward", f"{file}:reward", *SHORT_LEASE)
    assert [one.reward for one in await bench.settled(queued)] == [2.5, 2.5]
