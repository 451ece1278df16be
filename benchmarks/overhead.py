"""The demo's CPU time by part: agents, gateway, store, sampling, training.

Runs ``agl demo`` and reads the CPU time of each of its processes (and, in the server, of each thread) from /proc until it
ends. The server's event-loop thread is the gateway (with REST and the protocols), its other threads are the store's. Shares
are of the CPU time of everything that the demo started. Linux only.

    python benchmarks/overhead.py [--task sql] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SAMPLE_EVERY_S = 0.2
ROLES = {
    "agentlightning.runner": "agent",
    "agentlightning.gateway": "server",
    "agentlightning.engines.local.sampler": "sampling",
    "agentlightning.engines.local.learner_process": "training",
    "agentlightning.demo.warm_start": "warm_start",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="sql")
    parser.add_argument("--seed", default="0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/agl.db"
        command = [sys.executable, "-m", "agentlightning", "demo", "--task", arguments.task, "--seed", arguments.seed]
        command += ["--store", store, "--runs", f"{folder}/runs"]
        cpu = measure(command)
        calls = asyncio.run(count_calls(store))
    total = sum(cpu.values())
    server = cpu["gateway"] + cpu["store"]
    for role, seconds in sorted(cpu.items(), key=lambda item: -item[1]):
        print(f"{role:<11} {seconds:7.1f} s  {seconds / total:5.1%}")
    figures = {
        f"{role}_share": round(cpu[role] / total, 3) for role in ("agent", "gateway", "store", "sampling", "training")
    }
    figures |= {f"{role}_share": round(cpu[role] / total, 3) for role in ("warm_start", "trainer")}
    print(json.dumps(figures | {"calls": calls, "gateway_store_ms_per_call": round(1000 * server / calls, 3)}))


def measure(command: list[str]) -> dict[str, float]:
    """CPU seconds by role, of every process below the demo's."""
    demo = subprocess.Popen(command)
    seen: dict[tuple[str, str], float] = {}
    while demo.poll() is None:
        for pid, role in processes(demo.pid).items():
            for thread, seconds in threads(pid).items():
                part = role if role != "server" else ("gateway" if thread == pid else "store")
                seen[part, thread] = seconds
        time.sleep(SAMPLE_EVERY_S)
    if demo.returncode:
        sys.exit(f"the demo failed with exit code {demo.returncode}")
    totals: dict[str, float] = defaultdict(float)
    for (part, _), seconds in seen.items():
        totals[part] += seconds
    return totals


def processes(root: int) -> dict[str, str]:
    """Process ids below `root` (and itself) with their roles."""
    parents: dict[str, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[entry.name] = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
    found, pending = {}, [str(root)]
    while pending:
        pid = pending.pop()
        pending += [child for child, parent in parents.items() if parent == pid]
        try:
            words = (Path("/proc") / pid / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        found[pid] = next(
            (role for word in words if (role := ROLES.get(word))), "trainer" if pid == str(root) else "agent"
        )
    return found


def threads(pid: str) -> dict[str, float]:
    """CPU seconds of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = task.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[task.parent.name] = (int(fields[11]) + int(fields[12])) * TICK_S
    return found


async def count_calls(store: str) -> int:
    """All recorded calls of the store, evaluation included."""
    async with open_store(store) as opened:
        return sum(rollout.calls for rollout in await opened.rollouts(RolloutQuery()))


if __name__ == "__main__":
    main()
