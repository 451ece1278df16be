"""Transactions on Redis: read, compute in Python, and apply where nothing that was read has changed meanwhile.

Driven by the store's methods in store.py. Each is a generator that yields commands to read and gets their replies, and that
lists in its `Transaction` what it checked and what it writes. What callers want at the same time goes together: the reads of
all of them are one round trip each turn, and one script (apply.lua) applies all of it, each transaction wholly or not at
all. One that met a change is computed again.

Every transaction that may not happen twice has a request, whose outcome is written with it: sent again, because the
connection broke or another server was asked, it is answered with that outcome.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from agentlightning.errors import AgentLightningError, InputError, StoreError
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.codec import portions
from agentlightning.store.redis.connection import Command, RedisConnection, Reply
from agentlightning.store.request import REQUEST_KEPT_S, Request, check_same, current_request
from agentlightning.store.rules import refusal

R = TypeVar("R")

Reads = Generator[Sequence[Command], Sequence[Reply], R]
"""A method's way through a transaction: commands to read, their replies, and in the end its result."""
Write = Callable[["Transaction"], Reads[R]]

MAX_GROUP = 1000
"""Most transactions that are applied by one script."""
MAX_GROUP_BYTES = 4 << 20
"""Most bytes of one script, unless one transaction alone writes more: the server does nothing else meanwhile."""


@dataclass(slots=True)
class Group:
    """Transactions that are computed together."""

    size: int
    prefix: str
    """The beginning of every key, for commands that name several."""
    taken: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """By run, the rollouts that claims of this group take."""


class Transaction:
    """The reads and writes of one transaction. Keys are without the store's prefix, and follow the command's name."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.now_ns = 0
        """The store's time, known after the first read."""
        self.checks: list[list[Any]] = []
        self.commands: list[tuple[Any, ...]] = []
        self.notices: dict[str, int] = {}
        self.outcome: Any = msgspec.UNSET

    def read(self, *commands: Command) -> Reads[Sequence[Reply]]:
        """Replies that must be the same when the transaction is applied."""
        replies = yield commands
        for command, reply in zip(commands, replies, strict=True):
            self.check(command, reply)
        return replies

    def check(self, command: Command, reply: Reply) -> None:
        """The transaction is applied only if this command has this reply then (None: there is nothing)."""
        expected = False if reply is None else _word(reply) if isinstance(reply, bytes) else reply
        self.checks.append([*map(_word, command), expected])

    def write(self, *command: Any) -> None:
        self.commands.append(tuple(map(_word, command)))

    def tell(self, about: str, run_id: str, value: int = 0) -> None:
        """Wake those who wait for this topic."""
        self.notices[f"{about} {run_id}"] = value

    def once(self, outcome: R) -> R:
        """The outcome, of lists and scalars, with which the request is answered if it is sent again."""
        self.outcome = outcome
        return outcome

    def require_runs(self, run_ids: Sequence[str]) -> Reads[None]:
        """NotFoundError that names the runs which do not exist, or are being deleted."""
        distinct = sorted(set(run_ids))
        alive = yield from self.read(*[("HGET", f"run:{run_id}", "alive") for run_id in distinct])
        if missing := [run_id for run_id, lives in zip(distinct, alive, strict=True) if lives is None]:
            raise refusal("no_run", ", ".join(missing))


@dataclass(slots=True, eq=False)
class _Work:
    write: Write[Any]
    request: Request | None
    since: float
    """time.monotonic() of its arrival."""
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    steps: Reads[Any] | None = None
    transaction: Transaction | None = None
    result: Any = None
    error: Exception | None = None


def peek(*commands: Command) -> Reads[Sequence[Reply]]:
    """Replies that may be others when the transaction is applied."""
    return (yield commands)


def together(*ways: Reads[Any]) -> Reads[list[Any]]:
    """The results of several ways of reading: in each turn, what they read goes together."""
    results: list[Any] = [None] * len(ways)
    replies: dict[int, Sequence[Reply] | None] = dict.fromkeys(range(len(ways)))
    while replies:
        asked: dict[int, Sequence[Command]] = {}
        for place, given in replies.items():
            try:
                asked[place] = next(ways[place]) if given is None else ways[place].send(given)
            except StopIteration as end:
                results[place] = end.value
        if asked:
            in_order = iter((yield [command for commands in asked.values() for command in commands]))
        replies = {place: [next(in_order) for _ in commands] for place, commands in asked.items()}
    return results


class RedisWriter:
    """Lives in the connection's event loop, until `stop`."""

    def __init__(self, connection: RedisConnection, now_ns: Callable[[], int] | None) -> None:
        self._connection = connection
        self._now_ns = now_ns
        self._works = Coalescer[_Work, Any](self._execute, max_items=MAX_GROUP)
        self._stopping = False
        self._unnamed_s = 2 * connection.address.patience_s + 1
        """Seconds for which a transaction is remembered that has no request: an outage is waited out meanwhile."""
        self.heard: Callable[[float, int], None] | None = None
        """Gets, for every group, the seconds since the first was submitted and how many they were."""

    async def stop(self) -> None:
        """Finish what was accepted; at once, if the server is away."""
        self._stopping = True
        self._connection.hasten()
        await self._works.drain()

    async def submit(self, write: Write[R], part: str = "") -> R:
        """Returns the result of the transaction, or the outcome of the same request. Raises what it refuses with, or
        StoreError. `part`: names one of several transactions of a request."""
        request = current_request()
        work = _Work(write, None if request is None else request.part(part), time.monotonic())
        result: R = await self._connection.at_home(lambda: self._accept(work))
        return result

    async def _accept(self, work: _Work) -> Any:
        if self._stopping:
            raise StoreError("the store is closed; open it first")
        return await self._works.submit(work)

    async def _execute(self, works: Sequence[_Work]) -> Sequence[Any]:
        waiting = list(works)
        while waiting:
            await self._compute(waiting)
            ready = list(_packed_works(waiting, self._unnamed_s))
            waiting = []
            for part in portions(ready, lambda work: len(work[1]), MAX_GROUP_BYTES):
                waiting += await self._apply(part)
        if self.heard is not None:
            self.heard(time.monotonic() - min(work.since for work in works), len(works))
        return [work.result if work.error is None else work.error for work in works]

    async def _compute(self, works: Sequence[_Work]) -> None:
        """Run all to their ends: in each turn, what they read goes together."""
        group = Group(len(works), f"{self._connection.address.tag}:")
        asking: list[tuple[_Work, Sequence[Command]]] = []
        for work in works:
            work.transaction = Transaction(group)
            work.steps = work.write(work.transaction)
            _advance(work, None, asking)
        now_ns = None
        while asking:
            # What several ask alike is asked once: claims of one run, say, look at one queue.
            commands = list(dict.fromkeys(command for _, asked in asking for command in asked))
            if now_ns is None:
                now_ns, replies = await self._connection.query_at(commands, self._now_ns)
                for work in works:
                    assert work.transaction is not None
                    work.transaction.now_ns = now_ns
            else:
                replies = await self._connection.query(commands)
            known = dict(zip(commands, replies, strict=True))
            turn, asking = asking, []
            for work, asked in turn:
                _advance(work, [known[command] for command in asked], asking)

    async def _apply(self, works: Sequence[tuple[_Work, bytes]]) -> list[_Work]:
        """Apply transactions; returns those that met a change."""
        head = b"\xdd" + len(works).to_bytes(4, "big")  # of an array
        replies = await self._connection.apply(b"".join([head, *(each for _, each in works)]))
        changed = []
        for (work, _), (status, *about) in zip(works, replies, strict=True):
            if status == b"changed":
                changed.append(work)
            elif status == b"failed":
                work.error = self._connection.address.explain(Exception(about[0].decode()))
            elif status == b"known":
                digest, recorded, outcome = msgspec.msgpack.decode(about[0])
                try:
                    if work.request is not None:
                        check_same(work.request, digest)
                    work.result = outcome if recorded else work.result
                except AgentLightningError as error:
                    work.error = error
        return changed


def _advance(work: _Work, replies: Sequence[Reply] | None, asking: list[tuple[_Work, Sequence[Command]]]) -> None:
    assert work.steps is not None
    try:
        commands = next(work.steps) if replies is None else work.steps.send(replies)
        while not commands and replies is not None:  # the first turn is for the time, at least
            commands = work.steps.send(())
        asking.append((work, commands))
    except StopIteration as end:
        work.result = end.value
    except Exception as error:  # its submitter gets it; the others go on
        work.error = error


def _packed_works(works: Sequence[_Work], unnamed_s: float) -> Iterator[tuple[_Work, bytes]]:
    """Computed transactions that write or remember something."""
    for work in works:
        transaction = work.transaction
        assert transaction is not None
        recorded = transaction.outcome is not msgspec.UNSET
        if work.error is not None or not (transaction.commands or recorded):
            continue
        name: str | bool = work.key if work.request is None else work.request.key
        if not recorded and work.request is None:
            name = False  # what it does may be done again
        digest, kept_s = (b"", unnamed_s) if work.request is None else (work.request.digest, REQUEST_KEPT_S)
        notices = [f"{about} {value}" for about, value in transaction.notices.items()]
        try:
            outcome = _word(_ENCODER.encode((digest, recorded, transaction.outcome if recorded else None)))
            packed = (name, int(kept_s), outcome, transaction.checks, transaction.commands, notices)
            yield work, _ENCODER.encode(packed)
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            work.error = InputError(f"expected text and numbers: {error}")


def _word(value: Any) -> Any:
    """Numbers travel as text, since Lua has doubles only, and bytes as MessagePack's text, since its library knows no
    others."""
    if isinstance(value, str):
        return value
    return msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value) if isinstance(value, bytes) else str(value)


_ENCODER = msgspec.msgpack.Encoder()
