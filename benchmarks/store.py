"""The stores' operations per second, beside agentlightning 0.3.0 from PyPI doing the same work in the same minutes.

The work: a worker claims a rollout, adds 8 spans of about 1 kB, each by a call of its own, and finishes it; then the next.
Rounds of ours and of theirs alternate, and ratios are of the medians.

    http      8 workers that share a client, over HTTP to a server process: ours over a SQLite file, theirs over its memory
    process   as many workers as a server has to serve at a time, in the process of the store: SQLite on disk, v0.3's memory
    postgres, redis   the same over a real server of this machine, where its programs are installed

Both do the work in whichever way suits them best: one span after the other, or all of a rollout at once. Beside it is
measured what they do where a worker hands over the 8 spans of a rollout in one call (http_lists_over_v03).

Further: how long a claim takes when 1,000,000 rollouts are stored, over the same with 1,000; and the bytes of conversations
of 10 turns, over those of the same conversations with every prompt stored whole. agentlightning 0.3.0 gets a virtual
environment of its own, .venv-agentlightning-v03, at the first run, from store/v03.lock.

    python benchmarks/store.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uuid_utils

from agentlightning.records import Call, Claim, Finish, NewRollout, Sampling, Span, VersionSpan, WorkerStatus
from agentlightning.runtime.children import listen, start_child, stop_child
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.server_keys import KEY_VARIABLE
from agentlightning.store.sql import tables
from peers import install_peer

HERE = Path(__file__).resolve().parent
PEER = HERE / "store" / "v03.py"
LOCK = HERE / "store" / "v03.lock"
V03 = HERE.parent / ".venv-agentlightning-v03"
SERVERS = HERE.parent / "tests" / "store"
KEY = "sk-agl-server-of-the-benchmark"
"""Where the classes are that start a PostgreSQL and a Redis."""

SPANS = [
    {"gen_ai.prompt.0.content": "x" * 400, "gen_ai.completion.0.content": "y" * 400, "prompt_token_ids": "1,2,3"}
    for _ in range(8)
]
WORKERS = 8
SERVED = 32
"""Workers whose requests a server has before it at a time."""
START_S = 90.0
Process = subprocess.Popen[bytes]

SINGLY = ("together", "each")
"""Ways to add spans by a call each: all of a rollout at once, or one after the other."""


@dataclass(frozen=True)
class Effort:
    """The size of a measurement."""

    rounds: int = 5
    http: int = 1500
    """Rollouts of a round over HTTP; 0.3.0 gets a tenth."""
    process: int = 3000
    """Rollouts of a round in the process of the store; 0.3.0 gets a third."""
    stored: int = 1_000_000
    claims: int = 400
    warm: bool = True
    """A round of each first, which does not count."""
    conversations: int = 200


QUICK = Effort(rounds=1, http=100, process=200, stored=20_000, claims=40, conversations=10, warm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a look at whether it runs: short rounds, nothing installed"
    )
    quick = parser.parse_args().quick
    if not quick:
        install_peer("agentlightning 0.3.0", V03, LOCK)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    effort = QUICK if quick else Effort()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder), stack, effort)
        figures = bench.over_http() | bench.in_process() | bench.on_servers()
        figures |= {
            "claim_1m_over_1k": asyncio.run(bench.claims()),
            "bytes_over_whole_prompts": asyncio.run(bench.bytes()),
        }
    print(json.dumps(figures))


class Bench:
    """A folder, and processes that end with `stack`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, effort: Effort) -> None:
        self._folder = folder
        self._stack = stack
        self._effort = effort
        self._peer = V03 / "bin" / "python"
        self._worker: Process | None = None
        if not self._peer.exists():
            print(f"v0.3: left out, since {V03.name} is not there; a run without --quick installs it")

    def over_http(self) -> dict[str, float | None]:
        """8 workers and a server process."""
        url = self._start_server(f"sqlite:///{self._new_file()}")
        theirs = self._start_peer()
        ours: dict[str, Callable[[], float]] = {
            f"ours http {way}": lambda way=way: asyncio.run(self._work(url, way, self._effort.http, WORKERS))
            for way in (*SINGLY, "many")
        }
        peers: dict[str, Callable[[], float]] = {
            f"v0.3 http {way}": lambda way=way: self._peer_work(way, theirs, self._effort.http // 10, WORKERS)
            for way in ((*SINGLY, "many") if theirs else ())
        }
        rates = self._rounds(ours | peers)
        return {
            "http_spans_over_v03": self._over(rates, SINGLY, "ours http", "v0.3 http"),
            "http_lists_over_v03": self._over(rates, ("many",), "ours http", "v0.3 http"),
        }

    def in_process(self) -> dict[str, float | None]:
        """The store in the process of its workers."""
        ours: dict[str, Callable[[], float]] = {
            f"ours sqlite {way}": lambda way=way: self._fresh(f"sqlite:///{self._new_file()}", way)
            for way in ("together", "many")
        }
        peers: dict[str, Callable[[], float]] = {
            f"v0.3 memory {way}": lambda way=way, workers=workers: self._peer_work(
                way, "memory", self._effort.process // 3, workers
            )
            for way, workers in (("together", SERVED), ("each", 1), ("many", 1))
            if self._peer.exists()
        }
        rates = self._rounds(ours | peers)
        return {
            "sqlite_spans_over_v03_memory": self._over(rates, SINGLY, "ours sqlite", "v0.3 memory"),
            "sqlite_lists_over_v03_memory": self._over(rates, ("many",), "ours sqlite", "v0.3 memory"),
        }

    def on_servers(self) -> dict[str, float | None]:
        """The store in the process of its workers, over a database server."""
        figures: dict[str, float | None] = {}
        for name, open_server in (("postgres", self._postgres), ("redis", self._redis)):
            figures[f"{name}_spans_per_s"] = None
            try:
                url = open_server()
            except (ImportError, OSError) as reason:
                print(f"{name}: left out: {reason}")
                continue
            contestant = {f"ours {name} together": lambda url=url: self._fresh(url(), "together")}
            seen = self._rounds(contestant)
            figures[f"{name}_spans_per_s"] = round(seen[f"ours {name} together"], 1)
        return figures

    async def claims(self) -> float:
        """The median time of a claim with many rollouts stored, over that with few."""
        few, many = f"sqlite:///{self._new_file()}", f"sqlite:///{self._new_file()}"
        took: dict[str, list[float]] = {few: [], many: []}
        async with contextlib.AsyncExitStack() as stack:
            claiming = {}
            for url, stored in ((few, 1000), (many, self._effort.stored)):
                run_id = await self._fill(url, stored)
                store = await stack.enter_async_context(open_store(url))
                claiming[url] = (store, a_worker(run_id, 0))
            for number in range(self._effort.claims):
                for url in (few, many) if number % 2 else (many, few):
                    store, worker = claiming[url]
                    began = time.perf_counter()
                    [claim] = await store.claim(worker)
                    took[url].append(time.perf_counter() - began)
                    await store.finish([Finish(lease=claim.lease, state="succeeded")])
        small, large = (1000 * statistics.median(took[url]) for url in (few, many))
        print(f"claim    {small:.3f} ms with 1,000 rollouts stored, {large:.3f} ms with {self._effort.stored:,}")
        return round(large / small, 3)

    async def bytes(self) -> float:
        """The size of conversations of 10 turns, over theirs with every prompt stored whole."""
        sizes = []
        for whole in (False, True):
            file = self._new_file()
            async with open_store(f"sqlite:///{file}") as store:
                run_id = await enqueued(store, self._effort.conversations)
                before = compact_size(file)
                for number, claim in enumerate(
                    await store.claim(a_worker(run_id, 0), limit=self._effort.conversations)
                ):
                    await store.append_calls(conversation(claim, number, whole))
            sizes.append((compact_size(file) - before) / self._effort.conversations)
        print(f"bytes    {sizes[0]:,.0f} a conversation of 10 turns, {sizes[1]:,.0f} with every prompt whole")
        return round(sizes[0] / sizes[1], 3)

    # --- how ------------------------------------------------------------------------------------------------------

    def _rounds(self, contestants: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Spans per second of each, in the middle of the rounds."""
        seen: dict[str, list[float]] = {name: [] for name in contestants}
        for work in contestants.values():
            if self._effort.warm:
                work()
        for _ in range(self._effort.rounds):
            for name, work in contestants.items():
                seen[name].append(work())
        for name, rates in seen.items():
            spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
            print(f"{name:<24} {statistics.median(rates):8,.0f} spans/s ({spread})", flush=True)
        return {name: statistics.median(rates) for name, rates in seen.items()}

    @staticmethod
    def _over(rates: dict[str, float], ways: tuple[str, ...], ours: str, theirs: str) -> float | None:
        """The best of ours over the best of theirs."""
        best = [max(rates.get(f"{who} {way}", 0.0) for way in ways) for who in (ours, theirs)]
        return round(best[0] / best[1], 2) if best[1] else None

    async def _work(self, url: str, way: str, count: int, workers: int) -> float:
        """Spans per second of our store."""
        async with open_store(url, KEY) as store:
            run_id = await enqueued(store, count)
            began = time.perf_counter()
            done = await asyncio.gather(*[work(store, a_worker(run_id, number), way) for number in range(workers)])
            seconds = time.perf_counter() - began
            finished = (await store.count(run_id)).get(("train", "succeeded"), 0)
            if sum(done) != count or finished != count:
                sys.exit(f"{url}: {count} rollouts were enqueued, {sum(done)} were claimed, {finished} finished")
            some = await store.rollouts(RolloutQuery(run_id=run_id, limit=3))
            if len(await store.spans([rollout.id for rollout in some])) != len(some) * len(SPANS):
                sys.exit(f"{url}: not every span was stored")
        return count * len(SPANS) / seconds

    def _fresh(self, url: str, way: str) -> float:
        return asyncio.run(self._work(url, way, self._effort.process, SERVED))

    def _peer_work(self, way: str, url: str, count: int, workers: int) -> float:
        """Spans per second of v0.3."""
        if self._worker is None:
            self._worker = self._start_v03("work")
        assert self._worker.stdin is not None
        given = {"way": way, "url": url, "count": count, "workers": workers, "attributes": SPANS}
        self._worker.stdin.write(json.dumps(given).encode() + b"\n")
        self._worker.stdin.flush()
        return count * len(SPANS) / float(self._next_line(self._worker))

    def _start_v03(self, *arguments: str) -> Process:
        with (self._folder / "v03.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self._peer), str(PEER), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=peer_environment(),
            )
        self._stack.callback(stop_child, process)
        return process

    def _next_line(self, process: Process) -> str:
        """Returns v0.3's next line that is a number or `ready`; its libraries print too."""
        assert process.stdout is not None
        for line in process.stdout:
            if re.fullmatch(rb"ready|[0-9.e-]+", line.strip()):
                return line.decode().strip()
        sys.exit(f"v0.3 ended: {(self._folder / 'v03.log').read_text()[-2000:]}")

    def _start_server(self, store_url: str) -> str:
        listener = listen("127.0.0.1", 0)
        process = start_child(
            ["agentlightning.gateway", "--store", store_url, "--fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            secrets={KEY_VARIABLE: KEY},
            env={"AGL_LOG_LEVEL": "warning"},
            log=self._folder / "server.log",
        )
        self._stack.callback(stop_child, process)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        return url

    def _start_peer(self) -> str:
        """The address of v0.3's server; empty where it is not installed."""
        if not self._peer.exists():
            return ""
        with listen("127.0.0.1", 0) as probe:
            port = probe.getsockname()[1]
        self._next_line(self._start_v03("serve", str(port)))
        return f"http://127.0.0.1:{port}"

    def _postgres(self) -> Callable[[], str]:
        sys.path.insert(0, str(SERVERS))
        from postgres_server import PostgresServer

        return self._stack.enter_context(PostgresServer()).url

    def _redis(self) -> Callable[[], str]:
        sys.path.insert(0, str(SERVERS))
        from redis_server import RedisServer

        return self._stack.enter_context(RedisServer()).url

    async def _fill(self, url: str, stored: int) -> str:
        """A store with so many rollouts, half of them queued and the others finished; the id of their run."""
        async with open_store(url) as store:
            run_id = await enqueued(store, 2)
            [claim] = await store.claim(a_worker(run_id, 0))
            await store.finish([Finish(lease=claim.lease, state="succeeded")])
        names = [column.name for column in tables.rollouts.columns]
        fresh = "?1 || printf('%012x', number)"  # a UUID that is later than those of the rows before
        changed = {"id": fresh, "group_id": fresh, "finished_seq": "finished_seq + number"}
        chosen = ", ".join(changed.get(name, name) for name in names)
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
            for state, count in (("succeeded", stored // 2 - 1), ("queued", stored // 2 - 1)):
                database.execute(
                    f"WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers LIMIT ?2) "
                    f"INSERT INTO rollouts ({', '.join(names)}) SELECT {chosen} FROM numbers, "
                    f"(SELECT * FROM rollouts WHERE state = ?3 LIMIT 1)",
                    (str(uuid_utils.uuid7())[:24], count, state),
                )
            database.execute(
                "INSERT INTO attempts SELECT " + attempt_columns() + " FROM rollouts WHERE state = 'succeeded' "
                "AND NOT EXISTS (SELECT 1 FROM attempts WHERE rollout_id = rollouts.id)"
            )
            database.execute("UPDATE runs SET finished = (SELECT max(finished_seq) FROM rollouts)")
            database.commit()
        return run_id

    def _new_file(self) -> Path:
        return self._folder / f"{uuid.uuid4().hex}.db"


# --- the work -----------------------------------------------------------------------------------------------------------


async def work(store: LightningStore, worker: WorkerStatus, way: str) -> int:
    """Claim, add spans and finish until nothing is queued; how many rollouts it were."""
    done = 0
    while claims := await store.claim(worker):
        spans = [a_span(claims[0], attributes) for attributes in SPANS]
        if way == "each":
            for span in spans:
                await store.append_spans([span])
        elif way == "together":
            await asyncio.gather(*[store.append_spans([span]) for span in spans])
        else:
            await store.append_spans(spans)
        await store.finish([Finish(lease=claims[0].lease, state="succeeded")])
        done += 1
    return done


async def enqueued(store: LightningStore, count: int) -> str:
    """The id of a new run with so many rollouts."""
    run_id = (await store.create_run("benchmark", {})).id
    for start in range(0, count, 1000):
        numbers = range(start, min(count, start + 1000))
        await store.enqueue([NewRollout(run_id=run_id, task={"number": n}, group_id=str(n)) for n in numbers])
    return run_id


def a_worker(run_id: str, number: int) -> WorkerStatus:
    return WorkerStatus(id=f"w{number}", run_id=run_id, host="h", pid=os.getpid(), running=0, seen_ns=time.time_ns())


def a_span(claim: Claim, attributes: dict[str, Any]) -> Span:
    now_ns = time.time_ns()
    return Span(
        id=str(uuid_utils.uuid7()),
        run_id=claim.rollout.run_id,
        rollout_id=claim.rollout.id,
        attempt=claim.lease.attempt,
        name="openai.chat.completion",
        attributes=attributes,
        started_ns=now_ns,
        finished_ns=now_ns,
    )


# --- conversations ------------------------------------------------------------------------------------------------------

TURNS = 10
FIRST_IDS, NEXT_IDS, SAMPLED_IDS = 700, 150, 150
"""Tokens of the first prompt, of what each later turn brings (a tool's result), and of an answer."""
CHARACTERS_A_TOKEN = 4


def conversation(claim: Claim, seed: int, whole: bool) -> list[Call]:
    """The calls of 10 turns, each stored by what its parent did not have, or by its whole prompt."""
    draw = random.Random(seed)
    calls: list[Call] = []
    ids: list[int] = []
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        new_ids = [draw.randrange(150_000) for _ in range(NEXT_IDS if turn else FIRST_IDS)]
        new_messages = [{"role": "tool" if turn else "user", "content": text(draw, len(new_ids))}]
        sampled = [draw.randrange(150_000) for _ in range(SAMPLED_IDS)]
        answer = {"role": "assistant", "content": text(draw, SAMPLED_IDS)}
        ids, messages = ids + new_ids, messages + new_messages
        call = Call(
            id=str(uuid_utils.uuid7()),
            run_id=claim.rollout.run_id,
            rollout_id=claim.rollout.id,
            attempt=claim.lease.attempt,
            parent_id=None if whole or not calls else calls[-1].id,
            suffix_ids=ids if whole else new_ids,
            sampled_ids=sampled,
            logprobs=[-draw.expovariate(1.0) for _ in sampled],
            versions=[VersionSpan(version=1, start=0, end=len(sampled))],
            prompt_tokens=len(ids),
            policy="policy",
            model="policy",
            protocol="chat",
            sampling=Sampling(),
            history_hash=f"{draw.getrandbits(256):064x}",
            request_hash=f"{draw.getrandbits(256):064x}",
            messages=messages if whole else new_messages,
            completion=answer,
            started_ns=time.time_ns(),
            finished_ns=time.time_ns(),
        )
        calls.append(call)
        ids, messages = ids + sampled, [*messages, answer]
    return calls


def text(draw: random.Random, tokens: int) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz   ", k=CHARACTERS_A_TOKEN * tokens))


def compact_size(file: Path) -> int:
    """Bytes of a SQLite file without free pages."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


def attempt_columns() -> str:
    """The one finished attempt of each rollout, from columns of rollouts."""
    known = {"rollout_id": "id", "attempt": "1", "state": "'succeeded'", "worker_id": "'w'", "token": "'t'"}
    known |= {"lease_expires_ns": "1", "started_ns": "1", "finished_ns": "2"}
    return ", ".join(known.get(column.name, "NULL") for column in tables.attempts.columns)


# --- agentlightning 0.3.0 -----------------------------------------------------------------------------------------------


def peer_environment() -> dict[str, str]:
    """Without our package on its path, and without asking the network for prices of models."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_API_KEY": ""}


if __name__ == "__main__":
    main()
