"""The REST API of the store, mounted at /api by the gateway's app; its client is store/client.py. Every method of
LightningStore is a POST with its arguments by name (store_rpc.py); here are the few other routes, and the description of
all of them (OpenAPI), made from the methods' signatures. Knows nothing of how a store works."""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import uuid
from typing import Any

import msgspec
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import NotFoundError
from agentlightning.gateway.access import Authentication, Permissions, ServerKeyError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.store_rpc import CALLER, MAX_KEY_CHARS, ApiHooks, StoreRpc
from agentlightning.records import Mode, RolloutState
from agentlightning.store import wire
from agentlightning.store.base import LightningStore
from agentlightning.store.server_keys import is_loopback

MAX_LISTED_RUNS = 100


def create_api(
    store: LightningStore,
    server_key: str | None,
    *,
    boot: str | None = None,
    stopping: asyncio.Event | None = None,
    hooks: ApiHooks = ApiHooks(),
    external_keys: ExternalKeys = ExternalKeys(),
    authentication: Authentication | None = None,
) -> ASGIApp:
    """The API of an open store, to be mounted at /api.

    `server_key`: what callers must send as bearer token; None opens it to everybody who can connect, web pages excepted
    (loopback only). `boot`: id of this start of the server, sent with every answer. `stopping`: set when the server is about
    to end, and long polls with it. `authentication`: of the whole server, with this `server_key`; made here unless given.
    """
    stopping = stopping or asyncio.Event()
    callers = authentication or Authentication(store, server_key)
    permissions = Permissions(store, external_keys)
    others = OtherRoutes(store, server_key, permissions)
    boot = boot or uuid.uuid4().hex
    return StoreRpc(store, others, permissions, callers, boot=boot, hooks=hooks, stopping=stopping)


class OtherRoutes:
    """The routes that are no methods: the newest runs, the description, and the secret of further gateways."""

    def __init__(self, store: LightningStore, server_key: str | None, permissions: Permissions) -> None:
        self._store = store
        self._server_key = server_key
        self._permissions = permissions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, whose caller is known. NotFoundError for a route that there is not."""
        route = f"{scope['method']} {scope['path'].removeprefix(scope.get('root_path', ''))}"
        if route == "GET /runs":
            given = {"ids": None, "limit": MAX_LISTED_RUNS}
            content = orjson.dumps(
                await self._store.runs(**await self._permissions.check(scope[CALLER], "runs", given))
            )
        elif route == "GET /openapi.json":
            content = await asyncio.to_thread(description)
        elif route == "POST /signing_secret":
            content = orjson.dumps({"secret": base64.b64encode(await self._secret(scope)).decode()})
        else:
            raise NotFoundError(f"{route}: no such route")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _secret(self, scope: Scope) -> bytes:
        """The secret that signs the keys of attempts, for further gateways over this store: admins."""
        await self._permissions.check(scope[CALLER], "signing_secret", {})
        if self._server_key is None and not (scope.get("client") and is_loopback(scope["client"][0])):
            raise ServerKeyError("signing secret: a server without a key gives it to its own machine only")
        return await self._store.signing_secret()


REFUSALS = {
    401: "The key is missing or wrong.",
    403: "The key may not do this.",
    404: "What the request names does not exist.",
    409: "The state of what the request names does not allow it.",
    413: "The body is too large.",
    422: "A field is wrong; the message names it and what was expected.",
    503: "The store is away, or the server is about to end; try again.",
}

_RESULTS: dict[str, Any] = {"count": dict[Mode, dict[RolloutState, int]]}
"""Results of methods that JSON has in another form."""

_KEY = {
    "name": "idempotency-key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    "description": "Names this request: one that is sent again with the same name is answered as the first was.",
}

_ERROR = {"type": "object", "properties": {name: {"type": "string"} for name in ("type", "message")}}


@functools.cache
def description() -> bytes:
    """The API as OpenAPI, in JSON; an error's `type` is a class of `errors.py`."""
    kinds = [(wire.arguments_type(name), _RESULTS.get(name) or wire.result_type(name)) for name in wire.METHODS]
    found, schemas = msgspec.json.schema_components(
        [kind for pair in kinds for kind in pair], ref_template="#/components/schemas/{name}"
    )
    schemas["ErrorBody"] = {"type": "object", "properties": {"error": _ERROR}}
    refused: dict[str, Any] = {
        str(status): _response(said, {"$ref": "#/components/schemas/ErrorBody"}) for status, said in REFUSALS.items()
    }
    paths: dict[str, Any] = {}
    for position, name in enumerate(wire.METHODS):
        text = inspect.cleandoc(getattr(LightningStore, name).__doc__ or "")
        paths[f"/{name}"] = {
            "post": {
                "operationId": name,
                "summary": text.split(". ")[0].strip(),
                "description": text,
                "parameters": [_KEY],
                "requestBody": {"required": True, "content": {"application/json": {"schema": found[2 * position]}}},
                "responses": {**refused, "200": _response("The result.", found[2 * position + 1])},
            }
        }
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "Agent Lightning", "version": "1"},
            "security": [{"key": []}],
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _response(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
