"""A worker that is told to end drains first: a real process, with real signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from runner_bench import Bench, written
from test_worker_process import AGENT, ASYNC_AGENT, attempts, ended


async def test_a_draining_worker_claims_nothing_more_and_lets_its_agents_end(bench: Bench, tmp_path: Path) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    [running] = await bench.enqueue({"do": "wait", "go": str(go), "begun": str(begun)})
    process = drained_worker(bench, bench.file(tmp_path, AGENT))
    await written(begun)
    await told_to_drain(process)
    [late] = await bench.enqueue({})
    go.touch()
    assert await ended(process) == 0
    assert [state for state, _ in await attempts(bench, running)] == ["succeeded"]
    assert await attempts(bench, late) == []


async def test_a_second_signal_gives_the_leases_of_a_draining_worker_back_at_once(bench: Bench, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    [running] = await bench.enqueue({"do": "fail later", "file": str(begun)})
    process = drained_worker(bench, bench.file(tmp_path, ASYNC_AGENT))
    await written(begun)
    await told_to_drain(process)
    process.send_signal(signal.SIGTERM)
    assert await ended(process) == 0
    assert await attempts(bench, running) == [("lost", "the worker was stopped")]


def drained_worker(bench: Bench, agent: str) -> subprocess.Popen[bytes]:
    """A worker that drains for as long as it takes."""
    return bench.worker_process("--agent", agent, "--drain-timeout-s", "600", stderr=subprocess.PIPE)


async def told_to_drain(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and its word that it drains."""
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    with process.stderr as stderr:
        lines = await asyncio.to_thread(lambda: next(line for line in stderr if b"draining" in line))
    assert lines == b"note: draining: 1 running, which get 600 s; again ends them at once\n"
