"""The throughput of one gateway process on two cores, beside nginx and LiteLLM on the same cores under the same load.

The engine is an nginx that answers every call with the same 18 kB. It and the load generator (wrk, 16 connections, chat
requests of 2 kB, two turns to a conversation, 512 keys in turn) share two cores with the contestants, each of which is one
process; they run in short rounds, one after the other:

    nginx     proxy_pass with keep-alive: the practical limit of a proxy
    litellm   the LiteLLM proxy with one model, without a database, without callbacks
    text      our gateway before a model that is not trained: passed on, every call in the graph and in the store
    token     our gateway before a policy: rendered, sampled by token ids, decoded, every call in the graph and in the store

The gateway is the process that `agl train` starts, over a SQLite file; the keys are of attempts claimed over its REST API.
Further: the CPU time of gateway and store for a call (cpu_ms_per_call; text_…), what the token path adds to an answer and to
the first event of a stream when nothing else is going on, and how much the process grows while attempts come and go.
LiteLLM gets an environment, .venv-litellm, at the first run, from gateway/litellm.lock. Linux only; needs wrk and nginx.

    python benchmarks/gateway.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agentlightning.records import Claim, Finish, NewRollout, Resource, RetryPolicy, WorkerStatus
from agentlightning.runtime.children import listen, start_child, stop_child
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import KEY_VARIABLE
from peers import install_peer
from static_engine import SAMPLED_IDS, prose, write_answers, write_tokenizer

HERE = Path(__file__).resolve().parent
PARTS = HERE / "gateway"
LOCK = PARTS / "litellm.lock"
LITELLM = HERE.parent / ".venv-litellm"
KEY = "sk-agl-server-of-the-benchmark"

CONNECTIONS = 16
MARK = "########"
"""Where the load generator puts the number of the conversation."""
SPACING = 250_000
"""Conversations set aside for each start of the load generator, more than it gets through."""
LEASE_S = 3600.0
START_S = 90.0
"""Seconds that a process gets until it answers."""
LITELLM_SETTINGS = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it looks at no key: less work than for ours
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Effort:
    """The size of a measurement."""

    rounds: int = 5
    round_s: int = 4
    keys: int = 512
    quiet_rounds: int = 3
    """Rounds with one connection."""
    streams: int = 400
    wave_s: int = 2
    """How long attempts live, in the measurement of memory."""
    warm_waves: int = 3
    calls: int = 25_000
    """Calls after which the process's memory is read again."""


QUICK = Effort(rounds=1, round_s=3, keys=256, quiet_rounds=1, streams=40, wave_s=1, warm_waves=1, calls=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a look at whether it runs: short rounds, nothing installed"
    )
    quick = parser.parse_args().quick
    missing = [name for name in ("wrk", "nginx") if shutil.which(name) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)}: not found; on Debian: apt-get install wrk nginx")
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        sys.exit("two cores are needed: the contestants share them with the load and the engine")
    if not quick:
        install_peer("LiteLLM", LITELLM, LOCK)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, cores[:2])  # whatever is started has the same two
        figures = measure(Bench(Path(folder), stack), QUICK if quick else Effort())
    print(json.dumps(figures))


# --- what is measured ---------------------------------------------------------------------------------------------------


def measure(bench: Bench, effort: Effort) -> dict[str, float | None]:
    """All figures."""
    gateway = Gateway(bench)
    claims = gateway.claim(effort.keys)
    answer = gateway.answer(claims[0])
    engine = bench.load("engine", bench.engine, "echo", answer, [("/inference/v1/generate", "none")])
    text = bench.load("text", gateway.url, "external", answer, chat_keys(claims))
    token = bench.load("token", gateway.url, "trained", answer, chat_keys(claims))
    plain = [("/v1/chat/completions", "none")] * effort.keys
    contestants = [bench.load("nginx", bench.start_proxy(), "external", answer, plain), text, token]
    if (LITELLM / "bin" / "litellm").exists():
        contestants.insert(1, bench.load("litellm", bench.start_litellm(), "external", answer, plain))
    else:
        print("litellm: left out, since .venv-litellm is not there; a run without --quick installs it")
    for contestant in contestants:
        contestant.run(effort.round_s)
    seen: dict[str, list[Round]] = {contestant.name: [] for contestant in contestants}
    cpu_ms: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(effort.rounds):
        for contestant in contestants:
            before = gateway.cpu_s()
            seen[contestant.name].append(contestant.run(effort.round_s))
            cpu_ms[contestant.name].append(1000 * (gateway.cpu_s() - before) / seen[contestant.name][-1].requests)
    rps = {name: statistics.median(r.rps for r in rounds) for name, rounds in seen.items()}
    for name, rounds in seen.items():
        p50 = statistics.median(r.p50_ms for r in rounds)
        spread = f"{min(r.rps for r in rounds):.0f}-{max(r.rps for r in rounds):.0f}"
        print(f"{name:<8} {rps[name]:8.0f} requests/s ({spread}), p50 {p50:7.2f} ms")
    gateway.check_graph(claims)
    pairs = [(token.run(1, 1).p50_ms, engine.run(1, 1).p50_ms) for _ in range(effort.quiet_rounds)]
    figures = ratios(rps) | {
        "cpu_ms_per_call": round(statistics.median(cpu_ms["token"]), 3),
        "text_cpu_ms_per_call": round(statistics.median(cpu_ms["text"]), 3),
        "added_ms_p50": round(statistics.median(ours - theirs for ours, theirs in pairs), 3),
        # Attempts that begin: those of the rounds have more calls than any agent makes, and partly left the cache.
        "ttft_added_ms_p50": round(first_event_ms(bench, gateway, gateway.claim(effort.streams), effort.streams), 3),
    }
    return figures | {"rss_growth_mb_per_100k": round(growth(bench, gateway, answer, effort), 1)}


def ratios(rps: dict[str, float]) -> dict[str, float | None]:
    """Requests per second, and ours over the others'."""
    litellm = rps.get("litellm")
    figures: dict[str, float | None] = {
        f"{name}_rps": round(rps[name], 1) if name in rps else None for name in ("nginx", "litellm", "text", "token")
    }
    for name in ("text", "token"):
        figures[f"{name}_over_litellm"] = round(rps[name] / litellm, 1) if litellm else None
    return figures | {"token_over_nginx": round(rps["token"] / rps["nginx"], 4)}


def first_event_ms(bench: Bench, gateway: Gateway, claims: Sequence[Claim], streams: int) -> float:
    """Returns the time that the gateway adds until the first text of a stream, the median of `streams` pairs of calls."""
    ours, theirs, first = [], [], bench.next_first()
    with connection(gateway.url) as agent, connection(bench.streams) as engine:
        for number in range(streams):
            claim = claims[number % len(claims)]
            body = chat("streamed", f"{first + number:08}", stream=True)
            ours.append(first_text_ms(agent, f"{path(claim)}/v1/chat/completions", claim.key, body, b'"content":"'))
            theirs.append(first_text_ms(engine, "/inference/v1/generate", "none", body, b'"token_ids":['))
    added, direct = statistics.median(ours) - statistics.median(theirs), statistics.median(theirs)
    print(f"first event of a stream: {direct:.3f} ms from the engine, {added:.3f} ms more through the gateway")
    return added


def first_text_ms(agent: http.client.HTTPConnection, route: str, key: str, body: bytes, sign: bytes) -> float:
    """Milliseconds until the first event that carries text, which `sign` begins; reads the stream to its end."""
    began = time.perf_counter()
    agent.request("POST", route, body, {"authorization": f"Bearer {key}", "content-type": "application/json"})
    reply = agent.getresponse()
    first = None
    for line in iter(reply.readline, b""):
        if first is None and sign in line and sign + b'"' not in line:
            first = time.perf_counter()
    reply.read()  # nothing: it frees the connection
    if reply.status != 200 or first is None:
        sys.exit(f"{route}: status {reply.status} and no text in the stream")
    return 1000 * (first - began)


def growth(bench: Bench, gateway: Gateway, answer: str, effort: Effort) -> float:
    """Megabytes that the gateway grows by in 100,000 calls, as attempts end and others begin."""
    calls, waves, before = 0, 0, 0.0
    while calls < effort.calls:
        claims = gateway.claim(effort.keys)
        load = bench.load("wave", gateway.url, "trained", answer, chat_keys(claims))
        done = load.run(effort.wave_s).requests
        gateway.finish(claims)
        waves += 1
        if waves == effort.warm_waves:
            before = gateway.memory_mb()
        elif waves > effort.warm_waves:
            calls += done
    after = gateway.memory_mb()
    print(
        f"memory: {before:.0f} MB, {after:.0f} MB after {calls} calls more ({waves - effort.warm_waves} sets of attempts)"
    )
    return (after - before) * 100_000 / calls


# --- the load -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """The report of the load generator."""

    requests: int
    rps: float
    p50_ms: float


@dataclass
class Load:
    """Two-turn conversations for one address."""

    name: str
    url: str
    folder: Path
    bench: Bench

    def run(self, seconds: int, connections: int = CONNECTIONS) -> Round:
        """One start of the load generator. Ends the program where a request failed."""
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
        command += ["-s", str(PARTS / "load.lua"), self.url, "--", str(self.folder), str(self.bench.next_first())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"wrk on {self.name}: {done.stdout}{done.stderr}")
        said = json.loads(done.stdout.splitlines()[-1])
        if said["broken"] or said["refused"] or not said["requests"]:
            sys.exit(f"{self.name}: not every request was answered: {said}; {self.bench.logs()}")
        return Round(said["requests"], said["requests"] / said["seconds"], said["p50_ms"])


def chat_keys(claims: Sequence[Claim]) -> list[tuple[str, str]]:
    return [(f"{path(claim)}/v1/chat/completions", claim.key) for claim in claims]


def path(claim: Claim) -> str:
    return f"/r/{claim.rollout.id}/{claim.lease.attempt}"


def chat(model: str, number: str, answer: str | None = None, **more: Any) -> bytes:
    """A chat request, of the first turn or, with the answer to it, of the second: 2 kB on average."""
    messages = [
        {"role": "system", "content": "Work on the case below. " + prose(0, 700)},
        {"role": "user", "content": f"Case {number}: " + prose(1, 800)},
    ]
    if answer is not None:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": prose(2, 60)}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": SAMPLED_IDS, **more}).encode()


@contextlib.contextmanager
def connection(url: str) -> Iterator[http.client.HTTPConnection]:
    opened = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        opened.connect()
        assert opened.sock is not None
        opened.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened
    finally:
        opened.close()


# --- the processes ------------------------------------------------------------------------------------------------------


class Bench:
    """A folder, the engine, and the contestants; whatever was started ends with `stack`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self._first = 0
        self.tokenizer = write_tokenizer(folder / "tokenizer")
        write_answers(folder / "answers", self.tokenizer)
        self.engine, self.streams = self._start_nginx("engine", names=("engine", "streams"))

    def start_proxy(self) -> str:
        return self._start_nginx("proxy", names=("proxy",), engine=self.engine.rpartition(":")[2])[0]

    def start_litellm(self) -> str:
        model = {"model": "openai/external", "api_base": f"{self.engine}/v1", "api_key": "none"}
        config = self.folder / "litellm.yaml"  # JSON is YAML
        config.write_text(json.dumps({"model_list": [{"model_name": "external", "litellm_params": model}]}))
        port = free_port()
        command = [str(LITELLM / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        process = self.start("litellm", [*command, "--port", str(port), "--num_workers", "1", "--telemetry", "False"])
        return self.answering(process, port, "/health/liveliness")

    def start(self, name: str, command: Sequence[str]) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **LITELLM_SETTINGS},
            )
        self.stack.callback(stop_child, process)
        return process

    def answering(self, process: Process, port: int, route: str) -> str:
        """The address of the process on this port, once it answers."""
        deadline = time.monotonic() + START_S
        while True:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                asked.request("GET", route)
                asked.getresponse().read()
                return f"http://127.0.0.1:{port}"
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit(f"{process.args} does not answer; {self.logs()}")
                time.sleep(0.05)
            finally:
                asked.close()

    def load(self, name: str, url: str, model: str, answer: str, keys: Sequence[tuple[str, str]]) -> Load:
        folder = self.folder / f"load-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "keys").write_text("".join(f"{route}\t{key}\n" for route, key in keys))
        (folder / "turn1").write_bytes(chat(model, MARK))
        (folder / "turn2").write_bytes(chat(model, MARK, answer))
        return Load(name, url, folder, self)

    def next_first(self) -> int:
        """The number of a conversation that nobody has had, nor those that follow."""
        self._first += SPACING if self._first < 10**8 - SPACING else sys.exit("out of conversation numbers")
        return self._first - SPACING

    def logs(self) -> str:
        """The last words of all processes."""
        said = {log.stem: log.read_text(errors="replace")[-1000:] for log in self.folder.glob("*.log")}
        return "\n".join(f"{name}: {words}" for name, words in said.items())

    def _start_nginx(self, name: str, names: Sequence[str], **known: str) -> list[str]:
        ports = {one: free_port() for one in names}
        for source, target in (("nginx.conf", f"{name}.conf"), (f"{name}.conf", f"servers-{name}.conf")):
            text = string.Template((PARTS / source).read_text()).substitute({"name": name, **ports, **known})
            (self.folder / target).write_text(text)
        process = self.start(name, ["nginx", "-p", f"{self.folder}/", "-e", f"{name}.log", "-c", f"{name}.conf"])
        return [self.answering(process, port, "/") for port in ports.values()]


def free_port() -> int:
    """A port below those that the kernel gives out: nobody gets it by chance before a slow starter has bound it."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(10_000, below - 1000), below)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


class Gateway:
    """Our gateway over a SQLite file, with a policy, a policy that streams and an external model."""

    def __init__(self, bench: Bench) -> None:
        listener = listen("127.0.0.1", 0)
        arguments = ["agentlightning.gateway", "--store", f"sqlite:///{bench.folder}/agl.db"]
        self._process = start_child(
            [*arguments, "--fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            secrets={KEY_VARIABLE: KEY},
            env={"AGL_LOG_LEVEL": "warning"},
            log=bench.folder / "gateway.log",
        )
        bench.stack.callback(stop_child, self._process)
        port = listener.getsockname()[1]
        listener.close()
        self.url = bench.answering(self._process, port, "/healthz")
        self._run_id = ""
        self._worker = WorkerStatus(id="bench", run_id="", host="h", pid=os.getpid(), running=0, seen_ns=0)
        asyncio.run(self._set_up(bench))

    def claim(self, count: int) -> list[Claim]:
        """Attempts at new rollouts."""
        return asyncio.run(self._claim(count))

    def finish(self, claims: Sequence[Claim]) -> None:
        async def finish() -> None:
            async with LightningStoreClient(self.url, KEY) as store:
                await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])

        asyncio.run(finish())

    def answer(self, claim: Claim) -> str:
        """The text of the model's answer, which agents send back in the second turn."""
        with connection(self.url) as agent:
            headers = {"authorization": f"Bearer {claim.key}"}
            agent.request("POST", f"{path(claim)}/v1/chat/completions", chat("trained", "-" * 8), headers)
            said = json.loads(agent.getresponse().read())
        if "choices" not in said:
            sys.exit(f"the gateway refused: {said}")
        return str(said["choices"][0]["message"]["content"])

    def check_graph(self, claims: Sequence[Claim]) -> None:
        """Ends the program where second turns did not continue first ones."""

        async def causes() -> list[str]:
            async with LightningStoreClient(self.url, KEY) as store:
                return [call.continuation for call in await store.calls([claim.rollout.id for claim in claims[:8]])]

        found = asyncio.run(causes())
        continued = found.count("continued") / len(found)
        print(f"graph    {len(found)} calls of 8 attempts, {continued:.0%} of them continue another")
        if set(found) != {"continued", "first_turn"} or not 0.3 < continued <= 0.5:
            sys.exit(f"expected nearly half of the calls to continue another, and no forks: {set(found)}")

    def cpu_s(self) -> float:
        """Of the gateway and of the store, which is in its process."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def memory_mb(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss) / 2**20

    async def _set_up(self, bench: Bench) -> None:
        policy = {"tokenizer": str(bench.tokenizer), "seed": 7}
        external = {"url": f"{bench.engine}/v1", "models": ["external"]}
        async with LightningStoreClient(self.url, KEY) as store:
            self._run_id = (await store.create_run("benchmark", {})).id
            resources = {
                "trained": ("policy", {"model": "trained", "endpoints": [bench.engine], **policy}),
                "streamed": ("policy", {"model": "streamed", "endpoints": [bench.streams], **policy}),
                "external": ("external", external),
            }
            await store.put_resources(
                [
                    Resource(run_id=self._run_id, name=name, kind=kind, value=value)  # type: ignore[arg-type]
                    for name, (kind, value) in resources.items()
                ]
            )

    async def _claim(self, count: int) -> list[Claim]:
        retry = RetryPolicy(timeout_s=LEASE_S)
        rollouts = [
            NewRollout(run_id=self._run_id, task={}, group_id=str(uuid.uuid4()), retry=retry) for _ in range(count)
        ]
        worker = WorkerStatus(
            id="bench", run_id=self._run_id, host="h", pid=os.getpid(), running=0, seen_ns=time.time_ns()
        )
        async with LightningStoreClient(self.url, KEY) as store:
            await store.enqueue(rollouts)
            claims = await store.claim(worker, limit=count, lease_s=LEASE_S)
        if len(claims) != count:
            sys.exit(f"{count} attempts were asked for, {len(claims)} were had")
        return claims


if __name__ == "__main__":
    main()
