"""Agents of a real run look for secrets in every process of the run, and try to give the sampler weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import build_policy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")]

HALF = "never-shown"
SECRETS = {"TEACHER_KEY": f"teacher-{HALF}", "AGL_SERVER_KEY": f"server-{HALF}"}
DEADLINE_S = 300

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
    return 0.5
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


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(params=["command", "function"])
def found(request: pytest.FixtureRequest, policy: Path, tmp_path: Path) -> list[dict[str, object]]:
    """What the agents of a run found, each as it was written down."""
    agent = f"command = '{sys.executable} agent.py'" if request.param == "command" else 'run = "agent.py:solve"'
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "agent.py").write_text(COMMAND_AGENT if request.param == "command" else FUNCTION)
    (tmp_path / "train.jsonl").write_text('{"question": "hi"}\n')
    (tmp_path / "run.toml").write_text(CONFIG.format(model=policy, agent=agent))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRACING, "train", "run.toml", "--store", "sqlite:///agl.db"],
        cwd=tmp_path,
        env={**plain, **SECRETS},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    written = tmp_path / "found.jsonl"
    assert written.exists(), ended.stdout + ended.stderr
    return [json.loads(line) for line in written.read_text().splitlines()]


COMMAND_AGENT = """
import json, os, urllib.request
import spy

spy.spy()
body = {"model": os.environ["AGL_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
print(0.5)
"""


def test_agents_find_no_secret_in_any_process_of_their_run(found: list[dict[str, object]]) -> None:
    for one in found:
        assert one["inherited"] == []
        processes = one["processes"]
        assert isinstance(processes, list)
        for words, seen in processes:
            assert seen["cmdline"] is not True, words
            assert seen["environ"] is not True, words
        refused = " ".join(words for words, seen in processes if seen["environ"] == seen["mem"] == "refused")
        for ours in (" train ", "agentlightning.gateway", "local.sampler", "local.learner"):
            assert ours in refused, processes
        offers = one["offers"]
        assert isinstance(offers, list)
        assert 401 in offers
        assert 200 not in offers
