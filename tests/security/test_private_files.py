"""What a run keeps from its agents and from others: secrets of its processes, offers of weights, the mode of its files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import build_policy

from agentlightning.store.sql.store import SqlLightningStore

HALF = "never-shown"
SECRETS = {"TEACHER_KEY": f"teacher-{HALF}", "AGL_SERVER_KEY": f"server-{HALF}"}
DEADLINE_S = 600

WITHOUT_TRACING = """
import ctypes, os, sys
for capability in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: root has none of them in a container
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "agentlightning", *sys.argv[1:]])
"""

SPY = '''
import json, os, sys, urllib.error, urllib.request
from pathlib import Path

SOUGHT = b"never" + b"-shown"


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def run():
    """Pids of the run: everything below `agl train`."""
    top = os.getpid()
    while " train " not in words(top):
        top = parent(top)
    found, waiting = [], [top]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for other in Path("/proc").iterdir():
            try:
                if other.name.isdigit() and parent(other.name) == pid:
                    waiting.append(int(other.name))
            except OSError:
                pass
    return found


def words(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode()


def look(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return name == "mem" or SOUGHT in file.read()
    except PermissionError:
        return "refused"
    except OSError:
        return "gone"


def offer_weights():
    """Statuses with which the ports of this machine answer an offer of weights."""
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(Path.cwd()), "weight_version": "66"}}
    statuses = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and address.startswith("0100007F"):
            url = f"http://127.0.0.1:{int(address.partition(':')[2], 16)}/collective_rpc"
            request = urllib.request.Request(url, json.dumps(order).encode(), {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    statuses.append(answer.status)
            except urllib.error.HTTPError as refused:
                statuses.append(refused.code)
            except OSError:
                pass
    return statuses


def spy():
    """Writes down what was found."""
    found = {
        "processes": [
            [words(pid), {name: look(pid, name) for name in ("cmdline", "environ", "mem")}]
            for pid in run() if pid != os.getpid()
        ],
        "inherited": sorted(name for name, value in os.environ.items() if SOUGHT in value.encode()),
        "offers": offer_weights(),
    }
    with open("found.jsonl", "a") as file:
        file.write(json.dumps(found) + "\\n")
'''

FUNCTION = """
import sys
sys.path.insert(0, ".")
import spy

def solve(task, llm):
    spy.spy()
    llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
    open("written.txt", "w").close()
    return 0.5
"""
COMMAND = """
import json, os, urllib.request
import spy

spy.spy()
body = {"model": os.environ["AGL_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
open("written.txt", "w").close()
print(0.5)
"""
CONFIG = """
[model]
path = "{model}"
max_tokens = 4
[agent]
{agent}
workers = 1
concurrency = 1
[data]
train = "train.jsonl"
[external.teacher]
url = "http://127.0.0.1:9/v1"
key_env = "TEACHER_KEY"
models = ["teacher"]
[algorithm]
group_size = 2
[trainer]
steps = 1
tasks_per_step = 1
[engine]
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(folder: Path) -> list[str]:
    """Files and folders from here on that anybody but their owner may use."""
    return [f"{path} {mode(path):o}" for path in (folder, *folder.rglob("*")) if path.is_file() and mode(path) & 0o077]


def agl(*arguments: str, cwd: Path) -> None:
    """Runs the command as a user who lets everybody read and write, in a container."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    command = [sys.executable, "-c", WITHOUT_TRACING, *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **SECRETS},
        umask=0,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kind", ["command", pytest.param("function", marks=pytest.mark.long)])
def test_agents_of_a_run_find_no_secret_and_what_it_writes_is_its_users_alone(kind: str, tmp_path: Path) -> None:
    policy = build_policy(tmp_path / "policy")
    agent = f"command = '{sys.executable} agent.py'" if kind == "command" else 'run = "agent.py:solve"'
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "agent.py").write_text(COMMAND if kind == "command" else FUNCTION)
    (tmp_path / "train.jsonl").write_text('{"question": "hi"}\n')
    (tmp_path / "run.toml").write_text(CONFIG.format(model=policy, agent=agent))
    agl("train", "run.toml", cwd=tmp_path)
    for line in (tmp_path / "found.jsonl").read_text().splitlines():
        nothing_was_found(json.loads(line))

    runs = tmp_path / "runs"
    [run] = runs.glob("*/config.json")
    assert (mode(runs), mode(run.parent)) == (0o700, 0o700)
    assert {"agl.db", "learner.pt"} <= {path.name for path in runs.rglob("*")}
    assert open_to_others(runs) == []
    assert mode(tmp_path / "written.txt") == 0o666  # its agents keep the umask

    agl("models", "export", run.parent.name, "--to", "model", cwd=tmp_path)
    agl("runs", "export", run.parent.name, "--to", "records", cwd=tmp_path)
    agl("runs", "export", run.parent.name, "--as", "messages", "--to", "rows.jsonl", cwd=tmp_path)
    agl("store", "backup", "backup", cwd=tmp_path)
    made = [tmp_path / name for name in ("model", "records", "rows.jsonl", "backup")]
    assert [mode(path) for path in made] == [0o700, 0o700, 0o600, 0o600]
    assert [found for path in made for found in open_to_others(path)] == []


def nothing_was_found(one: dict[str, Any]) -> None:
    assert one["inherited"] == []
    for words, seen in one["processes"]:
        assert seen["cmdline"] is not True, words
        assert seen["environ"] is not True, words
    refused = " ".join(words for words, seen in one["processes"] if seen["environ"] == seen["mem"] == "refused")
    for ours in (" train ", "agentlightning.gateway", "local.sampler", "local.learner"):
        assert ours in refused, one["processes"]
    assert 401 in one["offers"]
    assert 200 not in one["offers"]


async def test_the_file_of_a_store_is_private_with_its_log(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        async with SqlLightningStore(f"sqlite:///{tmp_path}/new.db") as store:
            await store.runs()
            assert (tmp_path / "new.db-wal").exists()
            assert open_to_others(tmp_path) == []
    finally:
        os.umask(former)


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o600), (0o640, 0o640)])
async def test_a_store_that_everybody_could_read_is_closed_and_one_that_a_group_may_read_stays(
    tmp_path: Path, before: int, after: int
) -> None:
    file = tmp_path / "store.db"
    async with SqlLightningStore(f"sqlite:///{file}"):
        pass
    file.chmod(before)
    async with SqlLightningStore(f"sqlite:///{file}") as store:
        await store.runs()
        assert [mode(Path(f"{file}{end}")) for end in ("", "-wal", "-shm")] == [after] * 3
