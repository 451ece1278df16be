"""Children: how secrets reach them, and what others see of them."""

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentlightning.errors import AgentLightningError
from agentlightning.runtime.children import end_session, receive_secrets, secrets_line, start_child, stop_child

SECRET = "sk-of-nobody-else"
TRACING = (19, 21, 38)
"""CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: root has them outside a container, and may read any memory."""
PATIENCE_S = 600

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")

CHILD = """
    import signal, sys
    from agentlightning.runtime.children import end_with_parent

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        secrets = end_with_parent()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(secrets, flush=True)
    signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that says which secrets it got, and waits."""
    (tmp_path / "told.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "told"


@pytest.fixture
def child(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A child that has the secret, of a parent whose environment has it too, and more that is not for the child."""
    for name in ("KEY", "AGL_SERVER_KEY", "AGL_STORE"):
        monkeypatch.setenv(name, SECRET)
    started = start_child([program], secrets={"KEY": SECRET}, log=tmp_path / "log")
    with open(tmp_path / "log") as said:
        line = ""
        while not line.endswith("\n"):
            assert started.poll() is None
            line += said.readline()
    assert line == f"{{'KEY': '{SECRET}'}}\n"
    yield started
    stop_child(started)


def look(path: str) -> subprocess.CompletedProcess[bytes]:
    """Read a file of /proc in another process of this user, without what only root outside a container has."""
    program = f"""
        import ctypes, os, sys
        for capability in {TRACING}:
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: nothing that is executed has it
        os.execvp("head", ["head", "-c", "100000", {path!r}])
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=False)


def test_a_childs_secret_is_neither_in_its_arguments_nor_in_its_environment(child: subprocess.Popen[bytes]) -> None:
    for name in ("cmdline", "environ"):  # read as root, where the tests are root's
        try:
            seen = Path(f"/proc/{child.pid}/{name}").read_bytes()
        except PermissionError:
            continue
        assert SECRET.encode() not in seen


@pytest.mark.parametrize("name", ["environ", "mem"])
def test_other_processes_of_the_user_cannot_read_a_child(child: subprocess.Popen[bytes], name: str) -> None:
    refused = look(f"/proc/{child.pid}/{name}")
    assert b"Permission denied" in refused.stderr
    assert refused.stdout == b""
    assert look(f"/proc/{child.pid}/cmdline").stdout.startswith(sys.executable.encode())  # it can look at all


def test_whoever_hands_down_a_secret_cannot_be_read_either(child: subprocess.Popen[bytes]) -> None:
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE
    assert b"Permission denied" in look(f"/proc/{os.getpid()}/environ").stderr


def run(program: str, stdin: bytes | None) -> subprocess.CompletedProcess[str]:
    """The program with these bytes on its standard input, and then the end of it."""
    ended = subprocess.run(
        [sys.executable, "-m", program], input=stdin, capture_output=True, timeout=PATIENCE_S, check=False
    )
    return subprocess.CompletedProcess([], ended.returncode, ended.stdout.decode(), ended.stderr.decode())


@pytest.mark.parametrize("stdin", [b"", b'{"KEY": 3}\n', b"\xff\n"])
def test_a_child_without_a_line_of_secrets_ends_with_a_sentence(program: str, stdin: bytes) -> None:
    ended = run(program, stdin)
    assert ended.returncode == 1
    assert ended.stderr == (
        "AgentLightningError: standard input: expected a line with secrets, as a parent writes it, got none\n"
    )


def test_a_child_whose_parent_never_writes_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as silent:
        monkeypatch.setattr(sys, "stdin", silent)
        with pytest.raises(AgentLightningError, match=r"within 0.01 s, got none"):
            receive_secrets(timeout_s=0.01)
    os.close(writing)


def test_secrets_of_any_characters_arrive_whole(program: str) -> None:
    secrets = {"KEY": 'a\nb"ü\x00\u2028', "LONG": "x" * 200_000}
    told = run(program, secrets_line(secrets))
    assert told.stdout == f"{secrets}\n"


def test_what_a_child_started_and_left_behind_is_killed_and_no_other(program: str, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import os, subprocess, sys\n"
        "pause = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "print(subprocess.Popen(pause, process_group=0).pid, flush=True)\n"
        "os._exit(0)\n"
    )
    other, child = start_child([program], secrets={"KEY": SECRET}), start_child(["leaves"], log=tmp_path / "log")
    child.wait(PATIENCE_S)
    left = psutil.Process(int((tmp_path / "log").read_text()))
    end_session(child.pid)
    left.wait(PATIENCE_S)
    assert other.poll() is None
    for each in (child, other):
        stop_child(each)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel knows no autogroups")
@pytest.mark.parametrize(("leads", "given"), [(True, 7), (False, 0)])
def test_a_process_gives_way_with_its_session_where_it_leads_one(leads: bool, given: int) -> None:
    program = (
        "import os; from agentlightning.runtime.children import give_way; give_way(7); "
        "print(os.nice(0), open('/proc/self/autogroup').read())"
    )
    shell = [] if leads else ["/bin/sh", "-c", '"$@"; true', "sh"]
    ran = [*shell, sys.executable, "-c", program]
    told = subprocess.run(ran, start_new_session=True, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.split()[0] == "7"
    assert told.split()[-1] == str(given)


@pytest.mark.parametrize("python", [sys.executable, "another"])
def test_a_child_finds_the_standard_library_whatever_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    for name in ("random", "json", "queue", "this"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the one of the working directory')\n")
    if python == "another":
        python = str(tmp_path / "python")
        os.symlink(sys.executable, python)
    monkeypatch.chdir(tmp_path)
    child = start_child(["this"], log=tmp_path / "log", python=python)
    assert child.wait(PATIENCE_S) == 0
    assert "Zen of Python" in (tmp_path / "log").read_text()
    assert child.stdin is not None
    child.stdin.close()


FIRST = """
import os, subprocess, sys, time
from agentlightning.runtime.children import leave_orphans_to_parent
from agentlightning.runtime.process_secrets import hide_memory

hide_memory()
leave_orphans_to_parent()
subprocess.run(["sh", "-c", "sleep 0.2 & sleep 0.1 &"])  # their parent is gone before them
look = ["sh", "-c", "cat /proc/1/environ >/dev/null && echo read", "sh"]
seen = subprocess.run(look, capture_output=True, text=True).stdout
deadline = time.monotonic() + 20
def states():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name not in ("1", str(os.getpid())):
            found.append(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0])
    return found
while states() and time.monotonic() < deadline:
    time.sleep(0.02)
print(os.getpid() != 1, states(), repr(seen), flush=True)
os.kill(1, 15)  # of the container's engine: passed on
time.sleep(20)
"""


def test_the_first_process_of_a_container_reaps_orphans_is_hidden_and_passes_signals_on() -> None:
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], check=False, capture_output=True).returncode:
        pytest.skip("process namespaces cannot be made here")
    without_tracing = "import ctypes, os, sys\n" + "".join(
        f"ctypes.CDLL(None).prctl(24, {one}, 0, 0, 0)\n" for one in TRACING
    )
    command = [*space, sys.executable, "-c", f"{without_tracing}os.execv(sys.argv[1], sys.argv[1:])"]
    done = subprocess.run(
        [*command, sys.executable, "-c", FIRST],
        env={**os.environ, "SECRET": "of-the-container"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "True [] ''\n", done.stderr
    assert done.returncode == 128 + 15
