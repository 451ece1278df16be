"""UploadedFiles: images that an attempt uploads once, so that its calls may name them by id.

Driven by files_api.py, and by policy/images.py for the ids that requests name. A file is kept as images of calls are, once
per run by hash; its id has the hash, and spans of the attempt say what was uploaded and deleted. Whoever deletes a file can
name it no more; calls that named it keep it. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentlightning.errors import InputError
from agentlightning.gateway.attempt_events import AttemptEvents
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.protocols.base import ApiError
from agentlightning.protocols.images import FILE_ID, type_refusal
from agentlightning.records import JSON, Span
from agentlightning.rendering.images import decode_image, image_hash
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import FILE_DELETED, FILE_UPLOADED

MAX_FILES = 256
MAX_UPLOADED_BYTES = 256 << 20
"""Uploads of one attempt and their bytes, those among them that were deleted since."""

MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedFile:
    """One file of an attempt."""

    id: str
    name: str
    mime_type: str
    """As the agent said: nothing here depends on it."""
    purpose: str
    size: int
    created_ns: int

    @property
    def hash(self) -> str:
        return self.id.removeprefix(FILE_ID)


class UploadedFiles:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._events = AttemptEvents(store, frozenset({FILE_UPLOADED, FILE_DELETED}))
        self.decoding = asyncio.Lock()
        """Held to decode an image: one at a time, since it takes a hundred times its file's bytes, and here, since a thread
        that waits for its turn is none for the rest of the gateway."""

    async def of(self, attempt: TrackedAttempt) -> dict[str, UploadedFile]:
        """The files of an attempt by id."""
        found: dict[str, UploadedFile] = {}
        for span in await self._events.read(attempt):
            if span.name == FILE_UPLOADED:
                found[str(span.attributes["id"])] = _file(span)
            else:
                found.pop(str(span.attributes["id"]), None)
        return found

    async def find(self, attempt: TrackedAttempt, file_id: str, path: str = "file_id") -> UploadedFile:
        """The file of this id; `path` is the field that names it. Raises ApiError where the attempt has none."""
        found = (await self.of(attempt)).get(file_id)
        if found is None:
            raise ApiError(
                f"{path}: this attempt has no file {file_id[:80]!r}; upload it by POST /v1/files",
                status=404,
                param=path,
                code="file_not_found",
            )
        return found

    async def put(self, attempt: TrackedAttempt, data: bytes, name: str, mime_type: str, purpose: str) -> UploadedFile:
        """Keep a file; durable when it returns. ApiError where it is no image that the gateway takes, or one too many."""
        async with attempt.turn:
            try:
                async with self.decoding:
                    await asyncio.to_thread(decode_image, data)
            except InputError as cause:
                raise ApiError(f"file: {type_refusal(mime_type) or cause}", param="file") from cause
            file_id = FILE_ID + image_hash(data)
            known = (await self.of(attempt)).get(file_id)
            if known is not None:
                return known
            sizes = [_file(span).size for span in await self._events.read(attempt) if span.name == FILE_UPLOADED]
            if len(sizes) >= MAX_FILES or sum(sizes) + len(data) > MAX_UPLOADED_BYTES:
                most = f"{MAX_FILES} uploads of one attempt, {MAX_UPLOADED_BYTES >> 20} MiB in all"
                raise ApiError(f"file: expected at most {most}", param="file")
            rollout = attempt.rollout
            await self._store.put_files(rollout.run_id, rollout.id, {image_hash(data): data})
            told: JSON = {"id": file_id, "name": name[:MAX_NAME_CHARS], "mime_type": mime_type[:MAX_NAME_CHARS]}
            told |= {"purpose": purpose, "size": len(data)}
            return _file(await self._events.append(attempt, FILE_UPLOADED, told))

    async def content(self, attempt: TrackedAttempt, file: UploadedFile) -> bytes:
        """The bytes of a file."""
        return (await self._store.files(attempt.rollout.run_id, [file.hash]))[file.hash]

    async def delete(self, attempt: TrackedAttempt, file: UploadedFile) -> None:
        """Forget a file; durable when it returns."""
        await self._events.append(attempt, FILE_DELETED, {"id": file.id})


def _file(span: Span) -> UploadedFile:
    told = span.attributes
    return UploadedFile(
        id=str(told["id"]),
        name=str(told["name"]),
        mime_type=str(told["mime_type"]),
        purpose=str(told["purpose"]),
        size=int(told["size"]),
        created_ns=span.started_ns,
    )
