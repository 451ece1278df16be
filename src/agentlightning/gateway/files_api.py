"""FilesApi: the routes of OpenAI's and of Anthropic's Files API: upload, fetch, read and delete one file.

Driven by the proxy for paths under ``files``. Both send multipart/form-data; who sends ``anthropic-version`` is answered in
Anthropic's form. Knows neither what a file holds nor where it is kept (uploaded_files.py).
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import orjson

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.uploaded_files import UploadedFile, UploadedFiles
from agentlightning.protocols import fields
from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON

PURPOSES = ("user_data", "vision")

MIME_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)

MAX_PARTS = 16
"""Parts of a form: a body of 64 MiB could hold a million."""


class FilesApi:
    """Use from one event loop."""

    def __init__(self, files: UploadedFiles) -> None:
        self._files = files

    def knows(self, route: str, method: str) -> bool:
        """True where `answer` serves a request."""
        base, _, rest = route.partition("/")
        file_id, _, part = rest.partition("/")
        if base != "files":
            return False
        known = ("POST",) if not rest else ("GET", "DELETE") if not part else ("GET",) if part == "content" else ()
        return method in known and bool(file_id or not rest)

    async def answer(
        self, incoming: AgentRequest, attempt: TrackedAttempt, admission: Admission, reply: AgentResponse
    ) -> None:
        """Answer a request that `knows` is true of. Raises ApiError and the errors of the store."""
        headers = dict(incoming.headers)
        anthropic = b"anthropic-version" in headers
        _, _, file_id = (incoming.route or "").partition("/")
        if not file_id:
            body = await incoming.body(admission.take)
            form = await asyncio.to_thread(_form, headers.get(b"content-type", b""), body)
            file = await self._files.put(attempt, *form)
            await reply.whole(200, _shown(file, anthropic))
            return
        file = await self._files.find(attempt, file_id.removesuffix("/content"))
        if file_id.endswith("/content"):
            await reply.whole(200, await self._files.content(attempt, file), b"application/octet-stream")
        elif incoming.method == "GET":
            await reply.whole(200, _shown(file, anthropic))
        else:
            await self._files.delete(attempt, file)
            gone: JSON = {"type": "file_deleted"} if anthropic else {"object": "file", "deleted": True}
            await reply.whole(200, orjson.dumps({"id": file.id, **gone}))


def _form(content_type: bytes, body: bytes) -> tuple[bytes, str, str, str]:
    """(bytes, name, MIME type, purpose) of the file that a form uploads. Raises ApiError."""
    from python_multipart import create_form_parser
    from python_multipart.exceptions import FormParserError

    if not content_type.lower().startswith(b"multipart/form-data"):
        raise ApiError('expected multipart/form-data with a "file"', param="file")
    files: list[Any] = []
    given: list[Any] = []

    def take(part: Any) -> None:
        if len(files) + len(given) == MAX_PARTS:
            raise ApiError(f"expected a form of at most {MAX_PARTS} parts", param="file")
        (files if hasattr(part, "file_object") else given).append(part)

    config = {"MAX_MEMORY_FILE_SIZE": float("inf")}  # the body is in memory as it is, and bounded
    try:
        parser = create_form_parser({"Content-Type": content_type}, take, take, config)
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as cause:
        raise ApiError(f"the body is not the form that its content-type says: {cause}", param="file") from cause
    purpose = PURPOSES[0]
    for field in given:
        name = (field.field_name or b"").decode("utf-8", "replace")
        if name != "purpose":
            raise fields.refused(name, "not supported; a file stays as long as its attempt has its records")
        purpose = (field.value or b"").decode("utf-8", "replace")
    if purpose not in PURPOSES:
        raise fields.expected(f"one of {', '.join(PURPOSES)}", purpose, "purpose")
    if len(files) != 1 or files[0].field_name != b"file":
        raise ApiError(f'expected a form with one file, named "file", got {len(files)}', param="file")
    file = files[0]
    name = "".join(filter(str.isprintable, (file.file_name or b"").decode("utf-8", "replace")))
    mime_type = file.content_type or ""
    if not MIME_TYPE.fullmatch(mime_type):
        mime_type = "application/octet-stream"
    return file.file_object.getvalue(), name, mime_type, purpose


def _shown(file: UploadedFile, anthropic: bool) -> bytes:
    created_s = file.created_ns // 10**9
    if anthropic:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created_s))
        about: JSON = {"type": "file", "mime_type": file.mime_type, "size_bytes": file.size, "created_at": created}
        return orjson.dumps({"id": file.id, "filename": file.name, "downloadable": True, **about})
    about = {"object": "file", "bytes": file.size, "created_at": created_s, "purpose": file.purpose}
    return orjson.dumps({"id": file.id, "filename": file.name, "status": "processed", **about})
