"""Whoever goes through a large store holds a small part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_samples import Clock, a_call, a_worker, ending, some, sql_store

ROLLOUTS, CALLS, TEXT = 1000, 20, "many words " * 500
"""The calls' text alone is 110 MB."""
MOST_MB = 70
"""More than a program that goes through an empty store needs."""


async def fill(path: Path, rollouts: int) -> None:
    async with sql_store(f"sqlite:///{path}", Clock()) as store:
        await store.create_run("", {}, "run")
        await store.enqueue(some("run", rollouts))
        for _ in range(0, rollouts, 50):
            claims = await store.claim(a_worker("run"), limit=50)
            for claim in claims:
                calls = [a_call(claim, completion={"content": TEXT})]
                while len(calls) < CALLS:
                    parent = calls[-1]
                    tokens = parent.prompt_tokens + len(parent.sampled_ids) + 3
                    calls.append(a_call(claim, parent_id=parent.id, prompt_tokens=tokens, completion={"content": TEXT}))
                await store.append_calls(calls)
            await store.finish([ending(claim) for claim in claims])
        await store.update_run("run", "finished")


def peak_mb(path: Path, arguments: Sequence[str]) -> float:
    """Most memory of an `agl` command that succeeds."""
    command = [sys.executable, "-c", "from agentlightning.cli.app import main; main()", *arguments]
    process = subprocess.Popen([*command, "--store", f"sqlite:///{path}"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    return used.ru_maxrss / 1024


@pytest.mark.slow
async def test_a_large_store_needs_no_large_memory(tmp_path: Path) -> None:
    await fill(tmp_path / "small.db", 10)
    await fill(tmp_path / "large.db", ROLLOUTS)
    for command in ("runs export run --to", "runs show run --drift"):
        most = [
            peak_mb(file, [*command.split(), *([str(file.with_suffix(""))] if command.endswith("--to") else [])])
            for file in (tmp_path / "small.db", tmp_path / "large.db")
        ]
        assert most[1] < most[0] + MOST_MB, command
