"""A fleet of simulated agents on one machine: what gateways and a store on PostgreSQL add when many agents think and call.

Everything is real but agents and model: `agl serve --gateways N` over a PostgreSQL that waits for its disk, and processes
`agl worker -n` that claim, run and finish. An agent thinks for some seconds and calls, four times in all, so that the load
grows with the agents; the engine answers every call with the same 128 tokens, half a second later. All of it shares
this machine's cores. For each number of agents and gateways:

    added     milliseconds of a call through the gateway, beyond the median of calls straight to the engine meanwhile
    direct    p99 of those calls straight to the engine, beyond their median: what the agents' own process adds to either, in
              which a thousand of them wait for each other
    cpu       milliseconds of processor time per call through the gateway, of each kind of process
    memory    growth of gateways and workers while the agents run, over the number of agents; PostgreSQL's is not in it
    lost      rollouts that did not succeed, attempts that were lost, and answered calls that are not in the store

The last line has the figures of the most agents with the fewest gateways, the loss of all, and in `measured` everything;
`added_p99_growth` is the p99 of the most agents over that of the fewest. Needs PostgreSQL (`make servers`).

    python benchmarks/scale.py [--agents 100 1000] [--gateways 1 2 4] [--think-s 10] [--rollouts-per-agent 2]
        [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from agentlightning.records import NewRollout, Resource, RetryPolicy, Rollout
from agentlightning.runtime.children import listen, stop_child
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import KEY_VARIABLE
from static_engine import SAMPLED_IDS, prose, write_answers, write_tokenizer

if TYPE_CHECKING:
    from postgres_server import PostgresServer

HERE = Path(__file__).resolve().parent
PARTS = HERE / "scale"
SERVERS = HERE.parent / "tests" / "store"
KEY = "sk-agl-server-of-the-benchmark"
TURNS = 4
ENGINE_S = 0.5
AGENTS_PER_WORKER = 250
START_S = 90.0
LATE = 5.0
"""Multiple of the time that a measurement should take after which it is given up."""
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Load:
    """One measurement."""

    agents: int
    gateways: int
    think_s: float
    rollouts_per_agent: int = 2

    @property
    def expected_s(self) -> float:
        """About how long it takes where nothing but agents and engine take time."""
        return self.rollouts_per_agent * ((TURNS + 1) * (self.think_s + ENGINE_S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[100, 1000], help="agents at a time")
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4], help="gateway processes")
    parser.add_argument("--think-s", type=float, default=10.0, help="seconds between two calls of an agent, on average")
    parser.add_argument("--rollouts-per-agent", type=int, default=2, help="one after the other")
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs: 4 and 16 agents, 2 gateways")
    given = parser.parse_args()
    sys.path.insert(0, str(SERVERS))
    from postgres_server import PostgresServer, missing

    if reason := missing():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    loads = [
        Load(agents, gateways, given.think_s, given.rollouts_per_agent)
        for gateways in given.gateways
        for agents in given.agents
    ]
    if given.quick:
        loads = [Load(4, 2, 0.2), Load(16, 2, 0.2)]
    measured = []
    with tempfile.TemporaryDirectory() as folder, PostgresServer(durable=True) as database:
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        write_answers(Path(folder) / "answers", tokenizer)
        for number, load in enumerate(loads):
            with contextlib.ExitStack() as stack:
                scene = Path(folder) / str(number)
                scene.mkdir()
                figures = asyncio.run(measure(Fleet(scene, tokenizer, database, load, stack)))
            measured.append(figures)
            print(" ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    print(json.dumps(summary(measured)))


def summary(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line."""
    gateways = min(each["gateways"] for each in measured)
    own = sorted((each for each in measured if each["gateways"] == gateways), key=lambda each: each["agents"])
    growth = own[-1]["added_p99_ms"] / own[0]["added_p99_ms"]
    lost = sum(each["lost"] for each in measured)
    return {**own[-1], "lost": lost, "added_p99_growth": round(growth, 2), "measured": measured}


async def measure(fleet: Fleet) -> dict[str, Any]:
    """Figures of one measurement."""
    load = fleet.load
    async with LightningStoreClient(fleet.url, KEY) as store:
        run_id = await fleet.register(store)
        workers = fleet.start_workers(run_id)
        # Renderer, connections and pools are made once: they are no agent's.
        await fleet.finished(store, await store.enqueue(fleet.rollouts(run_id, "warm", min(load.agents, 64), 0.0)))
        fleet.log.unlink()
        # Looked for once: it reads the whole list of the machine's processes for each.
        processes = [each for process in (fleet.server, *workers) for each in family(psutil.Process(process.pid))]
        before, spent = memory_mb(processes), fleet.cpu_s(workers)
        began = time.monotonic()
        made = fleet.rollouts(run_id, "measured", load.agents * load.rollouts_per_agent, load.think_s)
        queued = [
            rollout
            for start in range(0, len(made), 1000)
            for rollout in await store.enqueue(made[start : start + 1000])
        ]
        watching = asyncio.create_task(peak_memory_mb(processes))
        done = await fleet.finished(store, queued)
        took_s = time.monotonic() - began
        watching.cancel()
        peak = await watching
        spent = {kind: seconds - spent[kind] for kind, seconds in fleet.cpu_s(workers).items()}
    seen = [json.loads(line) for line in fleet.log.read_text().splitlines()]
    direct_s = sorted(each["direct_s"] for each in seen)
    engine_s = statistics.median(direct_s)
    calls_s = sorted(seconds for each in seen for seconds in each["through_s"])
    unfinished = sum(rollout.state != "succeeded" for rollout in done) + sum(rollout.lost for rollout in done)
    unrecorded = len(calls_s) - sum(rollout.calls for rollout in done if rollout.state == "succeeded")
    return {
        "agents": load.agents,
        "gateways": load.gateways,
        "think_s": load.think_s,
        "calls_per_s": round(len(calls_s) / took_s, 1),
        "added_p50_ms": round(1000 * (statistics.median(calls_s) - engine_s), 1),
        "added_p99_ms": round(1000 * (p99(calls_s) - engine_s), 1),
        "direct_p99_ms": round(1000 * (p99(direct_s) - engine_s), 1),
        "rss_mb_per_agent": round((peak - before) / load.agents, 3),
        "rollouts_per_s": round(len(done) / took_s, 2),
        "lost": unfinished + abs(unrecorded),
        "cpu_ms": {kind: round(1000 * seconds / len(calls_s), 2) for kind, seconds in spent.items()},
    }


def p99(ordered: Sequence[float]) -> float:
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def memory_mb(processes: Sequence[psutil.Process]) -> float:
    """Resident memory of the processes."""
    return sum(each.memory_info().rss for each in processes) / 2**20


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and its children."""
    return [process, *process.children(recursive=True)]


async def peak_memory_mb(processes: Sequence[psutil.Process]) -> float:
    """The most that they had at a time, until it is cancelled."""
    peak = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, memory_mb(processes))
            await asyncio.sleep(0.5)
    return peak


class Fleet:
    """The processes of one measurement; they end with `stack`."""

    def __init__(
        self, folder: Path, tokenizer: Path, database: PostgresServer, load: Load, stack: contextlib.ExitStack
    ) -> None:
        self.load = load
        self.log = folder / "calls.jsonl"
        self._folder = folder
        self._tokenizer = tokenizer
        self._stack = stack
        ports = free_ports(2)
        self._engine = f"http://127.0.0.1:{ports[0]}"
        answer = tokenizer.parent / "answers" / "generate.json"
        self._database = database
        self._engine_process = self._start(
            "engine", [str(PARTS / "engine.py"), str(answer), str(ports[0]), str(ENGINE_S)]
        )
        self.url = f"http://127.0.0.1:{ports[1]}"
        serve = ["-m", "agentlightning", "serve", "--port", str(ports[1]), "--gateways", str(load.gateways)]
        self.server = self._start("server", serve, AGL_STORE=database.url(), AGL_LOG_LEVEL="warning")
        answering(self.server, f"{self.url}/healthz", self.logs)

    def start_workers(self, run_id: str) -> list[Process]:
        """As many as the agents need."""
        count = math.ceil(self.load.agents / AGENTS_PER_WORKER)
        command = [
            "-m",
            "agentlightning",
            "worker",
            f"{PARTS / 'agent.py'}:solve",
            "--server",
            self.url,
            "--run",
            run_id,
        ]
        each = ["-n", str(math.ceil(self.load.agents / count))]
        return [self._start(f"worker-{number}", [*command, *each]) for number in range(count)]

    async def register(self, store: LightningStoreClient) -> str:
        """The id of a run with a policy at the engine."""
        run_id = (await store.create_run("scale", {})).id
        policy = {"tokenizer": str(self._tokenizer), "seed": 7, "model": "policy"}
        value = {**policy, "endpoints": [self._engine]}
        await store.put_resources([Resource(run_id=run_id, name="policy", kind="policy", value=value)])
        return run_id

    def rollouts(self, run_id: str, group: str, count: int, think_s: float) -> list[NewRollout]:
        task = {"system": "Work on the case below. " + prose(0, 700), "think_s": think_s, "turns": TURNS}
        task |= {"max_tokens": SAMPLED_IDS, "log": str(self.log), "engine": f"{self._engine}/inference/v1/generate"}
        return [
            NewRollout(
                run_id=run_id,
                task={**task, "seed": number, "case": f"Case {number}: " + prose(1, 800)},
                group_id=f"{group}:{number}",
                retry=RetryPolicy(timeout_s=3600.0),
            )
            for number in range(count)
        ]

    async def finished(self, store: LightningStoreClient, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts once all have finished. Ends the program where they are late."""
        wanted, limit_s = {rollout.id for rollout in rollouts}, START_S + LATE * self.load.expected_s
        done: dict[str, Rollout] = {}
        deadline, after = time.monotonic() + limit_s, 0
        while len(done) < len(wanted):
            found = await store.wait(rollouts[0].run_id, after, timeout_s=5.0)
            if found:
                after = found[-1].finished_seq or after
            done.update({rollout.id: rollout for rollout in found if rollout.id in wanted})
            if time.monotonic() > deadline:
                late = f"{len(wanted) - len(done)} of {len(wanted)} rollouts have not finished"
                sys.exit(f"{late} after {limit_s:g} s; {self.logs()}")
        return list(done.values())

    def cpu_s(self, workers: Sequence[Process]) -> dict[str, float]:
        """Processor time so far, by kind of process."""
        kinds = {
            "gateways": [self.server.pid],
            "workers": [process.pid for process in workers],
            "engine": [self._engine_process.pid],
            "database": [self._database.pid],
        }
        return {
            kind: sum(sum(each.cpu_times()[:2]) for pid in pids for each in family(psutil.Process(pid)))
            for kind, pids in kinds.items()
        }

    def logs(self) -> str:
        """The last words of all processes."""
        said = {log.stem: log.read_text(errors="replace")[-1500:] for log in self._folder.glob("*.log")}
        return "\n".join(f"{name}: {words}" for name, words in said.items())

    def _start(self, name: str, arguments: Sequence[str], **environment: str) -> Process:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, KEY_VARIABLE: KEY, **environment},
            )
        self._stack.callback(stop_child, process, 40.0)
        return process


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(listen("127.0.0.1", 0)).getsockname()[1] for _ in range(count)]


def answering(process: Process, url: str, logs: Callable[[], str]) -> None:
    """Wait until a process answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                sys.exit(f"{url} does not answer; {logs()}")
            time.sleep(0.05)


if __name__ == "__main__":
    main()
