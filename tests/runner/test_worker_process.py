"""Worker processes with real signals, real hangs and a real server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from runner_bench import DEADLINE_S, KEY, LEASE_S, SHORT_LEASE, Bench, Server, gone, written

from agentlightning.records import JSON, Rollout
from agentlightning.runtime.children import secrets_line
from agentlightning.store.client import LightningStoreClient

pytestmark = pytest.mark.slow

BY_HAND = [pytest.mark.slow, pytest.mark.long]
"""What `make test-runner` runs beside a case of the same kind."""
QUICK = ("--abandon-s", "0.3", "--drain-timeout-s", "60")

AGENT = """
import asyncio, os, re, subprocess, sys, time, threading

def note(file):
    with open(file, "w") as out:
        out.write("here\\n")

def solve(task, llm):
    what = task.get("do")
    if "begun" in task:
        note(task["begun"])
    if what == "hang":
        threading.Event().wait()
    if what == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if what == "leak":
        child = subprocess.Popen(["setsid", "sleep", "600"])
        with open(task["file"], "w") as file:
            file.write(f"{child.pid}\\n")
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "wait":
        while not os.path.exists(task["go"]):
            time.sleep(0.01)
        note(task["go"] + ".seen")
    return 1.0
"""

ASYNC_AGENT = """
import asyncio, os, time

def block():
    time.sleep(600)

async def deeper():
    block()

async def solve(task, llm):
    what = task.get("do")
    if what == "block":
        await asyncio.create_task(deeper())
    if what == "wait":
        await asyncio.Event().wait()
    if what == "fail later":
        open(task["file"], "a").write("ready\\n")
        while not os.path.exists(task["file"] + ".go"):
            await asyncio.sleep(0.02)
        raise ConnectionError("the connection broke")
    return 1.0
"""


TROUBLE = """
import contextlib, os, sys, time


async def solve(task, llm):
    if task["trouble"] == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    elif task["trouble"] == "closed":
        sys.__stderr__.close()
    else:
        with contextlib.suppress(OSError):
            while True:
                os.open("/dev/null", os.O_RDONLY)
    time.sleep(600)
"""


async def attempts(bench: Bench, rollout: Rollout) -> list[tuple[str, str]]:
    return [(attempt.state, attempt.error or "") for attempt in await bench.attempts(rollout)]


async def test_a_synchronous_agent_that_hangs_costs_its_process_and_harms_no_sibling(
    bench: Bench, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    hang, sibling = [
        *await bench.enqueue({"do": "hang"}, timeout_s=0.8),
        *await bench.enqueue({"do": "wait", "go": str(go)}),
    ]
    process = bench.worker_process("--agent", bench.file(tmp_path, AGENT), "--concurrency", "2", *QUICK)
    await bench.settled([hang])
    go.touch()
    assert await asyncio.to_thread(bench.ended, process) == 75
    [(state, error)] = await attempts(bench, hang)
    assert state == "timed_out"
    assert "threading.Event().wait()" in error
    assert [state for state, _ in await attempts(bench, sibling)] == ["succeeded"]


async def test_an_agent_that_blocks_the_event_loop_is_timed_out_and_its_siblings_are_lost(
    bench: Bench, tmp_path: Path
) -> None:
    block, sibling = [
        *await bench.enqueue({"do": "block"}, timeout_s=0.5),
        *await bench.enqueue({"do": "wait"}),
    ]
    process = bench.worker_process("--agent", bench.file(tmp_path, ASYNC_AGENT), stderr=subprocess.PIPE)
    assert await asyncio.to_thread(bench.ended, process) == 75
    [(state, error)] = await attempts(bench, block)
    assert state == "timed_out"
    assert "time.sleep(600)" in error
    [(state, error)] = await attempts(bench, sibling)
    assert (state, "another agent blocked" in error) == ("lost", True)
    assert process.stderr is not None
    assert b"blocked the event loop" in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(
    "trouble", ["full", *(pytest.param(each, marks=BY_HAND) for each in ("closed", "descriptors"))]
)
async def test_a_worker_whose_loop_is_blocked_ends_though_it_can_tell_nobody(
    bench: Bench, tmp_path: Path, trouble: str
) -> None:
    await bench.enqueue({"trouble": trouble}, timeout_s=0.5)
    process = bench.worker_process("--agent", bench.file(tmp_path, TROUBLE), stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        assert await asyncio.to_thread(bench.ended, process) == 75
    finally:
        process.stderr.close()


@pytest.mark.long
async def test_a_worker_that_was_stopped_while_it_held_nothing_goes_on(bench: Bench, tmp_path: Path) -> None:
    process = bench.worker_process("--agent", bench.file(tmp_path, AGENT), *SHORT_LEASE)
    await bench.settled(await bench.enqueue({}))
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2 * LEASE_S)  # how long it stands still is what is tested
    process.send_signal(signal.SIGCONT)
    [done] = await bench.settled(await bench.enqueue({}))
    assert (done.state, process.poll()) == ("succeeded", None)


async def test_a_worker_that_is_killed_loses_its_attempts_to_another(bench: Bench, tmp_path: Path) -> None:
    spec = bench.file(tmp_path, AGENT)
    go = tmp_path / "go"
    [queued] = await bench.enqueue({"do": "wait", "go": str(go)})
    first = bench.worker_process("--agent", spec, "--worker-id", "first", *SHORT_LEASE)
    await bench.running(1)
    first.kill()
    go.touch()
    bench.worker_process("--agent", spec, "--worker-id", "second")
    [done] = await bench.settled([queued])
    assert (done.state, done.attempt, done.lost) == ("succeeded", 2, 1)
    ends = [(attempt.worker_id, attempt.state) for attempt in await bench.attempts(queued)]
    assert ends == [("first", "lost"), ("second", "succeeded")]


ACTING = """
import asyncio, os, time

def act(task):
    with open(task["file"], "a") as file:
        file.write(f"{os.environ['NAME']} {time.time()}\\n")

async def solve(task, llm):
    while not os.path.exists(task["go"]):
        act(task)
        await asyncio.sleep(0.05)
    return 1.0

def solve_in_thread(task, llm):
    while not os.path.exists(task["go"]):
        act(task)
        time.sleep(0.05)
    return 1.0
"""


def lines_of(acts: Path) -> list[str]:
    return acts.read_text().splitlines()


async def acted(acts: Path, name: str) -> None:
    """Wait until an agent of the worker of this name has acted a few times."""
    deadline = time.monotonic() + DEADLINE_S
    while sum(line.startswith(name) for line in lines_of(acts)) < 5:
        assert time.monotonic() < deadline, f"{name} did nothing"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "name", ["solve", *(pytest.param(each, marks=BY_HAND) for each in ("solve_in_thread", "command"))]
)
async def test_a_worker_that_stood_still_for_longer_than_its_lease_does_not_go_on_acting(
    bench: Bench, tmp_path: Path, name: str
) -> None:
    go, acts = tmp_path / "go", tmp_path / "acts"
    spec = bench.file(tmp_path, ACTING).rpartition(":")[0]
    agent = ("--agent", f"{spec}:{name}")
    if name == "command":
        script = tmp_path / "act.py"
        script.write_text(
            "import json, os, sys\n"
            f"sys.path.insert(0, {str(tmp_path)!r})\n"
            "task = json.load(open(os.environ['AGL_TASK']))\n"
            f"from {Path(spec).stem} import solve_in_thread\n"
            "print(solve_in_thread(task, None))\n"
        )
        agent = ("--command", f"{sys.executable} {script}")
    [queued] = await bench.enqueue({"file": str(acts), "go": str(go)})
    first = bench.worker_process(*agent, *SHORT_LEASE, "--worker-id", "first", env={"NAME": "first"})
    await written(acts)
    first.send_signal(signal.SIGSTOP)
    second = bench.worker_process(*agent, *SHORT_LEASE, "--worker-id", "second", env={"NAME": "second"})
    await acted(acts, "second")
    stood_still = [line.split()[0] for line in lines_of(acts)]
    assert "first" not in stood_still[stood_still.index("second") :], "a command's own process was not stopped"
    first.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(bench.ended, first) == 75  # by itself, while its agent would have gone on for ever
    go.touch()
    [done] = await bench.settled([queued])
    ends = [(attempt.worker_id, attempt.state) for attempt in await bench.attempts(queued)]
    assert done.state == "succeeded"
    assert (ends[0], ends[-1]) == (("first", "lost"), ("second", "succeeded"))
    assert {state for _, state in ends[:-1]} == {"lost"}  # a busy machine may cost the second a lease, too
    second.terminate()


async def test_a_worker_whose_server_is_away_stops_its_agents_before_their_leases_end(
    durable: Bench, tmp_path: Path
) -> None:
    go, acts = tmp_path / "go", tmp_path / "acts"
    spec = durable.file(tmp_path, ACTING)
    [queued] = await durable.enqueue({"file": str(acts), "go": str(go)})
    durable.worker_process("--agent", spec, *SHORT_LEASE, env={"NAME": "first"})
    await written(acts)
    durable.server.kill()
    killed = time.time()
    seen: list[str] = []
    while lines_of(acts) != seen:
        seen = lines_of(acts)
        await asyncio.sleep(1.0)
    assert float(seen[-1].split()[1]) < killed + LEASE_S
    durable.server.start()
    go.touch()
    [done] = await durable.settled([queued])
    assert (done.state, done.attempt, done.lost) == ("succeeded", 2, 1)


async def test_a_child_worker_ends_with_its_parent(bench: Bench, tmp_path: Path) -> None:
    spec = bench.file(tmp_path, AGENT)
    process = bench.worker_process("--agent", spec, "--child", *QUICK, stdin=subprocess.PIPE)
    assert process.stdin is not None
    os.write(process.stdin.fileno(), secrets_line({"AGL_SERVER_KEY": KEY}))
    await bench.settled(await bench.enqueue({}))
    process.stdin.close()
    assert await asyncio.to_thread(bench.ended, process) == 0


async def test_a_process_that_a_function_left_behind_ends_with_its_worker(bench: Bench, tmp_path: Path) -> None:
    process = bench.worker_process("--agent", bench.file(tmp_path, AGENT), *QUICK)
    await bench.settled(await bench.enqueue({"do": "leak", "file": str(tmp_path / "pid")}))
    leaked = int(await written(tmp_path / "pid"))
    process.terminate()
    await asyncio.to_thread(bench.ended, process)
    assert gone(leaked)


async def test_a_command_posts_its_reward_and_another_prints_it(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, urllib.request as web\n"
        "task = json.load(open(os.environ['AGL_TASK']))\n"
        "if task['post']:\n"
        "    head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
        "    web.urlopen(web.Request(os.environ['AGL_REWARD_URL'], json.dumps({'value': 0.25}).encode(), head))\n"
        "else:\n"
        "    print(json.dumps({'reward': 0.75}))\n"
    )
    bench.worker_process("--command", f"{sys.executable} -S {script}", env={"HTTP_PROXY": "http://10.0.0.1:1"})
    posted, printed = await bench.settled(await bench.enqueue({"post": True}, {"post": False}))
    assert [(rollout.state, rollout.reward) for rollout in (posted, printed)] == [
        ("succeeded", 0.25),
        ("succeeded", 0.75),
    ]


async def test_a_command_is_retried_timed_out_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(
        "if [ $AGL_ATTEMPT = 1 ]; then echo first fails; exit 9; fi\n"
        f"setsid sleep 600 &\necho $! > {tmp_path}/pid\necho waiting\nsleep 600\n"
    )
    bench.worker_process("--command", f"sh {script}")
    [queued] = await bench.enqueue({}, timeout_s=5.0, max_attempts=2)
    [done] = await bench.settled([queued])
    assert done.state == "failed"
    first, second = await bench.attempts(queued)
    assert (first.state, second.state) == ("failed", "timed_out")
    assert "exit code 9" in (first.error or "")
    assert (first.output, second.output) == ("first fails\n", "waiting\n")
    assert gone(int(await written(tmp_path / "pid")))


@pytest.mark.parametrize(
    ("source", "options", "config", "sentence"),
    [
        ("import nothing_like_it\n", (), {}, "cannot be imported: ModuleNotFoundError"),
        (AGENT, ("--run", "no-such-run"), {}, "no-such-run"),
        (AGENT, (), {"sandbox": {"type": "bubblewrap"}}, "a function agent cannot be isolated from its worker"),
        (AGENT, (), {"air": {"rules": {"nonsense": {"weight": 1.0}}}}, "air.rules.nonsense: no such rule"),
    ],
)
async def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    bench: Bench, tmp_path: Path, source: str, options: tuple[str, ...], config: JSON, sentence: str
) -> None:
    bench.run_id = (await bench.store.create_run("refusing", config)).id
    process = bench.worker_process("--agent", bench.file(tmp_path, source), *options, stderr=subprocess.PIPE)
    _, said = await asyncio.to_thread(process.communicate, None, DEADLINE_S)
    assert process.returncode == 2
    *notes, told = said.decode().splitlines()
    assert sentence in told
    assert all(note.startswith("note: ") for note in notes)


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Bench]:
    server = Server(f"sqlite:///{tmp_path}/agl.db")
    async with LightningStoreClient(server.url, KEY) as store:
        run = await store.create_run("durable", {})
        bench = Bench(server, store, run.id)
        yield bench
        for process in bench.processes:
            process.kill()
            process.wait()
    server.close()


@pytest.mark.long
async def test_a_failure_after_the_server_was_restarted_is_lost_not_failed(durable: Bench, tmp_path: Path) -> None:
    file = tmp_path / "ready"
    [queued] = await durable.enqueue({"do": "fail later", "file": str(file)})
    durable.worker_process("--agent", durable.file(tmp_path, ASYNC_AGENT))
    await written(file)
    durable.server.kill()
    durable.server.start()
    (tmp_path / "ready.go").touch()
    [done] = await durable.settled([queued])
    assert (done.state, done.lost, done.attempt) == ("failed", 1, 2)
    [(lost, why), (failed, _)] = await attempts(durable, queued)
    assert (lost, failed) == ("lost", "failed")
    assert "the server was away during the attempt" in why


async def test_a_worker_whose_agent_fails_while_the_server_is_away_outlives_its_lease_and_works_on(
    durable: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "ready"
    [queued] = await durable.enqueue({"do": "fail later", "file": str(file)})
    worker = durable.worker_process("--agent", durable.file(tmp_path, ASYNC_AGENT), *SHORT_LEASE)
    await written(file)
    durable.server.kill()
    (tmp_path / "ready.go").touch()
    leases_ran_out = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < leases_ran_out:
        assert worker.poll() is None, "no agent acted any more"
        await asyncio.sleep(0.1)
    durable.server.start()
    [done] = await durable.settled([queued])
    assert (done.state, done.lost, done.attempt) == ("failed", 1, 2)
    assert worker.poll() is None


async def test_an_attempt_that_ends_while_the_server_is_away_is_reported_when_it_is_back(
    durable: Bench, tmp_path: Path
) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    [queued] = await durable.enqueue({"do": "wait", "go": str(go), "begun": str(begun)})
    durable.worker_process("--agent", durable.file(tmp_path, AGENT))
    await written(begun)  # the worker knows that it has it
    durable.server.kill()
    go.touch()
    await written(tmp_path / "go.seen")
    durable.server.start()
    [done] = await durable.settled([queued])
    assert (done.state, done.attempt) == ("succeeded", 1)


async def test_a_second_signal_gives_the_leases_of_a_draining_worker_back_at_once(bench: Bench, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    [running] = await bench.enqueue({"do": "fail later", "file": str(begun)})
    agent = bench.file(tmp_path, ASYNC_AGENT)
    process = bench.worker_process("--agent", agent, "--drain-timeout-s", "600", stderr=subprocess.PIPE)
    await written(begun)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    with process.stderr as stderr:
        line = await asyncio.to_thread(lambda: next(line for line in stderr if b"draining" in line))
    assert line == b"note: draining: 1 running, which get 600 s; again ends them at once\n"
    [late] = await bench.enqueue({})
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(bench.ended, process) == 0
    assert await attempts(bench, running) == [("lost", "the worker was stopped")]
    assert await attempts(bench, late) == []
