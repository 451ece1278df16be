"""A large store for benchmarks/console.py, made in minutes: rows as the store would have written them, in bulk.

Several runs, of which the first has six tenths of the rollouts; five calls a rollout in the middle, and some rollouts of 64
calls with a reward and two spans each. Rewards grow with the step; names of agents, tasks and failures are a few of each.
Everything is drawn from one seed.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table

from agentlightning.records import Attempt, Call, RetryPolicy, Reward, Rollout, Sampling, Span, VersionSpan
from agentlightning.store import codec
from agentlightning.store.sql import tables
from agentlightning.store.summaries import SUMMARIES, RolloutSummary, task_key, title_of

SHARES = (0.6, 0.2, 0.1, 0.09, 0.01)
"""Of the rollouts, by run."""
STEPS = 1000
TASKS = 5000
LONG_CALLS = 64
LONG_ROLLOUTS = 100
PORTION = 2000
"""Rollouts that are written at a time."""
START_NS = 1_800_000_000 * 10**9
WORDS = (
    "order",
    "invoice",
    "refund",
    "city",
    "staff",
    "query",
    "table",
    "delay",
    "carrier",
    "budget",
    "claim",
    "price",
)
FAILURES = ("TimeoutError: the tool did not answer", "KeyError: 'total'", "the attempt took longer than it may")
AGENTS = ([], [], ["writer"], ["reader", "writer"], ["planner", "reader", "writer"])

_ATTEMPTS = codec.RecordCodec(Attempt)
_KINDS: dict[Table, Any] = {
    tables.rollouts: codec.ROLLOUTS,
    tables.rollout_summaries: SUMMARIES,
    tables.attempts: _ATTEMPTS,
    tables.calls: codec.CALLS,
    tables.rewards: codec.REWARDS,
    tables.spans: codec.SPANS,
}
"""In an order in which every row refers to earlier ones."""

Rows = dict[Table, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Filled:
    """Ids of what is in a filled store."""

    runs: list[str]
    long: list[str]
    """Rollouts of 64 calls, of the first run."""
    calls: int


def fill(url: str, runs: list[str], rollouts: int) -> Filled:
    """Write so many rollouts into the empty runs of an open store, which nobody else uses meanwhile."""
    writer = _postgres(url) if url.startswith("postgresql") else _sqlite(url)
    long: list[str] = []
    calls = 0
    with writer as write:
        for number, (run_id, share) in enumerate(zip(runs, SHARES, strict=True)):
            source = _Source(run_id, number, int(rollouts * share))
            for rows in source.portions():
                calls += len(rows[tables.calls])
                write(rows)
            long += source.long if number == 0 else []
    return Filled(runs, long, calls)


class _Source:
    """The rows of one run."""

    def __init__(self, run_id: str, number: int, count: int) -> None:
        self._run_id = run_id
        self._number = number
        self._count = count
        self._draw = random.Random(number)
        self._calls = 0
        self.long: list[str] = []
        self._tasks = [
            {"question": " ".join(self._draw.choices(WORDS, k=12)), "answer": n} for n in range(min(TASKS, count))
        ]
        self._templates = {length: codec.CALLS.row(_call(self._draw, length)) for length in (1, 8)}

    def portions(self) -> Iterator[Rows]:
        every = max(1, self._count // LONG_ROLLOUTS)
        for start in range(0, self._count, PORTION):
            rows: Rows = defaultdict(list)
            for place in range(start, min(self._count, start + PORTION)):
                self._add(rows, place, place % every == every - 1)
            yield rows

    def _add(self, rows: Rows, place: int, long: bool) -> None:
        draw, rollout_id = self._draw, _uuid(self._number, place)
        step = place * STEPS // self._count
        turns = LONG_CALLS if long else min(1 + int(draw.expovariate(0.23)), 40)
        failed = draw.random() < 0.02
        reward = None if failed else round(min(1.0, max(0.0, draw.gauss(0.3 + 0.5 * step / STEPS, 0.25))), 4)
        task = self._tasks[draw.randrange(len(self._tasks))]
        agents = AGENTS[draw.randrange(len(AGENTS))]
        seconds = round(draw.expovariate(0.1), 3)
        created = START_NS + (self._number * self._count + place) * 10**8
        ended = created + int(seconds * 1e9)
        error = FAILURES[draw.randrange(len(FAILURES))] if failed else None
        state = "failed" if failed else "succeeded"
        shared: dict[str, Any] = {
            "run_id": self._run_id,
            "group_id": f"step-{step:06d}/{place // 8}",
            "replica": place % 8,
            "mode": "train" if place % 20 else "eval",
            "step": step,
            "state": state,
            "lost": 0,
            "created_ns": created,
            "finished_ns": ended,
            "finished_seq": place + 1,
            "reward": reward,
        }
        rollout = Rollout(
            id=rollout_id,
            task=task,
            sampling=Sampling(),
            retry=RetryPolicy(),
            priority=0,
            attempt=1,
            started_ns=created,
            calls=turns,
            error=error,
            **shared,
        )
        rows[tables.rollouts].append(codec.ROLLOUTS.row(rollout)[:-1])
        attempt = Attempt(
            rollout_id=rollout_id,
            attempt=1,
            state=state,  # type: ignore[arg-type]
            worker_id="w",
            lease_expires_ns=ended,
            started_ns=created,
            finished_ns=ended,
        )
        rows[tables.attempts].append((*_ATTEMPTS.row(attempt), "token"))
        prompt = self._add_calls(rows, rollout_id, turns, agents, 8 if long else 1)
        if reward is not None:
            rows[tables.rewards].append(codec.REWARDS.row(_reward(self._run_id, rollout_id, reward)))
        if long:
            self._add_records(rows, rollout_id, turns)
        summary = RolloutSummary(
            id=rollout_id,
            task_key=task_key(task),
            title=title_of(task),
            turns=turns,
            prompt_tokens=prompt,
            sampled_tokens=turns * draw.randrange(8, 400),
            forks=int(draw.random() < 0.05),
            agents=agents,
            attempts=1,
            refused=failed and draw.random() < 0.1,
            cause="agent" if failed else "policy",
            failure=error,
            outcome=None if shared["mode"] == "eval" else "invalid" if failed else "trained",
            duration_s=seconds,
            **shared,
        )
        rows[tables.rollout_summaries].append(SUMMARIES.row(summary))

    def _add_calls(self, rows: Rows, rollout_id: str, turns: int, agents: list[str], length: int) -> int:
        template, named = self._templates[length], codec.CALLS.names
        parent, prompt = None, 0
        for turn in range(turns):
            self._calls += 1
            call_id = _uuid(16 + self._number, self._calls)
            prompt += 40 * length
            changed = {
                "id": call_id,
                "run_id": self._run_id,
                "rollout_id": rollout_id,
                "parent_id": parent,
                "prompt_tokens": prompt,
                "agent": agents[turn % len(agents)] if agents else None,
                "finished_ns": START_NS + self._calls,
            }
            rows[tables.calls].append(
                tuple(changed.get(name, value) for name, value in zip(named, template, strict=True))
            )
            parent = call_id
        return prompt

    def _add_records(self, rows: Rows, rollout_id: str, turns: int) -> None:
        self.long.append(rollout_id)
        for row in rows[tables.calls][-turns:]:
            rows[tables.rewards].append(codec.REWARDS.row(_reward(self._run_id, rollout_id, 0.5, row[0])))
            for number in range(2):
                span = Span(
                    id=f"{row[0]}.{number}",
                    run_id=self._run_id,
                    rollout_id=rollout_id,
                    attempt=1,
                    name="tool",
                    attributes={"gen_ai.tool.name": "search", "result": "x" * 400},
                    started_ns=START_NS + number,
                    finished_ns=START_NS + number + 1,
                )
                rows[tables.spans].append(codec.SPANS.row(span))


def _uuid(high: int, low: int) -> str:
    """Ids that sort as those of the store do."""
    return f"0199{high:04x}-{low >> 16:04x}-7{low >> 4 & 0xFFF:03x}-8{low & 0xF:03x}-{high << 32 | low:012x}"


def _reward(run_id: str, rollout_id: str, value: float, call_id: str | None = None) -> Reward:
    place = {"run_id": run_id, "rollout_id": rollout_id, "attempt": 1}
    return Reward(
        id=f"{call_id or rollout_id}.r", value=value, call_id=call_id, source="function", created_ns=1, **place
    )


def _call(draw: random.Random, length: int) -> Call:
    """A call whose texts and tokens are so many times those of a short one."""
    suffix, sampled = [[draw.randrange(150_000) for _ in range(count * length)] for count in (24, 16)]
    said = [" ".join(draw.choices(WORDS, k=count * length)) for count in (12, 8)]
    return Call(
        id="",
        run_id="",
        rollout_id="",
        attempt=1,
        parent_id=None,
        suffix_ids=suffix,
        sampled_ids=sampled,
        logprobs=[-draw.expovariate(1.0) for _ in sampled],
        versions=[VersionSpan(version=1, start=0, end=len(sampled))],
        prompt_tokens=0,
        policy="default",
        model="default",
        protocol="chat",
        sampling=Sampling(),
        history_hash=f"{draw.getrandbits(128):032x}",
        request_hash=f"{draw.getrandbits(128):032x}",
        messages=[{"role": "user", "content": said[0]}],
        completion={"role": "assistant", "content": said[1]},
        started_ns=START_NS,
    )


def _columns(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.name != "seq"]


@contextlib.contextmanager
def _sqlite(url: str) -> Iterator[Any]:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as database:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -400000"):
            database.execute(f"PRAGMA {pragma}")

        def write(rows: Rows) -> None:
            database.execute("BEGIN")
            for table in _KINDS:
                names = _columns(table)
                marks = ", ".join("?" * len(names))
                database.executemany(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({marks})", rows[table])
            database.execute("COMMIT")

        yield write
        database.execute("UPDATE runs SET finished = (SELECT count(*) FROM rollout_summaries WHERE run_id = runs.id)")
        database.execute("PRAGMA journal_mode = WAL")


@contextlib.contextmanager
def _postgres(url: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as database:
        database.execute("SET session_replication_role = replica")  # the rows are right: nobody has to look for parents

        def write(rows: Rows) -> None:
            with database.transaction(), database.cursor() as cursor:
                for table in _KINDS:
                    with cursor.copy(f"COPY {table.name} ({', '.join(_columns(table))}) FROM STDIN") as copy:
                        for row in rows[table]:
                            copy.write_row(row)

        yield write
        database.execute("UPDATE runs SET finished = (SELECT count(*) FROM rollout_summaries WHERE run_id = runs.id)")
        database.execute("VACUUM ANALYZE")  # as the server does by itself, sooner or later
