"""LightningStoreClient: the store over HTTP, for everybody who does not own it.

One request per method, errors raised as the classes they were; the other side is gateway/store_rpc.py. What coroutines
write at the same time travels as one request (coalescer.py). A request whose connection broke is sent again until the retry
timeout has passed, since a server that is restarted comes back on its port. Each write carries a key, under which the store
records what it did (request.py): once, whichever server is asked. Loads no database and no web server.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import ssl
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import aiohttp
import msgspec
import orjson
import uuid_utils

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreError
from agentlightning.records import Call, Finish, Metric, Reward, Span
from agentlightning.runtime.backoff import Backoff
from agentlightning.store import codec, wire
from agentlightning.store.base import LightningStore
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.request import bound_token, current_request
from agentlightning.store.rules import reward_number

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


RETRY_TIMEOUT_S = 600.0
"""Seconds that a server may be away: its machine may be restarted, and the network may be out for minutes."""
FIRST_RETRY_TIMEOUT_S = 30.0
"""The same before its first response: then the address may be wrong, which somebody wants to know."""
RESPONSE_TIMEOUT_S = 60.0
"""Seconds a server may take for a response, beyond what it is asked to wait."""
LONG_WORK = {"drop_records": 3600.0, "delete_runs": 3600.0}
"""Seconds beyond that for methods that go through all data of a run."""

MAX_COALESCED_BYTES = 64 * 1024
"""Bytes of a request that travels with others; larger ones go alone, so that nobody waits for them."""
MAX_COALESCED_WRITES = 1000
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of writes that travel together; a single append may be larger."""

LATE_S = 2.0
"""Time after which writes that hang, as those do whose server lost its power, no longer hold up later ones."""

_READING = (
    "aliases attempts calls checkpoints count credit files find_token follow_metrics metrics models resources rewards "
    "rollouts runs series signing_secret spans statistics steps summaries tokens wait wait_aliases wait_resources "
    "workers"
)
READING = frozenset(_READING.split())
"""Methods that change nothing: safe to retry without a key."""


def _request(method: F) -> F:
    """The method as one request: its arguments by name."""
    name, (_, *parameters) = method.__name__, inspect.signature(method).parameters.values()
    names = [each.name for each in parameters]
    # How long the server is asked to wait, beyond a usual response's time.
    waits = next(((each.name, each.default) for each in parameters if each.name in ("wait_s", "timeout_s")), ("", 0.0))

    @functools.wraps(method, updated=())  # not the mark of an abstract method
    async def call(client: LightningStoreClient, *args: Any, **named: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | named
        wait_s = arguments.get(*waits) + LONG_WORK.get(name, 0.0)
        return await client._call(name, arguments, wait_s)

    return cast(F, call)


class LightningStoreClient(LightningStore):
    """The store of the server at `url` (``http://host:port``), which wants its key unless it serves loopback only. Use from
    one event loop."""

    def __init__(
        self,
        url: str,
        server_key: str | None = None,
        *,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
    ) -> None:
        """`retry_timeout_s`: how long the server may be away (half a minute at most before its first response)."""
        self._url = url.rstrip("/")
        self._key = server_key
        self._retry_timeout_s = retry_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._writes: Coalescer[_Write, Any] = Coalescer(
            self._deliver, max_items=MAX_COALESCED_WRITES, max_size=MAX_BATCH_BYTES, size=len, late_s=LATE_S
        )
        self.boots: frozenset[str] = frozenset()
        """Ids of the starts of servers that have answered: one more means that a server was restarted, or that a gateway
        answered for the first time where several share the address."""

    async def open(self) -> None:
        """Ready for requests; connects to nothing yet."""
        if self._session is None:
            headers = {"content-type": wire.CONTENT_TYPE, "accept-encoding": "identity"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            # Made here, not by aiohttp as it is imported: SSL_CERT_FILE may have been set since.
            verify = ssl.create_default_context() if self._url.startswith("https://") else True
            connector = aiohttp.TCPConnector(limit=0, ssl=verify)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)

    async def close(self) -> None:
        await self._writes.close(StoreError("the store was closed while this was being sent"))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def signing_secret(self) -> bytes:
        return wire.SECRET.decode(await self._send("signing_secret", b""))["secret"]

    create_run = _request(LightningStore.create_run)
    update_run = _request(LightningStore.update_run)
    runs = _request(LightningStore.runs)
    enqueue = _request(LightningStore.enqueue)
    claim = _request(LightningStore.claim)
    heartbeat = _request(LightningStore.heartbeat)
    open_session = _request(LightningStore.open_session)
    cancel = _request(LightningStore.cancel)
    expire_leases = _request(LightningStore.expire_leases)
    rollouts = _request(LightningStore.rollouts)
    summaries = _request(LightningStore.summaries)
    count = _request(LightningStore.count)
    attempts = _request(LightningStore.attempts)
    wait = _request(LightningStore.wait)
    workers = _request(LightningStore.workers)
    put_files = _request(LightningStore.put_files)
    files = _request(LightningStore.files)
    mark_delivered = _request(LightningStore.mark_delivered)
    calls = _request(LightningStore.calls)
    spans = _request(LightningStore.spans)
    record_feedback = _request(LightningStore.record_feedback)
    rewards = _request(LightningStore.rewards)
    put_resources = _request(LightningStore.put_resources)
    resources = _request(LightningStore.resources)
    metrics = _request(LightningStore.metrics)
    series = _request(LightningStore.series)
    wait_resources = _request(LightningStore.wait_resources)
    follow_metrics = _request(LightningStore.follow_metrics)
    statistics = _request(LightningStore.statistics)
    drop_records = _request(LightningStore.drop_records)
    delete_runs = _request(LightningStore.delete_runs)
    create_token = _request(LightningStore.create_token)
    tokens = _request(LightningStore.tokens)
    find_token = _request(LightningStore.find_token)
    revoke_token = _request(LightningStore.revoke_token)
    open_step = _request(LightningStore.open_step)
    close_step = _request(LightningStore.close_step)
    steps = _request(LightningStore.steps)
    reopen_steps = _request(LightningStore.reopen_steps)
    put_checkpoint = _request(LightningStore.put_checkpoint)
    checkpoints = _request(LightningStore.checkpoints)
    record_credit = _request(LightningStore.record_credit)
    credit = _request(LightningStore.credit)
    drop_credit = _request(LightningStore.drop_credit)
    put_model = _request(LightningStore.put_model)
    models = _request(LightningStore.models)
    put_alias = _request(LightningStore.put_alias)
    aliases = _request(LightningStore.aliases)
    wait_aliases = _request(LightningStore.wait_aliases)

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        return list(await self._append("finish", "finishes", [_storable(finish) for finish in finishes]) or ())

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", "calls", calls)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", "spans", spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        for reward in rewards:
            reward_number(reward.value, reward.name)
        await self._append("record_rewards", "rewards", rewards)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", "metrics", metrics)

    # --- requests that travel together ----------------------------------------------------------------------------------

    async def _call(self, method: str, arguments: dict[str, Any], wait_s: float) -> Any:
        """Sends the request and returns its result."""
        body = wire.encode(arguments, method)
        if method in READING:
            return self._result(method, await self._send(method, body, wait_s=wait_s))
        binds = bound_token() if method == "create_run" else None
        if binds is not None or current_request() is not None or wait_s or len(body) > MAX_COALESCED_BYTES:
            # On its own: what travels together is for one token.
            return self._result(method, await self._send(method, body, key=_key(), wait_s=wait_s, binds=binds))
        return await self._writes.submit(_Write(method, body))

    async def _append(self, method: str, name: str, records: Sequence[Any]) -> Sequence[bool] | None:
        """Sends records, in the argument of this name, together with what others append at the same time."""
        if not records:
            return []
        write = _Write(method, b"", name, [wire.encode_record(record, name) for record in records])
        if current_request() is None:
            return cast(Sequence[bool] | None, await self._writes.submit(write))
        return cast(Sequence[bool] | None, self._result(method, await self._send(*_packed([write]), key=_key())))

    async def _deliver(self, writes: list[_Write]) -> Sequence[Any]:
        """The result of each of some writes, sent as one request; the appends of one method are one of its entries."""
        groups: dict[Any, list[_Write]] = defaultdict(list)
        for write in writes:
            groups[write.method if write.records else write].append(write)
        if len(groups) == 1:
            return await self._settle(writes, await self._send_entry(writes))
        entries = [wire.Entry(method, _key(), msgspec.Raw(body)) for method, body in map(_packed, groups.values())]
        answers = wire.decode_entry_results(await self._send(wire.BATCH, wire.encode(entries, wire.BATCH)))
        found: dict[_Write, Any] = {}
        for group, answer in zip(groups.values(), answers, strict=True):
            outcome = (
                answer.content if answer.status == 200 else self._error(group[0].method, answer.status, answer.content)
            )
            found |= zip(group, await self._settle(group, outcome), strict=True)
        return [found[write] for write in writes]

    async def _send_entry(self, group: list[_Write]) -> bytes | AgentLightningError:
        try:
            return await self._send(*_packed(group), key=_key())
        except AgentLightningError as error:
            return error

    async def _settle(self, group: list[_Write], outcome: bytes | AgentLightningError) -> Sequence[Any]:
        """The result of each of a group that was executed as a whole, so that only those at fault fail: halves of what the
        server refused are sent on their own, one after the other, since children follow parents."""
        method = group[0].method
        if isinstance(outcome, AgentLightningError):
            if len(group) == 1 or type(outcome) in (StoreError, ConfigError):  # nobody's in particular
                return [copy.copy(outcome) for _ in group]
            halves = group[: len(group) // 2], group[len(group) // 2 :]
            return [one for half in halves for one in await self._settle(half, await self._send_entry(half))]
        result = self._result(method, outcome)
        if method != "finish":
            return [result] * len(group)
        held = iter(result)
        return [list(islice(held, len(write.records))) for write in group]

    def _result(self, method: str, content: bytes) -> Any:
        try:
            return wire.decode_result(method, content)
        except ValueError as error:
            raise StoreError(f"{self._url}/api/{method}: unexpected response: {error}") from None

    # --- one request ----------------------------------------------------------------------------------------------------

    async def _send(
        self, method: str, body: bytes, *, key: str = "", wait_s: float = 0.0, binds: str | None = None
    ) -> bytes:
        """The content of the response to a request, which is sent until there is one. Raises the server's error, or
        StoreError if it cannot be reached. `key` names a request that must not be executed twice."""
        headers = {wire.KEY_HEADER: key} if key else {}
        if binds is not None:
            headers[wire.BINDS_HEADER] = binds
        timeout_s = self._retry_timeout_s if self.boots else min(self._retry_timeout_s, FIRST_RETRY_TIMEOUT_S)
        backoff = Backoff(first_s=0.05, timeout_s=timeout_s)
        while True:
            try:
                status, content = await self._send_once(method, body, headers, wait_s)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                if isinstance(error, aiohttp.ClientConnectorCertificateError) or not await backoff.sleep():
                    raise self._unreachable(str(error) or type(error).__name__, error) from error
                continue
            if status == 200 and content is not None:
                return content
            if content is not None:
                raise self._error(method, status, content)
            if not await backoff.sleep():
                raise self._unreachable(f"status {status}")

    async def _send_once(
        self, method: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, bytes | None]:
        """Status and content; None for the latter if it is a server's or proxy's way to say: not now."""
        if self._session is None:
            raise StoreError(f"the store at {self._url} is not open: use `async with store`, or await store.open()")
        timeout = aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_S + wait_s, sock_connect=10.0)
        url = f"{self._url}/api/{method}"
        async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
            content = await response.read()
            boot = response.headers.get(wire.BOOT_HEADER)
            if response.status in (502, 503, 504) and (boot is None or "retry-after" in response.headers):
                return response.status, None
            if boot is not None and boot not in self.boots:
                self.boots |= {boot}
            return response.status, content

    def _unreachable(self, reason: str, error: BaseException | None = None) -> StoreError:
        todo = "is it running?"
        silent = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            todo = "name the root that signed its certificate in SSL_CERT_FILE"
        elif not (self.boots or isinstance(error, aiohttp.ClientConnectorError) or self._url.startswith("https://")):
            todo = "is it served as https://?" if silent else todo  # somebody took the connection and ended it silently
        return StoreError(f"the server at {self._url} cannot be reached ({reason}); {todo}")

    def _error(self, method: str, status: int, content: bytes) -> AgentLightningError:
        """The error that the server raised, as the class it was."""
        try:
            given = orjson.loads(content)["error"]
            kind, message = getattr(errors, given["type"], None), str(given["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            where = f"{self._url}/api/{method}"
            return StoreError(f"{where}: expected an answer of an Agent Lightning server, got status {status}")
        if not isinstance(kind, type) or not issubclass(kind, AgentLightningError) or kind is errors.MissingExtraError:
            kind = StoreError
        return (ConfigError if status == 401 else kind)(message)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """One caller's write: the arguments of its request, or records to append in the argument of some name."""

    method: str
    arguments: bytes
    name: str = ""
    records: Sequence[bytes] = ()

    def __len__(self) -> int:
        """Bytes."""
        return len(self.arguments) + sum(map(len, self.records))


def _key() -> str:
    """Names a request: that of the request for which this is called, if a further server asks."""
    request = current_request()
    return str(uuid_utils.uuid7()) if request is None else request.key


def _packed(group: Sequence[_Write]) -> tuple[str, bytes]:
    first = group[0]
    if not first.records:
        return first.method, first.arguments
    records = [msgspec.Raw(each) for write in group for each in write.records]
    return first.method, wire.encode({first.name: records}, first.name)


def _storable(finish: Finish) -> Finish:
    """Encodes a finish: what a program printed may hold halves of characters, which must arrive."""
    error, output, diagnosis = (codec.text(each) for each in (finish.error, finish.output, finish.diagnosis))
    return dataclasses.replace(finish, error=error, output=output, diagnosis=diagnosis)
