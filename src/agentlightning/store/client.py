"""LightningStoreClient: the store over HTTP, for everybody who does not own it.

Driven by workers and trainers; the other side is gateway/store_rpc.py. One request per method, its response decoded, errors
raised again as the classes they were. Knows nothing of what the methods mean, loads no database and no web server.

What coroutines append or finish at the same time travels as one request (coalescer.py). A server that is away is waited for,
and a request whose connection broke is sent again under the same key (http_transport.py): the store has recorded what it did
for that key, so any server of it answers as the first did (requests.py).
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import orjson
import uuid_utils

from agentlightning.errors import ConfigError, StoreError
from agentlightning.records import Call, Finish, Metric, Reward, Span
from agentlightning.store import codec, wire
from agentlightning.store.audit import AUDITED, current_request, declared_actor
from agentlightning.store.base import LightningStore
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.http_transport import RETRY_TIMEOUT_S, HttpTransport, StoreResponse
from agentlightning.store.rules import reward_number

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

READING = frozenset(
    {
        "attempts",
        "audit",
        "calls",
        "checkpoints",
        "count",
        "files",
        "find_token",
        "follow_metrics",
        "metrics",
        "resources",
    }
    | {"rewards", "rollouts", "runs", "series", "signing_secret", "sizes", "spans", "statistics", "steps"}
    | {"aliases", "models", "summaries", "tokens", "wait", "wait_aliases", "wait_resources", "workers"}
)
"""Methods that change nothing: sent again without further ado."""
LONG_WORK_S = 3600.0
"""Seconds beyond a usual response's for methods that go through all data of a run."""

MAX_COALESCED_BYTES = 64 * 1024
"""Bytes of a request that travels with others; larger ones go alone, so that nobody waits for them."""
MAX_COALESCED_WRITES = 1000
LATE_S = 2.0
"""Seconds that writes wait for a request that hangs, until they are sent beside it."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of writes that travel together; a single append may be larger."""


def _request(method: F, wait: str = "", wait_s: float = 0.0) -> F:
    """The method as one request: its arguments by name. `wait`: the one that says how long the server is asked to wait;
    `wait_s`: how long it may take beyond a usual response's time."""
    signature = inspect.signature(method)

    @functools.wraps(method, updated=())  # not the mark of an abstract method
    async def call(client: LightningStoreClient, *args: Any, **named: Any) -> Any:
        given = signature.bind(client, *args, **named)
        given.apply_defaults()
        _, *arguments = given.arguments.items()
        return await client._call(method.__name__, dict(arguments), given.arguments.get(wait, wait_s))

    return cast(F, call)


class LightningStoreClient(LightningStore):
    """The store of the server at `url` (``http://host:port``), which wants its key unless it serves loopback only."""

    def __init__(
        self,
        url: str,
        server_key: str | None = None,
        *,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        compress: bool | None = None,
    ) -> None:
        """`retry_timeout_s`: how long the server may be away (half a minute at most before its first response). `compress`:
        whether large bodies are compressed; None: where the server does not seem to be on this network."""
        self._url = url.rstrip("/")
        self._transport = HttpTransport(self._url, server_key, retry_timeout_s, compress)
        self._writes: Coalescer[_Write, StoreResponse] = Coalescer(
            self._deliver, max_items=MAX_COALESCED_WRITES, max_size=MAX_BATCH_BYTES, size=len, late_s=LATE_S
        )

    @property
    def boots(self) -> frozenset[str]:
        """Ids of the starts of servers that have answered: one more means that a server was restarted, or that a gateway
        answered for the first time where several share the address."""
        return self._transport.boots

    async def open(self) -> None:
        await self._transport.open()

    async def close(self) -> None:
        await self._writes.close(StoreError("the store was closed while this was being sent"))
        await self._transport.close()

    async def signing_secret(self) -> bytes:
        response = await self._transport.request("signing_secret", b"")
        if response.error is not None:
            raise response.error
        return base64.b64decode(orjson.loads(response.content)["secret"])

    # --- runs -----------------------------------------------------------------------------------------------------

    create_run = _request(LightningStore.create_run)
    update_run = _request(LightningStore.update_run)
    runs = _request(LightningStore.runs)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    enqueue = _request(LightningStore.enqueue)
    claim = _request(LightningStore.claim, wait="wait_s")
    heartbeat = _request(LightningStore.heartbeat)

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        return list(await self._append("finish", "finishes", [_storable(finish) for finish in finishes]) or ())

    open_session = _request(LightningStore.open_session)
    cancel = _request(LightningStore.cancel)
    expire_leases = _request(LightningStore.expire_leases)
    rollouts = _request(LightningStore.rollouts)
    summaries = _request(LightningStore.summaries)
    count = _request(LightningStore.count)
    attempts = _request(LightningStore.attempts)
    wait = _request(LightningStore.wait, wait="timeout_s")
    workers = _request(LightningStore.workers)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", "calls", calls)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", "spans", spans)

    put_files = _request(LightningStore.put_files)
    files = _request(LightningStore.files)
    mark_delivered = _request(LightningStore.mark_delivered)
    calls = _request(LightningStore.calls)
    spans = _request(LightningStore.spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        for reward in rewards:
            reward_number(reward.value, reward.name)
        await self._append("record_rewards", "rewards", rewards)

    record_feedback = _request(LightningStore.record_feedback)
    rewards = _request(LightningStore.rewards)
    put_resources = _request(LightningStore.put_resources)
    resources = _request(LightningStore.resources)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", "metrics", metrics)

    metrics = _request(LightningStore.metrics)
    series = _request(LightningStore.series)

    # --- waiting and statistics --------------------------------------------------------------------------------------

    wait_resources = _request(LightningStore.wait_resources, wait="timeout_s")
    follow_metrics = _request(LightningStore.follow_metrics, wait="timeout_s")
    statistics = _request(LightningStore.statistics)
    sizes = _request(LightningStore.sizes, wait_s=LONG_WORK_S)

    # --- the end of data ----------------------------------------------------------------------------------------------

    drop_records = _request(LightningStore.drop_records, wait_s=LONG_WORK_S)
    delete_runs = _request(LightningStore.delete_runs, wait_s=LONG_WORK_S)

    # --- access -----------------------------------------------------------------------------------------------------

    create_token = _request(LightningStore.create_token)
    tokens = _request(LightningStore.tokens)
    find_token = _request(LightningStore.find_token)
    revoke_token = _request(LightningStore.revoke_token)
    audit = _request(LightningStore.audit)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    open_step = _request(LightningStore.open_step)
    close_step = _request(LightningStore.close_step)
    steps = _request(LightningStore.steps)
    reopen_steps = _request(LightningStore.reopen_steps)
    put_checkpoint = _request(LightningStore.put_checkpoint)
    checkpoints = _request(LightningStore.checkpoints)
    record_credit = _request(LightningStore.record_credit)
    credit = _request(LightningStore.credit)
    drop_credit = _request(LightningStore.drop_credit)

    # --- models ---------------------------------------------------------------------------------------------------

    put_model = _request(LightningStore.put_model)
    models = _request(LightningStore.models)
    put_alias = _request(LightningStore.put_alias)
    aliases = _request(LightningStore.aliases)
    wait_aliases = _request(LightningStore.wait_aliases, wait="timeout_s")

    # --- how ------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, arguments: dict[str, Any], wait_s: float) -> Any:
        """Sends the request and returns its result."""
        body = wire.encode(arguments, method)
        actor = declared_actor() if method in AUDITED or method == "create_run" else None
        if method in READING:
            response = await self._transport.request(method, body, wait_s=wait_s)
        elif actor is not None or current_request() is not None or wait_s or len(body) > MAX_COALESCED_BYTES:
            # On its own: what travels together is of one actor.
            response = await self._transport.request(method, body, key=_key(), wait_s=wait_s, actor=actor)
        else:
            response = await self._writes.submit(_Write(method, body))
        return self._result(method, response)

    async def _append(self, method: str, name: str, records: Sequence[Any]) -> Sequence[bool] | None:
        """Sends records, in the argument of this name, together with those of whoever sends at the same time."""
        if not records:
            return []
        encoded = [wire.encode_record(record, name) for record in records]
        if current_request() is not None:
            alone = _packed([_Write(method, b"", name, records, encoded)])
            return cast(Sequence[bool] | None, self._result(method, await self._transport.request(*alone, key=_key())))
        response = await self._writes.submit(_Write(method, b"", name, records, encoded))
        return cast(Sequence[bool] | None, self._result(method, response))

    async def _deliver(self, writes: list[_Write]) -> Sequence[StoreResponse]:
        """Sends writes as one request; the appends of one method are one of its entries."""
        groups: dict[Any, list[_Write]] = defaultdict(list)
        for write in writes:
            groups[write.method if write.records else write].append(write)
        found: dict[_Write, StoreResponse] = {}
        whole = await self._transport.send([_packed(group) for group in groups.values()])
        for group, response in zip(groups.values(), whole, strict=True):
            found.update(zip(group, await self._responses(group, response), strict=True))
        return [found[write] for write in writes]

    async def _responses(self, group: list[_Write], response: StoreResponse) -> Sequence[StoreResponse]:
        """The response to each of a group that was executed as a whole, so that only those that are at fault fail.

        Where the server refuses the whole its halves are sent on their own, one after the other: children follow parents.
        """
        if response.error is not None:
            if len(group) == 1 or type(response.error) in (StoreError, ConfigError):  # nobody's in particular
                return [response._replace(error=copy.copy(response.error)) for _ in group]
            found: list[StoreResponse] = []
            for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                [again] = await self._transport.send([_packed(half)])
                found += await self._responses(half, again)
            return found
        if group[0].method != "finish":
            return [response] * len(group)
        finishes = [finish for write in group for finish in write.records]
        held = self._result("finish", response)
        if len(held) != len(finishes):
            raise StoreError(f"{self._url}/api/finish: expected {len(finishes)} results, got {len(held)}")
        in_order = iter(held)
        return [
            response._replace(content=wire.encode([next(in_order) for _ in write.records], "finish")) for write in group
        ]

    def _result(self, method: str, response: StoreResponse) -> Any:
        if response.error is not None:
            raise response.error
        try:
            return wire.decode_result(method, response.content)
        except ValueError as error:
            raise StoreError(f"{self._url}/api/{method}: unexpected response: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """One caller's write: the arguments of its request, or records to append in the argument of some name."""

    method: str
    arguments: bytes
    name: str = ""
    records: Sequence[Any] = ()
    encoded: Sequence[bytes] = ()

    def __len__(self) -> int:
        """Bytes."""
        return len(self.arguments) + sum(map(len, self.encoded))


def _key() -> str:
    """Names a request: that of the request for which this is called, where a further server asks."""
    request = current_request()
    return str(uuid_utils.uuid7()) if request is None else request.key


def _packed(group: Sequence[_Write]) -> tuple[str, bytes]:
    first = group[0]
    if not first.records:
        return first.method, first.arguments
    return first.method, wire.encode(
        {first.name: [msgspec.Raw(each) for write in group for each in write.encoded]}, first.name
    )


def _storable(finish: Finish) -> Finish:
    """Encodes a finish: what a program printed may hold halves of characters, which must arrive."""
    error, output, diagnosis = (codec.text(each) for each in (finish.error, finish.output, finish.diagnosis))
    return dataclasses.replace(finish, error=error, output=output, diagnosis=diagnosis)
