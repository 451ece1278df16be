"""Channel: requests to a server, each executed once though connections break and servers restart.

Driven by LightningStoreClient; the other side is gateway/verbs.py. A request whose connection could not be made or broke is
sent again until the channel's patience has passed, since a server that is restarted comes back on its port and networks
come back too. Every request that writes carries a key of its own: a server that executed it already answers as it did then.
Small ones that are made in the same turn of the event loop travel together.
Bodies for servers far away are compressed: that pays below some 250 Mbit/s, so not on one machine nor in one network.
Knows no verb.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import random
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson
import uuid_utils

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreError

BOOT_HEADER = "x-agl-boot"
KEY_HEADER = "idempotency-key"

PATIENCE_S = 90.0
"""Seconds that a server may be away: longer than the outage of a minute that everybody should survive."""
FIRST_PATIENCE_S = 30.0
"""The same before its first answer: then the address may be wrong, which somebody wants to know."""
ANSWER_S = 60.0
"""Seconds a server may take for an answer, beyond what it is asked to wait."""
LONGEST_PAUSE_S = 2.0

COMPRESSED_FROM = 4096
"""Bytes below which compressing saves no packet worth having."""
LARGE = 256 * 1024
"""Bytes whose compression takes milliseconds: done in a thread."""
LARGEST_ANSWER = 2 * 1024**3
"""Bytes of an answer, decompressed."""
GZIP = 16 + zlib.MAX_WBITS


BATCH = "batch"
"""The route that takes several requests: [{"verb", "key", "given"}], answered by [{"status", "answer"}]."""
SMALL = 64 * 1024
"""Bytes of a request that may travel with others; larger ones go alone, so that nobody waits for them."""
MOST = 256
"""Requests that travel together."""


class Answer(NamedTuple):
    """What the server said."""

    content: bytes
    error: AgentLightningError | None
    """The error that it raised, as the class it was."""
    repeated: bool
    """The request was sent more than once, and an earlier one may have been executed by a server that forgot it."""


class _Letter:
    def __init__(self, verb: str, body: bytes) -> None:
        self.verb = verb
        self.body = body
        self.key = str(uuid_utils.uuid7())
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Channel:
    """Requests to the server at `url`. Use from one event loop."""

    def __init__(self, url: str, server_key: str | None, patience_s: float, compress: bool | None = None) -> None:
        self._url = url.rstrip("/")
        self._key = server_key
        self._patience_s = patience_s
        self._compress = not is_near(self._url) if compress is None else compress
        self._session: aiohttp.ClientSession | None = None
        self._outbox: list[_Letter] = []
        """What was asked for in this turn of the event loop."""
        self._posting: set[asyncio.Task[None]] = set()
        self.boot: str | None = None
        """Id of the server's start, as of the last answer."""

    async def open(self) -> None:
        """Ready for requests; connects to nothing yet."""
        if self._session is None:
            headers = {"content-type": "application/json"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            headers["accept-encoding"] = "gzip" if self._compress else "identity"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=headers, auto_decompress=False
            )

    async def close(self) -> None:
        """End the connections; requests under way fail."""
        for posting in self._posting:
            posting.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, verb: str, body: bytes, *, writes: bool, wait_s: float = 0.0) -> Answer:
        """What the server says. StoreError where it cannot be reached.

        `writes`: whether executing it twice would make a difference. `wait_s`: how long the server was asked to wait.
        """
        if not writes:
            return await self._exchange(verb, body, {}, wait_s)
        letter = _Letter(verb, body)
        if wait_s or len(body) > SMALL:
            return await self._exchange(verb, body, {KEY_HEADER: letter.key}, wait_s)
        self._outbox.append(letter)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._post_outbox)  # the others of this turn follow
        return await letter.answer

    def _post_outbox(self) -> None:
        letters, self._outbox = [letter for letter in self._outbox if not letter.answer.done()], []
        for start in range(0, len(letters), MOST):
            posting = asyncio.ensure_future(self._post(letters[start : start + MOST]))
            self._posting.add(posting)
            posting.add_done_callback(self._posting.discard)

    async def _post(self, letters: list[_Letter]) -> None:
        """Send these together, and hand out the answers."""
        answers: Sequence[Answer | Exception]
        try:
            answers = await self._answers(letters)
        except Exception as error:
            answers = [copy.copy(error) for _ in letters]
        except asyncio.CancelledError:
            answers = [StoreError("the store was closed while this was being sent") for _ in letters]
        for letter, answer in zip(letters, answers, strict=True):
            if letter.answer.done():
                continue
            if isinstance(answer, Exception):
                letter.answer.set_exception(answer)
            else:
                letter.answer.set_result(answer)

    async def _answers(self, letters: list[_Letter]) -> Sequence[Answer | Exception]:
        if len(letters) == 1:
            [letter] = letters
            return [await self._exchange(letter.verb, letter.body, {KEY_HEADER: letter.key}, 0.0)]
        parts = [b'{"verb":"%s","key":"%s","given":%s}' % (*_ascii(each.verb, each.key), each.body) for each in letters]
        whole = await self._exchange(BATCH, b"[" + b",".join(parts) + b"]", {}, 0.0)
        if whole.error is not None:
            return [copy.copy(whole.error) for _ in letters]
        answers: list[Answer | Exception] = []
        for letter, part in zip(letters, orjson.loads(whole.content), strict=True):
            content = orjson.dumps(part["answer"])
            raised = (
                None if part["status"] == 200 else _error(f"{self._url}/api/{letter.verb}", part["status"], content)
            )
            answers.append(Answer(content, raised, whole.repeated))
        return answers

    async def _exchange(self, verb: str, body: bytes, headers: dict[str, str], wait_s: float) -> Answer:
        """One request, sent until it is answered."""
        if self._compress and len(body) >= COMPRESSED_FROM:
            headers["content-encoding"] = "gzip"
            body = await compressed(body)
        absence = Absence(self._url, self._patience_s if self.boot else min(self._patience_s, FIRST_PATIENCE_S))
        boots = {self.boot}
        while True:
            try:
                status, content = await self._send(verb, body, headers, wait_s)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                await absence.pause(str(error) or type(error).__name__, error)
                continue
            if content is not None:
                break
            await absence.pause(f"status {status}")
        boots.add(self.boot)
        raised = None if status == 200 else _error(f"{self._url}/api/{verb}", status, content)
        return Answer(content, raised, absence.noticed and len(boots) > 1)

    async def _send(self, verb: str, body: bytes, headers: dict[str, str], wait_s: float) -> tuple[int, bytes | None]:
        """Status and content; None for the latter where it is a server's or proxy's way to say: not now."""
        if self._session is None:
            raise StoreError(f"the store at {self._url} is not open: use `async with store`, or await store.open()")
        timeout = aiohttp.ClientTimeout(total=ANSWER_S + wait_s, sock_connect=10.0)
        url = f"{self._url}/api/{verb}"
        async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
            content = await response.read()
            said = response.headers
            if response.status in (502, 503, 504) and ("retry-after" in said or BOOT_HEADER not in said):
                return response.status, None
            self.boot = said.get(BOOT_HEADER, self.boot)
            if said.get("content-encoding") == "gzip":
                content = await decompressed(content, LARGEST_ANSWER)
            return response.status, content


class Absence:
    """A server that is away, from the first failure on: pauses that get longer, until its time is over."""

    def __init__(self, url: str, patience_s: float) -> None:
        self._url = url
        self._patience_s = patience_s
        self._deadline = 0.0
        self._pause_s = 0.05
        self.noticed = False

    async def pause(self, reason: str, cause: Exception | None = None) -> None:
        """Wait before the next attempt. StoreError once patience is at an end."""
        now = time.monotonic()
        if not self.noticed:
            self.noticed, self._deadline = True, now + self._patience_s
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # so that a hundred clients do not come back at once
        if now + pause_s > self._deadline:
            raise StoreError(f"the server at {self._url} cannot be reached ({reason}); is it running?") from cause
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def _ascii(*words: str) -> list[bytes]:
    return [word.encode("ascii") for word in words]


def is_near(url: str) -> bool:
    """Whether the server is on this machine or, as far as its name tells, in this network.

    >>> is_near("http://127.0.0.1:80"), is_near("http://10.1.2.3:80"), is_near("http://gateway:80")
    (True, True, True)
    >>> is_near("https://agl.example.com"), is_near("http://8.8.8.8:80")
    (False, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal"))


async def compressed(content: bytes) -> bytes:
    """By gzip, at its fastest."""
    if len(content) >= LARGE:
        return await asyncio.to_thread(_compress, content)
    return _compress(content)


async def decompressed(content: bytes, most: int) -> bytes:
    """What gzip made of it. StoreError where it is damaged, or more than `most` bytes."""
    if len(content) >= LARGE:
        return await asyncio.to_thread(_decompress, content, most)
    return _decompress(content, most)


def _compress(content: bytes) -> bytes:
    return zlib.compress(content, 1, GZIP)


def _decompress(content: bytes, most: int) -> bytes:
    packer = zlib.decompressobj(GZIP)
    try:
        plain = packer.decompress(content, most + 1)
    except zlib.error as error:
        raise StoreError(f"the compressed body is damaged: {error}") from None
    if len(plain) > most:
        raise StoreError(f"the body is larger than {most} bytes")
    if not packer.eof or packer.unused_data:
        raise StoreError("the compressed body is damaged: it does not end where its content does")
    return plain


def _error(where: str, status: int, content: bytes) -> AgentLightningError:
    """The error that the server raised, as the class it was."""
    try:
        said = orjson.loads(content)["error"]
        kind, message = getattr(errors, said["type"], None), str(said["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return StoreError(f"{where}: expected an answer of an Agent Lightning server, got status {status}")
    if not isinstance(kind, type) or not issubclass(kind, AgentLightningError) or kind is errors.MissingExtraError:
        kind = StoreError
    if status == 401:
        kind = ConfigError
    return kind(message)
