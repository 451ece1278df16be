"""Secrets of a process that starts: an init above it, a race for its key, what it imports before it is hidden."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attack_scene import DEADLINE_S, SERVER_KEY, Scene

import agentlightning
import build
from agentlightning.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

PACKAGE = Path(agentlightning.__file__).parent
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "CREDENTIALS_"))}
INIT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
"""An init of a container: shows what it was given, and starts the worker with it."""
WITHOUT_TRACING = """
import ctypes, os, sys
for capability in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON: root has none of them in a container
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def worker(scene: Scene, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "agentlightning",
        "worker",
        "true",
        "--server",
        scene.server.url,
        "--run",
        scene.run_id,
        *words,
    ]


@pytest.mark.parametrize("tracing", [True, False])
async def test_a_worker_below_an_init_that_shows_its_key_is_refused(scene: Scene, tracing: bool) -> None:
    words = [sys.executable, "-c", INIT, *worker(scene)]
    done = await asyncio.to_thread(
        subprocess.run,
        words if tracing else [sys.executable, "-c", WITHOUT_TRACING, *words],
        env={**PLAIN, "AGL_SERVER_KEY": SERVER_KEY},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert re.search(r"AGL_SERVER_KEY: process \d+ \(.*python.*\), above this worker, shows it", done.stderr)
    assert SERVER_KEY not in done.stderr


@contextmanager
def raced(words: list[str], fd: int) -> Iterator[tuple[subprocess.Popen[str], list[bytes]]]:
    """Starts a process, of which all that the machine shows is read as fast as it can be, from its first moment on."""
    process = subprocess.Popen(words, env=PLAIN, pass_fds=(fd,), stderr=subprocess.DEVNULL, text=True)
    os.close(fd)
    shown: list[bytes] = []

    def race() -> None:
        while process.poll() is None:
            for name in ("environ", "cmdline"):
                with suppress(OSError):
                    shown.append(Path(f"/proc/{process.pid}/{name}").read_bytes())

    racer = threading.Thread(target=race)
    racer.start()
    try:
        yield process, shown
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        racer.join()


@pytest.mark.parametrize("source", ["--key-fd", "--key-file"])
async def test_a_key_that_comes_by_a_descriptor_or_a_file_is_never_shown(
    scene: Scene, tmp_path: Path, source: str
) -> None:
    read, write = os.pipe()
    os.write(write, f"{SERVER_KEY}\n".encode())
    os.close(write)
    (tmp_path / "key").write_text(SERVER_KEY)
    words = worker(scene, source, str(read) if source == "--key-fd" else str(tmp_path / "key"))
    with raced(words, read) as (process, shown):
        async with asyncio.timeout(DEADLINE_S):
            while process.pid not in {one.pid for one in await scene.store.workers(scene.run_id)}:
                assert process.poll() is None
                await asyncio.sleep(0.05)
    assert len(shown) > 100
    assert not any(SERVER_KEY.encode() in one for one in shown)


async def test_a_systemd_credential_is_the_key_of_any_command(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "AGL_SERVER_KEY").write_text(f"\ufeff{SERVER_KEY}\n", encoding="utf-8")  # as Notepad saves it
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "agentlightning", "runs", "list", "--store", scene.server.url],
        env=PLAIN | {"CREDENTIALS_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "attacked" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("content", "variables", "said"),
    [
        ("", {}, "--key-file: expected a line with a key, got none"),
        ("a\x1bb", {}, "--key-file: expected a line with a key, got other characters"),
        (None, {}, "--key-file: cannot be read"),
        ("sk-a", {"AGL_SERVER_KEY": "sk-b"}, "--key-file: expected one source of the key, got AGL_SERVER_KEY, too"),
    ],
)
def test_a_key_that_cannot_be_taken_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if content is not None:
        (tmp_path / "key").write_text(content)
    done = build.agl("runs", "list", "--key-file", str(tmp_path / "key"))
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


ENTRY_POINTS = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    and path.stem not in ("processes", "relay")  # run as files, outside of this package: they are given no secret
    and not {"vllm_side", "templates"} & {*path.parts}  # nor are an agent's files that are written for a user
]
LOOK = """
import ctypes, os, runpy, sys
import agentlightning.runtime.process_secrets as first

def visible():
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in before or name.partition(".")[0] in sys.stdlib_module_names:
            return
        if visible():
            print(f"{module}: {name} is imported while the process can be read", flush=True)
        os._exit(0)  # it is hidden, or was found out

for module in sys.argv[1:]:
    if os.fork() == 0:
        before = {".".join(module.split(".")[:count]) for count in range(1, module.count(".") + 2)}
        before |= {"agentlightning.runtime", first.__name__, f"{module}.__main__"}
        sys.meta_path.insert(0, Watch())
        sys.argv = [module, "--help"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        print(f"{module}: imported nothing", flush=True)
        os._exit(0)
    os.wait()
print("all")
"""


def test_an_entry_point_is_hidden_before_it_imports_anything() -> None:
    assert {"agentlightning", "agentlightning.gateway", "agentlightning.runner"} <= {*ENTRY_POINTS}
    words = [sys.executable, "-c", LOOK, *ENTRY_POINTS]
    done = subprocess.run(words, env=PLAIN, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("all\n", "")


def test_a_check_of_a_grammar_is_given_no_key_of_an_external_model() -> None:
    code = (
        "from pathlib import Path; from agentlightning.gateway.policy.decoding import _start\n"
        "child = _start(); place = Path(f'/proc/{child.pid}/environ')\n"
        "while not (shown := place.read_bytes()):\n    pass  # it is not executed yet\n"
        "print(shown); child.kill()"
    )
    variables = PLAIN | {"TEACHER_KEY": "sk-of-a-teacher"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert "PATH=" in done.stdout
    assert "sk-of-a-teacher" not in done.stdout
