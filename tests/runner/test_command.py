"""The command runner on real programs, without a store: as they are, and in a sandbox where that can be had here."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
import pytest
from runner_bench import DEADLINE_S, gone

import build
from agentlightning.config.agent import Bubblewrap
from agentlightning.errors import ConfigError, RewardError
from agentlightning.records import JSON, Claim
from agentlightning.runner.agent import LLM, llm_for
from agentlightning.runner.command import (
    MAX_LINE_BYTES,
    MAX_OUTPUT_BYTES,
    CommandFailed,
    CommandRunner,
    PrintedReward,
    Tail,
    command_environment,
    printed_reward,
    without_proxy,
)
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.runner.function import AgentOutput
from agentlightning.runner.sandboxes import CommandAgent
from agentlightning.sandbox.runner import SandboxRunner

Start = Callable[..., CommandRunner]
TELL = """
import os, socket, urllib.parse
def tell(text):
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(text.encode() + b"\\n")
"""
"""Programs call `tell` to say where they are: what they write to files is not always to be seen here."""


class Listener:
    """Takes the place of the server: hears what programs tell it."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._hear, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def told(self) -> str:
        """The next thing that a program tells."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._heard.get()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._heard.put_nowait((await reader.readline()).decode().strip())
        writer.close()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    await listener.start()
    yield listener
    listener.close()


def boxed(
    command: str,
    server_url: str,
    *readable: Path,
    term_s: float = 2.0,
    memory_mb: int = 2048,
    hidden: Sequence[Path] = (),
) -> SandboxRunner:
    """The runner of a command whose sandbox was tried; the test is left out where it cannot be had."""
    settings = Bubblewrap(readable=tuple(map(str, readable)), memory_mb=memory_mb)
    try:
        agent = CommandAgent(command=command, sandbox=settings, server_url=server_url, hidden=hidden)
        runner = SandboxRunner(agent, term_s=term_s)
        runner.check()
    except ConfigError as refused:
        pytest.skip(str(refused))
    return runner


@pytest.fixture(params=["bare", "bubblewrap"])
async def start(request: pytest.FixtureRequest, listener: Listener, tmp_path: Path) -> AsyncIterator[Start]:
    runners: list[CommandRunner] = []

    def make(command: str, term_s: float = 60.0) -> CommandRunner:
        bare = request.param == "bare"
        runners.append(
            CommandRunner(command, term_s=term_s) if bare else boxed(command, listener.url, tmp_path, term_s=term_s)
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def of_rollout(rollout_id: str) -> list[int]:
    """Processes of a rollout."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("AGL_ROLLOUT_ID") == rollout_id
    ]


def left_of(rollout_id: str) -> list[int]:
    """Processes of a rollout that go on."""
    return [pid for pid in of_rollout(rollout_id) if not gone(pid)]


def an_llm(claim: Claim, url: str = "http://127.0.0.1:9") -> LLM:
    return llm_for(claim, url, "policy", ConnectionPool())


async def run(
    runner: CommandRunner, task: JSON | None = None, rollout_id: str = "r1", url: str = "http://127.0.0.1:9"
) -> AgentOutput:
    claim = build.claim(rollout_id, task=task or {})
    return await runner.run(claim, an_llm(claim, url))


def python(folder: Path, source: str) -> str:
    path = folder / f"agent{len(os.listdir(folder))}.py"
    path.write_text(source)
    return f"{sys.executable} -S {path}"


async def test_a_shell_program_finds_its_task_and_model_in_its_environment(start: Start, listener: Listener) -> None:
    script = (
        """sh -c 'cat $AGL_TASK; echo; echo $OPENAI_BASE_URL $OPENAI_API_KEY $ANTHROPIC_BASE_URL $AGL_REWARD_URL'"""
    )
    done = await run(start(script), {"q": "1 + 1"}, url=listener.url)
    task, urls = str(done.output).strip().splitlines()
    root = f"{listener.url}/r/r1/1"
    assert json.loads(task) == {"q": "1 + 1"}
    assert urls.split() == [f"{root}/v1", "sk-agl-key", root, f"{root}/v1/reward"]
    assert done.reward is None


async def test_a_python_program_gives_its_reward_as_its_last_json_line(start: Start, tmp_path: Path) -> None:
    source = "import json\nprint('thinking', flush=True)\nprint(json.dumps({'reward': 0.5}))\nprint('bye')\n"
    done = await run(start(python(tmp_path, source)))
    assert (done.reward, done.reward_source) == (0.5, "output")
    assert done.printed is not None
    assert "thinking" in done.printed


async def test_the_server_key_is_kept_from_programs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_SERVER_KEY", "secret-of-ours")
    assert "secret-of-ours" not in str((await run(start("env"))).output)


async def test_a_program_that_fails_leaves_its_exit_code_and_output_or_its_signal(start: Start) -> None:
    with pytest.raises(CommandFailed, match=r"ended with exit code 3; the end of its output:\n(?s:.*)broken") as failed:
        await run(start("sh -c 'echo fine; echo broken >&2; exit 3'"))
    assert "fine" in failed.value.output
    with pytest.raises(CommandFailed, match="was killed by SIGSEGV"):
        await run(start("sh -c 'kill -SEGV $$'"))


async def test_a_program_that_floods_its_output_is_kept_to_its_end(start: Start, tmp_path: Path) -> None:
    source = "import sys\nfor _ in range(2000): sys.stdout.write('x' * 1000)\nprint()\nprint('{\"reward\": 1}')\n"
    done = await run(start(python(tmp_path, source)))
    assert done.reward == 1
    assert len(str(done.printed)) <= 8192
    tail = Tail()
    for number in range(100_000):
        tail.add(b"%d\n" % number)
    assert (len(tail._bytes) <= 2 * MAX_OUTPUT_BYTES, tail.text(6)) == (True, "99999\n")


@pytest.mark.parametrize(
    "leak", ["sleep 600 &", "setsid sleep 600 &", "nohup setsid sh -c 'sleep 600; :' >/dev/null &"]
)
async def test_children_that_a_program_leaks_end_with_it(start: Start, tmp_path: Path, leak: str) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(f"{leak}\nwhile ! pgrep sleep >/dev/null; do :; done\necho 1\n")
    rollout_id = f"leak-{tmp_path.parent.name}-{tmp_path.name}"
    done = await run(start(f"sh {script}"), rollout_id=rollout_id)
    assert done.reward == 1
    assert left_of(rollout_id) == []


async def test_an_interrupted_program_gets_a_chance_to_end_well(
    start: Start, listener: Listener, tmp_path: Path
) -> None:
    source = (
        f"{TELL}\nimport signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "tell('ready')\nwhile True: signal.pause()\n"
    )
    work = asyncio.create_task(run(start(python(tmp_path, source)), url=listener.url))
    assert await listener.told() == "ready"
    work.cancel()
    with pytest.raises(CommandFailed) as interrupted:
        await work
    assert "saved" in interrupted.value.output


async def test_a_program_that_ignores_sigterm_is_killed_with_its_group(
    start: Start, listener: Listener, tmp_path: Path
) -> None:
    source = (
        f"{TELL}\nimport signal, subprocess\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'])\ntell('ready')\nwhile True: signal.pause()\n"
    )
    rollout_id = f"ignores-{tmp_path.parent.name}-{tmp_path.name}"
    work = asyncio.create_task(run(start(python(tmp_path, source), term_s=0.5), None, rollout_id, listener.url))
    assert await listener.told() == "ready"
    work.cancel()
    with pytest.raises(CommandFailed):
        await work
    assert left_of(rollout_id) == []


@pytest.mark.parametrize("kind", ["bare", "bubblewrap"])
async def test_programs_of_a_worker_that_is_sigkilled_end_with_it(
    kind: str, listener: Listener, tmp_path: Path
) -> None:
    if kind != "bare":
        boxed("sh", listener.url)
    agent = (
        f"{TELL}\nimport subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\n"
        "tell('ready')\nsubprocess.run(['sleep', '600'])\n"
    )
    rollout_id = f"killed-{tmp_path.parent.name}-{tmp_path.name}"
    source = (
        "import asyncio, pathlib, sys; sys.path[:0] = [sys.argv[1], f'{sys.argv[1]}/..']; import test_command as t\n"
        "_, _, command, kind, url, folder, rollout = sys.argv\n"
        "runner = t.CommandRunner(command) if kind == 'bare' else t.boxed(command, url, pathlib.Path(folder))\n"
        "asyncio.run(t.run(runner, {}, rollout, url))\n"
    )
    arguments = [str(Path(__file__).parent), python(tmp_path, agent), kind, listener.url, str(tmp_path), rollout_id]
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", source, *arguments)
    assert await listener.told() == "ready"
    before = set(psutil.Process(worker.pid).children(recursive=True))
    assert before
    worker.kill()
    await worker.wait()
    assert [process for process in before if not gone(process.pid)] == []
    assert left_of(rollout_id) == []


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", "expected a program"),
        ("no-such-program --flag", "'no-such-program' is not found on PATH"),
        ("sh -c 'oops", "cannot be split into words"),
    ],
)
def test_a_bad_command_is_named_in_one_sentence(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        CommandRunner(command)


@pytest.mark.parametrize(
    ("text", "bare_numbers", "reward"),
    [
        ('noise\n{"reward": 0.5, "why": "x"}\nbye\n\n', True, 0.5),
        ('{"reward": 0}\n{"reward": 1}\n{"other": 2}', True, 1),
        ("0.25\n", True, 0.25),
        ("42\nbye", True, None),
        ("42", False, None),
        ('{"reward": "high"}', True, "high"),
        ('{"reward": null}', True, None),
        ("true", True, None),
        ("", True, None),
        *((f'{{"reward": 0.5, "why": "a{separator}b"}}', True, 0.5) for separator in "\u2028\u2029\x85\v\f\r\t\x1c"),
        ('\x1b]0;title\x07{"reward": 0.5}', True, 0.5),
        ('10%\r100%\r{"reward": 0.5}', True, 0.5),
        ('{"reward": 0.5}\n3', False, 0.5),
        ("[" * 100_000, True, None),
        ('\x1b[1m{"reward": 0.5}\x1b(B\x1b[m\n', True, 0.5),
        ('\0{"reward": 0.5}\0\0\n', True, 0.5),
        ("0.5\0\n\ufeff\n", True, 0.5),
        ('{"reward": 0\n{"reward": 0.5}', True, 0.5),
        ("9" * 10_000, True, None),
        ('say {"reward": 1}', True, None),
    ],
)
def test_the_printed_reward(text: str, bare_numbers: bool, reward: object) -> None:
    assert printed_reward(text, bare_numbers=bare_numbers) == (reward, None)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    "text",
    [
        '{"reward": 0.5}\n' + "log\n" * 100_000,
        '{"reward": 0}\n' + "x" * (MAX_LINE_BYTES + 1) + '"reward"\n{"reward": 0.5, "trace": "' + "é" * 200_000 + '"}',
    ],
)
def test_a_reward_is_found_in_an_output_of_any_length(text: str, chunk: int) -> None:
    data, found = text.encode(), PrintedReward()
    size = max(chunk, len(data) // 10_000)
    for start in range(0, len(data), size):
        found.add(data[start : start + size])
    assert found.read(bare_numbers=False) == (0.5, None)


@pytest.mark.parametrize(
    "value", ["1" + "0" * 5000, "[" * 100_000, "1", '1, "trace": "' + "x" * MAX_LINE_BYTES + '"}'], ids=len
)
def test_a_last_reward_that_cannot_be_read_is_an_error_and_no_earlier_one_counts(value: str) -> None:
    with pytest.raises(RewardError, match=r'expected a JSON object in a line of at most .*, got \{"reward": '):
        printed_reward('{"reward": 0}\n{"reward": ' + value + "\nbye\n", bare_numbers=True)
    with pytest.raises(RewardError, match="the printed reward: 3 is the last line, and an earlier one says"):
        printed_reward('{"reward": 0.5}\n3\n', bare_numbers=True)


def test_no_proxy_is_extended_not_replaced() -> None:
    assert without_proxy({"NO_PROXY": "corp.example, localhost"}, "http://127.0.0.2:80") == (
        "corp.example,localhost,127.0.0.1,::1,127.0.0.2"
    )
    claim = build.claim("r1", task={})
    environment = command_environment({"no_proxy": "a"}, claim, an_llm(claim), Path("t.json"))
    assert environment["no_proxy"] == environment["NO_PROXY"] == "a,127.0.0.1,localhost,::1"
