"""The time that tracing adds to a step of an agent: ours, AgentOps's, and the noise of this machine.

A step is one run of a LangGraph graph whose node calls the model once, by langchain-openai over our gateway and a static
engine, and then a tool (tracing/steps.py). The same file runs in workers of ours and in AgentOps's environment,
.venv-agentops (made at the first run from tracing/agentops.lock: AgentOps 0.4.21 and the releases of its time, which
it still instruments), each with tracing off and on. What tracing leaves behind, which is checked:

    ours           in the store: the agent (node) of every call, a span of every tool; the calls are recorded anyway
    agentops       at a receiver on loopback: a span of every node, with the call's messages, and one of every tool
    openinference  ours with agent.trace = ["langchain"]: on top, that package's spans of graph, node and call

Blocks of steps of all contestants alternate in a random order. From one round to the next the machine's mood changes, so
figures are differences within a round, their median over rounds: of the process's CPU time for a step (added_ms: what an
exporter's thread uses counts, what other programs do does not), and of the median and the least step by the clock, which
say the same on a machine that does nothing else. `noise` is the same difference between two blocks without tracing.

    python benchmarks/tracing.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.records import JSON, Finish, NewRollout, Resource, WorkerStatus
from agentlightning.runtime.children import listen, secrets_line, start_child, stop_child
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import KEY_VARIABLE
from peers import install_peer
from static_engine import write_answers, write_tokenizer

HERE = Path(__file__).resolve().parent
KEY = "sk-agl-server-of-the-benchmark"
PARTS = HERE / "tracing"
LOCK = PARTS / "agentops.lock"
AGENTOPS = HERE.parent / ".venv-agentops"
START_S = 60.0
BLOCK_S = 120.0

Figures = dict[str, float]


@dataclass(frozen=True)
class Effort:
    """The size of a measurement."""

    rounds: int = 40
    steps: int = 25
    """Of a block."""


QUICK = Effort(rounds=2, steps=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs; nothing installed")
    parser.add_argument("--rounds", type=int, help="rounds of blocks")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else Effort()
    if arguments.rounds is not None:
        effort = Effort(rounds=arguments.rounds, steps=effort.steps)
    if not arguments.quick:
        install_peer("AgentOps", AGENTOPS, LOCK)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), effort))))


async def measure(folder: Path, effort: Effort) -> dict[str, float | None]:
    """All figures."""
    async with contextlib.AsyncExitStack() as stack:
        bench = await Bench.open(folder, stack)
        contestants: dict[str, Workers | Peer] = {
            "off": await Workers.start(bench, "plain", {"trace": False}),
            "ours": await Workers.start(bench, "traced", {}),
            "openinference": await Workers.start(bench, "traced", {"trace": ["langchain"]}),
        }
        contestants["off again"] = contestants["off"]
        if (AGENTOPS / ".installed").exists():
            contestants["agentops off"] = await Peer.start(bench, "off")
            contestants["agentops"] = await Peer.start(bench, "on")
        else:
            print("agentops: left out, since .venv-agentops is not there; a run without --quick installs it")
        seen: defaultdict[str, list[Figures]] = defaultdict(list)
        order = list(contestants)
        for number in range(effort.rounds + 1):
            random.Random(number).shuffle(order)
            for name in order:
                figures = await contestants[name].block(effort.steps)
                if number:  # the first round imports and warms
                    seen[name].append(figures)
        for contestant in set(contestants.values()):
            await contestant.check()
        return summary(seen)


def summary(seen: dict[str, list[Figures]]) -> dict[str, float | None]:
    """Medians over rounds of differences within a round, in milliseconds."""
    print(f"{'':<16}{'wall':>9}{'least':>9}{'CPU':>9}   milliseconds of a step, medians")
    for name, rounds in seen.items():
        print(
            f"{name:<16}"
            + "".join(f"{statistics.median(r[key] for r in rounds):9.3f}" for key in ("wall", "least", "cpu"))
        )
    pairs = [("ours", "off"), ("openinference", "off"), ("agentops", "agentops off"), ("off again", "off")]
    added = {
        on: {key: added_ms(seen[on], seen[off], key) for key in ("wall", "least", "cpu")}
        for on, off in pairs
        if on in seen
    }
    for on, figures in added.items():
        label = "noise" if on == "off again" else f"{on} adds"
        print(f"{label:<20}" + "  ".join(f"{key} {value:+.3f} ms" for key, value in figures.items()))
    ours, theirs, extra, noise = (added.get(name) for name in ("ours", "agentops", "openinference", "off again"))
    assert ours is not None
    assert extra is not None
    assert noise is not None
    return {
        "added_ms": round(ours["cpu"], 3),
        "agentops_added_ms": round(theirs["cpu"], 3) if theirs else None,
        "ours_over_agentops": ratio(ours["cpu"], theirs["cpu"] if theirs else None),
        "noise_ms": round(noise["cpu"], 3),
        "added_wall_ms": round(ours["wall"], 3),
        "agentops_added_wall_ms": round(theirs["wall"], 3) if theirs else None,
        "noise_wall_ms": round(noise["wall"], 3),
        "openinference_added_ms": round(extra["cpu"], 3),
    }


def added_ms(on: Sequence[Figures], off: Sequence[Figures], key: str) -> float:
    return statistics.median(a[key] - b[key] for a, b in zip(on, off, strict=True))


def ratio(ours: float, theirs: float | None) -> float | None:
    """None where there is nothing to compare with: no peer, or one whose cost is lost in the noise."""
    return round(ours / theirs, 3) if theirs is not None and theirs > 0 else None


# --- the house ----------------------------------------------------------------------------------------------------------


class Bench:
    """A gateway over a SQLite file with an engine that always says the same, and a receiver of AgentOps's spans."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.receiver = ""
        self.url = ""
        self._tokenizer = write_tokenizer(folder / "tokenizer")
        write_answers(folder / "answers", self._tokenizer)

    @classmethod
    async def open(cls, folder: Path, stack: contextlib.AsyncExitStack) -> Bench:
        bench = cls(folder, stack)
        bench.receiver = bench._serve(
            [sys.executable, str(PARTS / "receiver.py"), "{fd}", str(folder / "answers" / "generate.json")], "/spans"
        )
        gateway = ["-m", "agentlightning.gateway", "--store", f"sqlite:///{folder}/agl.db", "--fd", "{fd}"]
        bench.url = bench._serve([sys.executable, *gateway], "/healthz")
        bench.store = await stack.enter_async_context(LightningStoreClient(bench.url, KEY))
        return bench

    store: LightningStoreClient

    async def run(self, agent: JSON) -> str:
        """A run whose policy is the engine."""
        run = await self.store.create_run("benchmark", {"agent": agent})
        value = {"model": "policy", "endpoints": [self.receiver], "tokenizer": str(self._tokenizer), "seed": 7}
        policy = Resource(run_id=run.id, name="default", kind="policy", value=value)
        await self.store.put_resources([policy])
        return run.id

    def _serve(self, command: list[str], path: str) -> str:
        listener = listen("127.0.0.1", 0)
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        process = subprocess.Popen(
            [word.format(fd=descriptor) for word in command],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=(self.folder / f"{port}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        listener.close()
        assert process.stdin is not None
        os.write(process.stdin.fileno(), secrets_line({KEY_VARIABLE: KEY}))  # our server waits for it
        self.stack.callback(stop_child, process)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while True:
            try:
                _get(f"{url}{path}")
                return url
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"a server did not start:\n{(self.folder / f'{port}.log').read_text()[-2000:]}")
                time.sleep(0.05)


class Workers:
    """A worker of ours, in a run of its own; a block is a rollout."""

    def __init__(self, bench: Bench, run_id: str, agent: str) -> None:
        self._bench = bench
        self._run_id = run_id
        self._traced = agent == "traced"
        self._steps = 0
        self._blocks = 0

    @classmethod
    async def start(cls, bench: Bench, agent: str, settings: JSON) -> Workers:
        run_id = await bench.run(settings)
        spec = f"{PARTS / 'steps.py'}:{agent}"
        process = start_child(
            ["agentlightning.runner", "--server", bench.url, "--run", run_id, "--agent", spec, "--concurrency", "1"],
            env={KEY_VARIABLE: KEY},
            log=bench.folder / f"{run_id}.log",
        )
        bench.stack.callback(stop_child, process)
        return cls(bench, run_id, agent)

    async def block(self, steps: int) -> Figures:
        report = self._bench.folder / f"{uuid.uuid4()}.json"
        store = self._bench.store
        task = {"steps": steps, "report": str(report)}
        [rollout] = await store.enqueue([NewRollout(run_id=self._run_id, task=task, group_id=report.stem)])
        self._blocks += 1
        self._steps += steps + 1
        deadline = time.monotonic() + BLOCK_S
        while len(finished := await store.wait(self._run_id, at_least=self._blocks, timeout_s=5.0)) < self._blocks:
            if time.monotonic() > deadline:
                sys.exit(f"a block did not end:\n{(self._bench.folder / f'{self._run_id}.log').read_text()[-2000:]}")
        [ended] = [one for one in finished if one.id == rollout.id]
        if ended.state != "succeeded":
            sys.exit(f"a block failed: {ended.error}")
        figures: Figures = json.loads(report.read_text())
        return figures

    async def check(self) -> None:
        """Ends the program where what tracing is for is not there."""
        rollouts = await self._bench.store.wait(self._run_id, at_least=self._blocks)
        ids = [rollout.id for rollout in rollouts]
        agents = [call.agent for call in await self._bench.store.calls(ids)]
        tools = [span for span in await self._bench.store.spans(ids) if span.attributes.get("gen_ai.tool.name")]
        spans = self._steps if self._traced else 0
        named = agents.count("writer")  # the node; else the gateway names agents by their prompts
        if len(agents) != self._steps or named != spans or len(tools) != spans:
            sys.exit(
                f"expected {self._steps} calls, {spans} of them of the writer, and {spans} spans of tools; got "
                f"{len(agents)} of {sorted(map(str, set(agents)))} and {len(tools)} spans"
            )


class Peer:
    """The same steps in AgentOps's environment, with AgentOps or without; a block is an attempt that is claimed for it."""

    def __init__(self, bench: Bench, run_id: str, process: asyncio.subprocess.Process, traced: bool) -> None:
        self._bench = bench
        self._run_id = run_id
        self._process = process
        self._traced = traced
        self._steps = 0

    @classmethod
    async def start(cls, bench: Bench, switch: str) -> Peer:
        process = await asyncio.create_subprocess_exec(
            str(AGENTOPS / "bin" / "python"),
            str(PARTS / "agentops_steps.py"),
            switch,
            bench.receiver,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(bench.folder / f"agentops-{switch}.log").open("wb"),
            cwd=bench.folder,  # it writes a log of its own where it is
        )
        bench.stack.push_async_callback(_end, process)
        return cls(bench, await bench.run({}), process, switch == "on")

    async def block(self, steps: int) -> Figures:
        store = self._bench.store
        [_] = await store.enqueue([NewRollout(run_id=self._run_id, task={}, group_id=str(uuid.uuid4()))])
        worker = WorkerStatus(id="peer", run_id=self._run_id, host="h", pid=0, running=0, seen_ns=time.time_ns())
        [claim] = await store.claim(worker, limit=1, lease_s=BLOCK_S)
        base_url = f"{self._bench.url}/r/{claim.rollout.id}/{claim.lease.attempt}/v1"
        block = {"steps": steps, "model": "policy", "base_url": base_url, "api_key": claim.key}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(block).encode() + b"\n")
        async for line in self._process.stdout:
            if line.startswith(b"figures "):
                await store.finish([Finish(lease=claim.lease, state="failed", error="measured")])
                self._steps += steps + 1
                figures: Figures = json.loads(line.removeprefix(b"figures "))
                return figures
        sys.exit("AgentOps's process ended; what it printed is above")

    async def check(self) -> None:
        """Ends the program where AgentOps did not record what it is compared for."""
        if not self._traced:
            return
        await _end(self._process)  # it sends what it holds
        counted = json.loads(await asyncio.to_thread(_get, f"{self._bench.receiver}/spans"))
        wanted = {"langgraph.node.execute": self._steps, "execute.tool": self._steps}
        if any(counted.get(name) != count for name, count in wanted.items()):
            sys.exit(f"AgentOps was to send {wanted}, and sent {counted}")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        body: bytes = reply.read()
    return body


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)


if __name__ == "__main__":
    main()
