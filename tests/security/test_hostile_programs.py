"""An agent in a sandbox that turns against its machine: it finds no secret, ends nobody, and reaches the gateway alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from attack_scene import DEADLINE_S, SERVER_KEY, Scene

from agentlightning.config.agent import Bubblewrap
from agentlightning.errors import ConfigError
from agentlightning.records import NewRollout
from agentlightning.runner.sandboxes import CommandAgent, check_sandbox
from agentlightning.store.base import RolloutQuery

HOSTILE = """
import glob, os, signal, socket, sys, urllib.request, urllib.error
SECRETS, PLACES, PORTS = [text[::-1] for text in {secrets!r}], {places!r}, {ports!r}
found = []
try:
    if os.readlink("/proc/self/ns/pid") == {processes!r}:
        found.append("the machine's own processes")
except OSError:
    pass
for place in PLACES:
    if os.path.exists(place) and not os.path.isdir(place):
        found.append(place)
names = [path for kind in ("environ", "cmdline", "fd/*", "root/etc/shadow") for path in glob.glob("/proc/*/" + kind)]
for folder in {folders!r}:
    names += glob.glob(folder + "/**", recursive=True)
for name in names:
    try:
        if os.path.isfile(name):
            with open(name, "rb") as file:
                text = file.read(1 << 20)
            found += [name for secret in SECRETS if secret.encode() in text]
    except OSError:
        pass
found += [name for name in os.environ if any(secret in os.environ[name] for secret in SECRETS)]
base = os.environ["OPENAI_BASE_URL"].partition("/r/")[0]
for route in ("/api/runs", "/api/signing_secret", "/api/claim", "/api/tokens"):
    for verb in ("GET", "POST"):
        headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}}
        body = b"{{}}" if verb == "POST" else None
        try:
            urllib.request.urlopen(urllib.request.Request(base + route, body, headers, method=verb))
            found.append(route)
        except urllib.error.HTTPError as refused:
            if refused.code not in (401, 403):
                found.append(route + " " + str(refused.code))
for port in PORTS:
    for host in ("127.0.0.1", "0.0.0.0", "localhost", "::1"):
        try:
            socket.create_connection((host, port), timeout=2).close()
            found.append(port)
        except OSError:
            pass
print("found", found, flush=True)
if found:  # it may be outside a sandbox, where it would kill the machine
    sys.exit(1)
for target in (-1, 1, {worker}, os.getppid()):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
for pid in range(2, 400):
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
print(1)
"""


async def test_a_program_in_a_sandbox_gets_nothing_and_harms_nobody(scene: Scene, tmp_path: Path) -> None:
    try:
        settings = Bubblewrap(readable=(str(tmp_path),))
        check_sandbox(CommandAgent(command="sh", sandbox=settings, server_url="http://127.0.0.1:1"))
    except ConfigError as refused:
        pytest.skip(str(refused))
    run = await scene.store.create_run("boxed", {"sandbox": {"type": "bubblewrap", "readable": [str(tmp_path)]}})
    arguments = ["--server", scene.server.url, "--run", run.id, "--command", f"{sys.executable} -S {tmp_path}/agent.py"]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning.runner", *arguments),
        env={**os.environ, "AGL_SERVER_KEY": SERVER_KEY, "SOME_API_KEY": "sk-of-somebody"},
    )
    database = scene.server.store.removeprefix("sqlite:///")
    engine = (await scene.store.resources(scene.run_id))[0].value["endpoints"][0]
    source = HOSTILE.format(
        secrets=[key[::-1] for key in (SERVER_KEY, scene.mine.key, scene.other.key, "sk-of-somebody")],
        places=[database, f"{database}-wal", str(scene.server.log), str(Path.home() / ".bashrc"), __file__],
        ports=[int(engine.rpartition(":")[2])],
        worker=worker.pid,
        folders=["/tmp", "/run", "/dev/shm"],
        processes=os.readlink("/proc/self/ns/pid"),
    )
    (tmp_path / "agent.py").write_text(source)
    ids = [one.id for one in await scene.store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])]
    await scene.store.wait(run.id, at_least=1, timeout_s=DEADLINE_S)
    await scene.other_is_answered()
    (rollout,) = await scene.store.rollouts(RolloutQuery(ids=ids))
    (attempt,) = await scene.store.attempts(ids)
    assert str(attempt.output).startswith("found []\n"), (attempt.error, attempt.output)
    assert rollout.state == "succeeded"
    assert worker.returncode is None
    worker.terminate()
    assert await worker.wait() == 0


async def test_what_a_hostile_program_looks_for_is_there_to_be_found_without_a_sandbox(
    scene: Scene, tmp_path: Path
) -> None:
    """The test above can fail: the same program finds the store's file where nothing isolates it."""
    database = scene.server.store.removeprefix("sqlite:///")
    source = HOSTILE.partition('print("found"')[0] + "print(len(found))\n"
    text = source.format(
        secrets=["tnemnorivne-eht-ni-ks"],
        places=[database],
        ports=[],
        folders=[],
        processes=os.readlink("/proc/self/ns/pid"),
    )
    (tmp_path / "agent.py").write_text(text)
    environment = {"PATH": os.environ["PATH"], "OPENAI_BASE_URL": f"{scene.server.url}/r/x", "OPENAI_API_KEY": "k"}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-S", str(tmp_path / "agent.py")],
        env={**environment, "SOME": "sk-in-the-environment"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) >= 3


OTHER_USER = """
import json, os, pathlib, signal, subprocess
found = [] if (os.getuid(), os.getgid(), os.getgroups()) == (10002, 10002, []) else ["the user"]
for pid in ({worker}, os.getppid(), 1):
    try:
        found.append(str(pid) if open(f"/proc/{{pid}}/environ").read() else "")
    except OSError:
        pass
    try:
        os.kill(pid, signal.SIGKILL)
        found.append(f"end of {{pid}}")
    except OSError:
        pass
for name in ("{secret}",):
    try:
        found.append(open(name).read())
    except OSError:
        pass
left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps([found, json.load(open(os.environ["AGL_TASK"])), left.pid]))
print(0.5)
"""


OTHER_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
"""One that every user may run."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run programs as another user")
@pytest.mark.skipif(OTHER_PYTHON is None, reason="there is no Python of the system's")
async def test_agents_of_a_user_of_their_own_neither_read_nor_end_their_worker_and_leave_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("a file of the worker's user")
    (tmp_path / "secret").chmod(0o600)
    run = await scene.store.create_run("of another user", {})
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        command = f"{OTHER_PYTHON} -I -S {folder}/agent.py"
        arguments = ["--server", scene.server.url, "--run", run.id, "--agent-user", "10002", "--command", command]
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentlightning.runner", *arguments),
            env={**os.environ, "AGL_SERVER_KEY": SERVER_KEY},
        )
        source = OTHER_USER.format(worker=worker.pid, secret=tmp_path / "secret")
        (Path(folder) / "agent.py").write_text(source)
        (Path(folder) / "agent.py").chmod(0o644)
        queued = await scene.store.enqueue([NewRollout(run_id=run.id, task={"a": 1}, group_id="g")])
        await scene.store.wait(run.id, at_least=1, timeout_s=DEADLINE_S)
        worker.terminate()
        assert await worker.wait() == 0
    (attempt,) = await scene.store.attempts([queued[0].id])
    found, task, left = json.loads(str(attempt.output).splitlines()[0])
    assert (found, task) == ([], {"a": 1}), attempt.error
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
