"""The runner for agents that are programs: any language, any framework, nothing of ours inside.

The program finds its model, key and task in its environment and gives its reward as the last JSON line of its standard
output (``{"reward": 0.5}`` or a bare number), by POST to AGL_REWARD_URL, or leaves it to a reward function. Driven by the
worker; whatever way an attempt ends, nothing that the program started stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from agentlightning.errors import AgentError, ConfigError, RewardError
from agentlightning.records import Claim
from agentlightning.runner.agent import LLM
from agentlightning.runner.attempt import CURRENT
from agentlightning.runner.function import AgentOutput
from agentlightning.runner.guardian import Guardian
from agentlightning.runner.processes import kill_group
from agentlightning.runtime.children import inheritable

MAX_OUTPUT_BYTES = 64 * 1024
"""Most output held in memory for a running program."""
SIGNALLED = 128
"""Exit codes above it are of a shell whose program was killed by a signal."""
MAX_LINE_BYTES = 1024 * 1024
"""Longest line in which a reward is looked for."""
MAX_RECORDED_BYTES = 8 * 1024
"""Tail of the output kept with the attempt."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OWN_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of a user who sends traces to a collector of his own."""
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-Z\\^-~])")
"""Colours, and what else a terminal would obey: `tput sgr0` ends with another character set."""
_BLANK = string.whitespace + "\0\ufeff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is ready to be started. Sandboxes override how it is interrupted and how its end is read."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    stdin: int = subprocess.DEVNULL

    def interrupt(self, group: int) -> bool:
        """Tell it to end; False where it is gone."""
        return kill_group(group, signal.SIGTERM)

    def exit_code(self, code: int) -> int:
        """The exit code, below 0 for a signal."""
        return code

    def explain(self) -> str:
        """Says why the program may have been killed; empty where nothing is known."""
        return ""


class CommandRunner:
    """Runs a command line, split as a shell would but without a shell.

    ConfigError where it is empty or, with `found`, its program is not found. `scored`: a reward function judges the output,
    so that only ``{"reward": …}`` is taken for a reward, not a bare number.
    """

    def __init__(
        self,
        command: str,
        *,
        scored: bool = False,
        guardian: Guardian | None = None,
        term_s: float = 2.0,
        found: bool = True,
    ) -> None:
        self._arguments = split_command(command, "agent command", found=found)
        self._scored = scored
        self._term_s = term_s
        self._guardian = guardian or Guardian()

    async def run(self, claim: Claim, llm: LLM) -> AgentOutput:
        with tempfile.TemporaryDirectory(prefix="agl-task-") as folder:
            async with self._program(claim, llm, Path(folder)) as program:
                return await self._run(claim, program)

    @asynccontextmanager
    async def _program(self, claim: Claim, llm: LLM, folder: Path) -> AsyncIterator[Program]:
        """The program of an attempt, whose task is in the empty folder."""
        task = folder / "task.json"
        task.write_text(json.dumps(claim.rollout.task), encoding="utf-8")
        if self._guardian.user is not None:
            os.chmod(folder, 0o711)
            os.chmod(task, 0o644)
        environment = command_environment(os.environ, claim, llm, task) | self._guardian.environment
        yield Program(arguments=self._arguments, environment=environment)

    async def _run(self, claim: Claim, program: Program) -> AgentOutput:
        printed, both, rewards = Tail(), Tail(), PrintedReward()
        process: asyncio.subprocess.Process | None = None
        code: int | None
        # Pipes of our own: waiting for the program must not wait for a leaked child that holds its output open.
        readers: list[_Reader] = []
        ends: list[int] = []
        try:
            for sinks in ((printed, both, rewards), (both,)):
                read, write = os.pipe()
                ends.append(write)
                readers.append(await _read(read, *sinks))
            self._guardian.begins(claim.lease, _lease_ends(), _marks(claim))
            process = await self._start(program, *ends)
            self._guardian.runs(claim.lease, process.pid)
            code = program.exit_code(await process.wait())
        except asyncio.CancelledError:
            code = None
        finally:
            for end in ends:
                os.close(end)
            await self._end(process, claim, program)
            await asyncio.wait({reader.closed for reader in readers}, timeout=self._term_s)
            for reader in readers:
                reader.close()
        output = both.text(MAX_RECORDED_BYTES)
        if code is None:
            raise CommandFailed("the program was interrupted", output)
        if code != 0:
            text = f"program {_ended(code)}{program.explain()}; the end of its output:\n{output}"
            raise CommandFailed(text, output, code)
        reward, feedback = rewards.read(bare_numbers=not self._scored)
        return AgentOutput(
            output=printed.text(MAX_RECORDED_BYTES),
            reward=reward,
            reward_source="output",
            feedback=feedback,
            printed=output,
        )

    async def _start(self, program: Program, stdout: int, stderr: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._guardian.as_agent(program.arguments),
                stdin=program.stdin,
                stdout=stdout,
                stderr=stderr,
                env=program.environment,
                start_new_session=True,
            )
        except OSError as cause:
            raise AgentError(f"program {self._arguments[0]!r} cannot be started: {cause}") from cause

    async def _end(self, process: asyncio.subprocess.Process | None, claim: Claim, program: Program) -> None:
        """Nothing that the program started is left when this returns: SIGTERM if it still runs, then SIGKILL to all."""
        try:
            if process is not None and process.returncode is None and program.interrupt(process.pid):
                await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=self._term_s)
        finally:
            if process is not None:
                kill_group(process.pid)
            self._guardian.kill_left(*_marks(claim))
            self._guardian.ended(claim.lease)
        if process is not None:
            await process.wait()

    def close(self) -> None:
        """End the guardian and whatever is left; for those who go on living without the runner."""
        self._guardian.kill_left()
        self._guardian.close()


def _lease_ends() -> float:
    """Returns when the server may give the present attempt's rollout away; never where no worker runs it."""
    attempt = CURRENT.get(None)
    return math.inf if attempt is None else attempt.lease_ends


def _marks(claim: Claim) -> tuple[str, ...]:
    """Returns the variables by which every process of an attempt is found, beside the worker's mark."""
    return f"AGL_ROLLOUT_ID={claim.rollout.id}", f"AGL_ATTEMPT={claim.lease.attempt}"


def split_command(command: str, what: str, *, found: bool = True) -> list[str]:
    """A program with its arguments. ConfigError where it is empty or, with `found`, not found here."""
    try:
        arguments = shlex.split(command)
    except ValueError as cause:
        raise ConfigError(f"{what} {command!r} cannot be split into words: {cause}") from cause
    if not arguments:
        raise ConfigError(f"{what}: expected a program with its arguments, got nothing")
    if found and shutil.which(arguments[0]) is None:
        raise ConfigError(f"{what} {command!r}: program {arguments[0]!r} is not found on PATH")
    return arguments


class CommandFailed(AgentError):
    """A program was interrupted, or ended with an exit code other than 0."""

    def __init__(self, message: str, output: str, code: int = 0) -> None:
        super().__init__(message)
        self.output = output
        self.exited = 0 < code < SIGNALLED
        """It ended by itself; a signal may come from whoever wants its memory."""


def command_environment(inherited: Mapping[str, str], claim: Claim, llm: LLM, task: Path) -> dict[str, str]:
    """The environment of a program: everything inherited but our secrets, and what it needs to be traced."""
    environment = inheritable(inherited)
    environment |= {
        "OPENAI_BASE_URL": llm.base_url,
        "OPENAI_API_KEY": llm.api_key,
        "ANTHROPIC_BASE_URL": llm.anthropic_base_url,
        "ANTHROPIC_API_KEY": llm.api_key,
        "GOOGLE_GEMINI_BASE_URL": llm.google_base_url,
        "GEMINI_API_KEY": llm.api_key,
        "AGL_MODEL": llm.model,
        "AGL_TASK": str(task),
        "AGL_REWARD_URL": f"{llm.base_url}/reward",
        "AGL_ROLLOUT_ID": claim.rollout.id,
        "AGL_ATTEMPT": str(claim.lease.attempt),
        "AGL_SEED": str(llm.seed),
    }
    if "GOOGLE_API_KEY" in environment:  # Google's SDKs prefer it to the other
        environment["GOOGLE_API_KEY"] = llm.api_key
    environment |= llm.prompts.environment()
    environment |= tracing_environment(inherited, claim, llm)
    environment["NO_PROXY"] = environment["no_proxy"] = without_proxy(inherited, llm.base_url)
    return environment


def tracing_environment(inherited: Mapping[str, str], claim: Claim, llm: LLM) -> dict[str, str]:
    """Returns the variables that make an instrumented program send its spans to the attempt; one that has an endpoint of
    its own keeps it.

    Variables of traces alone: metrics and logs have no place here. The resource names the attempt whichever way its spans
    take, so that a collector of the user's can send them on.
    """
    names = {"agl.rollout_id": claim.rollout.id, "agl.attempt": str(claim.lease.attempt)}
    pairs = [inherited.get("OTEL_RESOURCE_ATTRIBUTES", ""), *(f"{name}={value}" for name, value in names.items())]
    environment = {"OTEL_RESOURCE_ATTRIBUTES": ",".join(filter(None, pairs))}
    if not any(inherited.get(name) for name in OWN_ENDPOINTS):
        environment |= {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{llm.base_url}/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{llm.api_key}",
        }
    return environment


def without_proxy(inherited: Mapping[str, str], server_url: str) -> str:
    """NO_PROXY with the loopback names, and the server's own where it is on this machine, added to what is there."""
    present = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    names = [name.strip() for name in present.split(",") if name.strip()]
    host = urlsplit(server_url).hostname or ""
    local = (*LOOPBACK, host) if host.startswith("127.") else LOOPBACK
    return ",".join(dict.fromkeys([*names, *local]))


class PrintedReward:
    """Finds the reward in a program's standard output of any length: the last line that is a JSON object with "reward", or a
    bare number as the very last line. Only a line feed ends a line: text in JSON may hold any other separator."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._last = ""
        self._found: dict[str, object] | None = None
        self._unread = ""
        """A line that begins as a reward does and is no JSON; a later one that is takes precedence."""

    def add(self, chunk: bytes) -> None:
        """The next part of the output."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._grow(end)
            self._end()
        self._grow(rest)

    def read(self, *, bare_numbers: bool) -> tuple[object, object]:
        """The reward and the feedback beside it, as they stand there; None where there is none. RewardError where a bare
        number follows another reward: it may be a stray one; and where the last reward cannot be read."""
        self._end()
        if self._unread:
            raise RewardError(
                f"the printed reward: expected a JSON object in a line of at most {MAX_LINE_BYTES} bytes, "
                f"got {self._unread[:80]}"
            )
        last = json_of(self._last) if bare_numbers else None
        if isinstance(last, int | float) and not isinstance(last, bool):
            if self._found is not None:
                raise RewardError(
                    f"the printed reward: {self._last.strip()[:80]} is the last line, and an earlier one says "
                    f"{self._found['reward']!r:.80}: print one reward only"
                )
            return last, None
        return (None, None) if self._found is None else (self._found["reward"], self._found.get("feedback"))

    def _grow(self, part: bytes) -> None:
        if len(self._line) <= MAX_LINE_BYTES:  # one that is longer is cut, and no JSON any more
            self._line += part[: MAX_LINE_BYTES + 1]

    def _end(self) -> None:
        line, self._line = self._line.decode(errors="replace"), bytearray()
        if plain(line):
            self._last = line
        if '"reward"' not in line:
            return
        if isinstance(found := json_of(line), dict) and "reward" in found:
            self._found, self._unread = found, ""
        elif found is None and (text := plain(line)).startswith('{"reward":'):
            self._unread = text


def printed_reward(text: str, *, bare_numbers: bool) -> tuple[object, object]:
    """`PrintedReward` of a whole output."""
    found = PrintedReward()
    found.add(text.encode(errors="replace"))
    return found.read(bare_numbers=bare_numbers)


def plain(line: str) -> str:
    """A printed line without colours, byte order marks, NULs and blanks around it."""
    return _TERMINAL.sub("", line).strip(_BLANK)


def json_of(line: str) -> Any:
    """The JSON value that a printed line is, without what `plain` drops or a progress bar wrote before it; None where it is
    none."""
    text = plain(line)
    for part in dict.fromkeys((text, text.rpartition("\r")[2])):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(part, strict=False)  # with control characters as they are, tabs say, in its texts
    return None


class Tail:
    """The last bytes of an output."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        self._bytes += chunk
        if len(self._bytes) > 2 * MAX_OUTPUT_BYTES:
            del self._bytes[:-MAX_OUTPUT_BYTES]

    def text(self, most: int) -> str:
        return bytes(self._bytes[-most:]).decode(errors="replace")


class _Sink(Protocol):
    def add(self, chunk: bytes) -> None: ...


class _Reader(asyncio.Protocol):
    """Gives what a pipe brings to its sinks."""

    def __init__(self, sinks: tuple[_Sink, ...]) -> None:
        self._sinks = sinks
        self._transport: asyncio.BaseTransport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for sink in self._sinks:
            sink.add(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _read(descriptor: int, *sinks: _Sink) -> _Reader:
    pipe: IO[bytes] = os.fdopen(descriptor, "rb", 0)
    _, reader = await asyncio.get_running_loop().connect_read_pipe(lambda: _Reader(sinks), pipe)
    return reader


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
