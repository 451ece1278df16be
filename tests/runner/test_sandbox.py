"""What a sandbox keeps from an agent, and what is refused as it cannot be isolated here. test_command.py has the rest."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from runner_bench import DEADLINE_S, SHORT_LEASE, Bench, Server
from test_command import TELL, Listener, boxed, left_of, listener, of_rollout, python, run

from agentlightning.config.agent import Bubblewrap, Container
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.runner.command import CommandFailed, CommandRunner
from agentlightning.runner.sandboxes import CommandAgent, check_sandbox, store_folders
from agentlightning.sandbox.gateway_socket import MAX_CONNECTIONS, ServerAddress
from agentlightning.sandbox.kinds import MAX_PROCESSES, Box, View, container_command
from agentlightning.sandbox.limits import PREFIX, Cgroups
from agentlightning.sandbox.runner import SandboxRunner

__all__ = ["listener"]  # a fixture
Inside = Callable[..., CommandRunner]
TAKE_UP = """
import os, signal, socket, time, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
kept, refused = [], 0
while refused < 40:  # the worker takes some of them out meanwhile
    each = socket.socket(socket.AF_UNIX)
    each.setblocking(False)
    if each.connect_ex("/run/agl/gateway.sock"):
        refused += 1
        time.sleep(0.02)
    else:
        refused = 0
    kept.append(each)
one = socket.create_connection((url.hostname, url.port))
"""
"""Fills the queue in which the relay's own connections wait, and has it make one."""


def a_runner(
    settings: Bubblewrap, command: str, server_url: str = "http://127.0.0.1:1", hidden: Sequence[Path] = ()
) -> SandboxRunner:
    """One that was not tried."""
    return SandboxRunner(CommandAgent(command=command, sandbox=settings, server_url=server_url, hidden=hidden))


@pytest.fixture
async def inside(listener: Listener, tmp_path: Path) -> AsyncIterator[Inside]:
    """Makes the runner of a command whose agent may read `tmp_path`."""
    runners: list[CommandRunner] = []

    def make(command: str, **options: Any) -> CommandRunner:
        runners.append(boxed(command, listener.url, tmp_path, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


async def test_an_agent_sees_its_own_files_and_processes_and_nothing_else(
    inside: Inside, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-of-the-worker")
    (tmp_path / "known.txt").write_text("mine")
    source = """
import json, os
def opens(path, mode):
    try:
        with open(path, mode) as file:
            return True
    except OSError:
        return False
print(json.dumps({
    "known": open(FOLDER + "/known.txt").read(),
    "writes": [path for path in (FOLDER + "/known.txt", FOLDER + "/new", "/x", "/usr/x", "/etc/passwd",
        "/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/self/oom_score_adj", "/run/agl/x", "/dev/x")
        if opens(path, "a")],
    "home": opens(os.environ["HOME"] + "/new", "a"), "tmp": opens("/tmp/new", "a"), "shm": opens("/dev/shm/new", "a"),
    "reads": [path for path in (__REAL_HOME__, "/etc/shadow", "/etc/ssl/private", "/sys/kernel", "/var", CHECKOUT)
        if os.path.exists(path)],
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "environment": [name for name in os.environ if "sk-of-the-worker" in os.environ[name]],
    "tasks": os.listdir("/run/agl"),
}))
"""
    for name, value in (("FOLDER", tmp_path), ("CHECKOUT", __file__), ("__REAL_HOME__", Path.home() / ".bashrc")):
        source = source.replace(name, repr(str(value)))
    done = await run(inside(python(tmp_path, source)), url=listener.url)
    found = json.loads(str(done.output))
    assert found["known"] == "mine"
    assert (found["home"], found["tmp"], found["shm"]) == (True, True, True)
    assert len(found["processes"]) == 2  # the relay and itself
    assert sorted(found["tasks"]) == ["gateway.sock", "relay.py", "task.json"]
    assert (found["writes"], found["reads"], found["environment"]) == ([], [], [])


@pytest.fixture
async def other() -> AsyncIterator[Listener]:
    """A server that is not the gateway."""
    other = Listener()
    await other.start()
    yield other
    other.close()


async def test_the_gateway_is_all_that_an_agent_reaches(
    inside: Inside, listener: Listener, other: Listener, tmp_path: Path
) -> None:
    source = f"""{TELL}
tell("through")
def refused(address):
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError:
        return 1
    return 0
port = int({other.url.rpartition(":")[2]})
gateway = urllib.parse.urlsplit(os.environ["AGL_REWARD_URL"]).port
places = [("127.0.0.1", port), ("192.0.2.1", gateway), ("127.0.0.2", port)]
print(sum(refused(address) for address in places))
"""
    done = await run(inside(python(tmp_path, source)), url=listener.url)
    assert await listener.told() == "through"
    assert done.reward == 3


async def test_an_agent_that_opens_connections_without_end_takes_a_bounded_number_of_descriptors(
    inside: Inside, listener: Listener, tmp_path: Path
) -> None:
    source = f"""{TELL}
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
kept = []
for _ in range(400):
    one = socket.socket(); one.setblocking(False); one.connect_ex((url.hostname, url.port)); kept.append(one)
    other = socket.socket(socket.AF_UNIX); other.setblocking(False)
    other.connect_ex("/run/agl/gateway.sock"); kept.append(other)
import time; time.sleep(1)
print(1)
"""
    runner = inside(python(tmp_path, source))
    most = 0
    work = asyncio.create_task(run(runner, url=listener.url))
    while not work.done():
        most = max(most, len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(0.02)
    assert (await work).reward == 1
    assert most < 3 * MAX_CONNECTIONS + 100  # two ends each, and those of the listener of this very process


async def test_an_agent_that_fills_the_way_on_which_it_is_told_to_end_holds_nobody_up(
    server: Server, bench: Bench, tmp_path: Path
) -> None:
    boxed("sh", server.url, tmp_path)
    config = {"sandbox": {"type": "bubblewrap", "readable": [str(tmp_path)]}}
    bench.run_id = (await bench.store.create_run("boxed", config)).id
    source = f"""{TAKE_UP}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
one.close()
way = os.open("/proc/1/fd/0", os.O_WRONLY | os.O_NONBLOCK)
full = False
while True:
    try:
        os.write(way, bytes(1 if full else 4096))
    except BlockingIOError:
        if not full:
            print("full", flush=True)
        full = True
"""
    options = ("--concurrency", "2", "--blocked-s", "5")
    worker = bench.worker_process("--command", python(tmp_path, source), *options)
    [queued] = await bench.enqueue({}, timeout_s=15.0, max_attempts=1)
    [done] = await bench.settled([queued])
    [attempt] = await bench.attempts(queued)
    assert (done.state, attempt.state, attempt.output) == ("failed", "timed_out", "full\n")
    worker.terminate()
    assert bench.ended(worker) == 0


async def test_a_relay_whose_way_to_the_worker_is_taken_up_goes_on(
    inside: Inside, listener: Listener, tmp_path: Path
) -> None:
    source = f"""{TAKE_UP}
one.settimeout(30)
print(int(one.recv(1) == b""))
"""
    runner = inside(python(tmp_path, source))
    assert (await run(runner, url=listener.url)).reward == 1


async def test_an_attempt_that_is_cancelled_while_its_control_group_is_made_leaves_none(
    inside: Inside, listener: Listener, tmp_path: Path
) -> None:
    parents = Cgroups().parents
    if not parents:
        pytest.skip("no control group can be made here")

    def made() -> list[Path]:
        return [folder for parent in parents for folder in parent.glob(f"{PREFIX}{os.getpid()}-*")]

    runner = inside("sleep 600")
    work = asyncio.create_task(run(runner, url=listener.url))
    await asyncio.sleep(0)
    deadline = time.monotonic() + DEADLINE_S
    while not made():  # without a turn of the loop: it does not hear that the group was made
        assert time.monotonic() < deadline, "it was not made"
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert made() == []


@pytest.mark.parametrize(("program", "told"), [("podman", True), ("docker", False)])
def test_podman_is_told_to_make_nothing_writable_by_itself(tmp_path: Path, program: str, told: bool) -> None:
    view = View(shown=(), hidden=())
    box = Box(name="agl-1", folder=tmp_path, view=view, memory_mb=64, image="i", cwd="/", relay=[], environment={})
    words = container_command(box, program)
    assert ("--read-only-tmpfs=false" in words) == told  # Docker has no such option, and makes nothing writable
    assert "/tmp:rw,mode=1777,size=32m" in words


async def test_memory_is_bounded_for_all_processes_together(inside: Inside, listener: Listener, tmp_path: Path) -> None:
    source = """
import os, sys
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(60_000_000)
        for place in range(0, len(held), 4096):
            held[place] = 1
        os.read(os.pipe()[0], 1)
_, status = os.wait()
sys.exit(os.WTERMSIG(status))
"""
    runner = inside(python(tmp_path, source), memory_mb=160)
    with pytest.raises(CommandFailed, match=r"it reached sandbox\.memory_mb"):
        await run(runner, url=listener.url)


async def test_processes_are_bounded(inside: Inside, listener: Listener, tmp_path: Path) -> None:
    source = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    print(made)
"""
    runner = inside(python(tmp_path, source))
    done = await run(runner, url=listener.url)
    assert isinstance(done.reward, int)
    assert MAX_PROCESSES / 2 < done.reward < MAX_PROCESSES


async def test_what_an_agent_keeps_is_bounded(inside: Inside, listener: Listener, tmp_path: Path) -> None:
    source = """
import errno, os
try:
    with open(os.environ["HOME"] + "/much", "wb") as file:
        for _ in range(64):
            file.write(bytes(1_000_000))
except OSError as full:
    print(int(full.errno == errno.ENOSPC))
"""
    assert (await run(inside(python(tmp_path, source), memory_mb=64), url=listener.url)).reward == 1


async def test_runs_and_the_store_are_left_out_of_what_is_readable(
    inside: Inside, listener: Listener, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "agl.db").write_text("secret")
    (tmp_path / "data.txt").write_text("data")
    hidden = store_folders({"store": {"url": f"sqlite:///{tmp_path}/runs/agl.db"}}, None)
    command = f"sh -c 'cat {tmp_path}/data.txt; ls -A {tmp_path}/runs; echo'"
    runner = inside(command, hidden=hidden)
    assert (await run(runner, url=listener.url)).output == "data\n"
    later = tmp_path / "later"  # it comes after the worker has started
    runner = inside(f"sh -c 'ls -A {tmp_path}/later; echo'", hidden=[later])
    (later / "run-1").mkdir(parents=True)
    assert (await run(runner, url=listener.url)).output == "\n"
    with pytest.raises(ConfigError, match="holds runs or the store, which no agent may read"):
        a_runner(Bubblewrap(readable=(str(tmp_path),)), "sh", hidden=[tmp_path])
    with pytest.raises(ConfigError, match="which no agent may read"):
        a_runner(Bubblewrap(readable=(str(tmp_path / "runs"),)), "sh", hidden=[tmp_path])


@pytest.mark.skipif("AGL_TEST_IMAGE" not in os.environ, reason="AGL_TEST_IMAGE names no image of Podman with python3")
async def test_a_container_reaches_the_gateway_alone_and_ends_with_its_program(
    listener: Listener, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(f"{TELL}\ntell('through')\nos.kill(os.getpid(), 11)\n")
    settings = Container(image=os.environ["AGL_TEST_IMAGE"], readable=(str(tmp_path),), memory_mb=64)
    agent = CommandAgent(command=f"python3 -S {tmp_path}/agent.py", sandbox=settings, server_url=listener.url)
    await asyncio.to_thread(check_sandbox, agent)
    runner = SandboxRunner(agent)
    with pytest.raises(CommandFailed, match="was killed by SIGSEGV"):
        await run(runner, url=listener.url)
    assert await listener.told() == "through"
    runner.close()
    left = await asyncio.create_subprocess_exec("podman", "ps", "--all", "--quiet", stdout=asyncio.subprocess.PIPE)
    assert (await left.communicate())[0] == b""


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_what_cannot_be_isolated_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for readable, word in (("/no/such", "does not exist"), ("/", "got the whole machine")):
        with pytest.raises(ConfigError, match=word):
            a_runner(Bubblewrap(readable=(readable,)), "sh")
    with pytest.raises(ConfigError, match=r"which is not in the sandbox; add the folder"):
        a_runner(Bubblewrap(readable=()), str(program))
    with pytest.raises(ConfigError, match="reaches an https server by its name only"):
        a_runner(Bubblewrap(readable=()), "sh", server_url="https://10.0.0.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program 'bwrap', which is not found on PATH"):
        a_runner(Bubblewrap(), "sh")


@pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("unshare") is None, reason="needs bubblewrap and unshare"
)
def test_a_machine_without_user_namespaces_is_refused(tmp_path: Path) -> None:
    source = (
        "import sys; from agentlightning.config.agent import Bubblewrap\n"
        "from agentlightning.errors import ConfigError\n"
        "from agentlightning.runner.sandboxes import CommandAgent, check_sandbox\n"
        "try: check_sandbox(CommandAgent(command='sh', sandbox=Bubblewrap(readable=()), server_url='http://127.0.0.1:1'))\n"
        "except ConfigError as error: print(error)\n"
    )
    (tmp_path / "check.py").write_text(source)
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces || exit 77"
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", f"{forbid}; {sys.executable} {tmp_path}/check.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"user namespaces cannot be forbidden here: {done.stderr.strip()}")
    assert "bubblewrap cannot be run here" in done.stdout


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"agent": {"run": "a.py:solve"}, "sandbox": "bubblewrap"}, "a function agent runs inside the worker"),
        ({"agent": {"command": "x"}, "sandbox": "container"}, "sandbox.image: is required"),
        ({"agent": {"command": "x"}, "sandbox": {"image": "x"}}, "sandbox.image: no such setting"),
        ({"agent": {"command": "x"}, "sandbox": {"type": "container", "image": "--privileged"}}, "sandbox.image"),
        ({"agent": {"command": "x"}, "sandbox": "chroot"}, "sandbox: expected one of"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tables: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, **tables})


@pytest.mark.parametrize(
    ("url", "inner"),
    [
        ("http://127.0.0.1:4711", "http://127.0.0.1:4711"),
        ("http://localhost:4711/", "http://localhost:4711"),
        ("http://10.0.0.5:4711", "http://127.0.0.1:4711"),
        ("https://agl.example.com", "https://agl.example.com:8765"),
        ("http://agl.example.com:8080/under", "http://agl.example.com:8080/under"),
        ("http://[fd00::1]:4711", "http://127.0.0.1:4711"),
    ],
)
def test_the_url_inside_names_the_server_as_outside_where_that_can_be(url: str, inner: str) -> None:
    assert ServerAddress(url).inner_url == inner


# --- a worker ---------------------------------------------------------------------------------------------------------


async def test_a_worker_runs_agents_in_the_sandbox_that_the_run_asks_for(
    server: Server, bench: Bench, tmp_path: Path
) -> None:
    boxed("sh", server.url, tmp_path)
    config: dict[str, Any] = {"agent": {"reward": [], "posted_rewards": ["reward"]}}
    config["sandbox"] = {"type": "bubblewrap", "readable": [str(tmp_path)]}
    bench.run_id = (await bench.store.create_run("boxed", config)).id
    source = """
import json, os, urllib.request
body = json.dumps({"value": 0.25}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["AGL_REWARD_URL"], body, headers)).read()
print(os.getuid(), os.listdir("/proc/1/task"), json.load(open(os.environ["AGL_TASK"]))["x"])
"""
    worker = bench.worker_process("--command", python(tmp_path, source))
    rollouts = await bench.enqueue({"x": 1}, {"x": 2})
    done = await bench.settled(rollouts)
    assert [(one.state, one.reward) for one in done] == [("succeeded", 0.25)] * 2
    assert (await bench.attempts(done[1]))[0].output == "1000 ['1'] 2\n"
    worker.terminate()
    assert bench.ended(worker) == 0


async def test_a_sandbox_ends_with_its_lease_though_its_worker_is_stopped(
    server: Server, bench: Bench, tmp_path: Path
) -> None:
    boxed("sh", server.url, tmp_path)
    bench.run_id = (await bench.store.create_run("boxed", {"sandbox": {"type": "bubblewrap"}})).id
    worker = bench.worker_process("--command", "sleep 600", *SHORT_LEASE)
    [queued] = await bench.enqueue({})
    await bench.running(1)
    deadline = time.monotonic() + DEADLINE_S
    while not of_rollout(queued.id):
        assert time.monotonic() < deadline, "it was not started"
    worker.send_signal(signal.SIGSTOP)
    assert await asyncio.to_thread(left_of, queued.id) == []
    worker.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(bench.ended, worker) == 75
