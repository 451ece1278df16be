"""The REST API of the store: one POST route per method, and a few GETs for people.

Mounted at /api by the gateway's app; its client is store/client.py. The routes are made from the signatures of
LightningStore, so that a method which is added there is served here, described in OpenAPI and checked. Knows nothing of how
a store works.

    POST /claim {"worker": {...}, "limit": 4, "wait_s": 20}     every method: its arguments by name, its result as JSON
    GET  /runs   /rollouts?run_id=…   /rollouts/{id}   /rollouts/{id}/calls   /summaries?where=…   /runs/{id}/series

Errors are {"error": {"type": "NotFoundError", "message": "…"}} with the status of their class, never a traceback.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import uuid
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import Depends, FastAPI, Query, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.config.base import expected
from agentlightning.errors import AgentLightningError, InputError, NotFoundError
from agentlightning.gateway.access import Authentication, Permissions, ServerKeyError, error_body
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.store_rpc import CALLER, MAX_KEY_CHARS, ApiHooks, StoreRpc
from agentlightning.records import Call, Mode, Rollout, RolloutState, Run
from agentlightning.store import wire
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.server_keys import is_loopback
from agentlightning.store.summaries import MAX_LIMIT, MAX_POINTS, Order, SeriesPoint, SummaryPage, SummaryQuery


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
    """The API of an open store, to be mounted at /api. `server_key`: what callers must send as bearer token; None opens
    it to everybody who can connect, web pages excepted (loopback only). `stopping`: set when the server is about to
    end, and long polls with it."""
    stopping = stopping or asyncio.Event()
    callers = authentication or Authentication(store, server_key)
    permissions = Permissions(store, external_keys)
    views = RoutesOnDemand(lambda: create_routes(store, server_key, permissions))
    boot = boot or uuid.uuid4().hex
    return StoreRpc(store, views, permissions, callers, boot=boot, hooks=hooks, stopping=stopping)


class ErrorBody(BaseModel):
    """The body of every response that is an error: its `type` is a class of `errors.py`, and there is a `message`."""

    error: dict[str, str]


REFUSALS = {
    401: "The key is missing or wrong.",
    403: "The key may not do this.",
    404: "What the request names does not exist.",
    409: "The state of what the request names does not allow it.",
    413: "The body is too large.",
    422: "A field is wrong; the message names it and what was expected.",
    503: "The store is away, or the server is about to end; try again.",
}


class RoutesOnDemand:
    """The described API, made at its first request: it takes 0.4 s, for which neither a server that starts nor the
    calls of agents shall wait. Methods are served before they come here."""

    def __init__(self, create: Callable[[], ASGIApp]) -> None:
        self._create = create
        self._creating = asyncio.Lock()
        self._routes: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        async with self._creating:
            if self._routes is None:
                self._routes = await asyncio.to_thread(self._create)
        await self._routes(scope, receive, send)


def create_routes(
    store: LightningStore,
    server_key: str | None,
    permissions: Permissions,
) -> FastAPI:
    """The description of the whole API, and the routes that are no methods."""
    api = FastAPI(
        title="Agent Lightning",
        dependencies=[Depends(HTTPBearer(auto_error=False, description="The server key or a token (AGL_SERVER_KEY)."))],
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
        responses={status: {"model": ErrorBody, "description": said} for status, said in REFUSALS.items()},
    )
    api.add_exception_handler(AgentLightningError, _on_error)
    api.add_exception_handler(RequestValidationError, _on_bad_input)
    api.add_exception_handler(HTTPException, _on_http_error)
    _add_views(api, store, permissions)
    _add_series(api, store, permissions)
    _add_secret(api, store, server_key, permissions)
    described = api.openapi

    def openapi() -> dict[str, Any]:
        return api.openapi_schema if api.openapi_schema is not None else _with_methods(described())

    api.openapi = openapi  # type: ignore[method-assign]
    return api


def _with_methods(schema: dict[str, Any]) -> dict[str, Any]:
    """The description of the views, and that of the methods, which the middleware in front serves."""
    kinds = [(wire.arguments_type(name), _RESULTS.get(name) or wire.result_type(name)) for name in wire.METHODS]
    found, components = msgspec.json.schema_components(
        [kind for pair in kinds for kind in pair], ref_template="#/components/schemas/{name}"
    )
    schema["components"]["schemas"] |= components
    refused = next(iter(schema["paths"]["/runs"].values()))["responses"]
    for position, name in enumerate(wire.METHODS):
        text = inspect.cleandoc(getattr(LightningStore, name).__doc__ or "")
        answer = {"description": "The result.", "content": {"application/json": {"schema": found[2 * position + 1]}}}
        schema["paths"].setdefault(f"/{name}", {})["post"] = {
            "operationId": name,
            "summary": text.split(". ")[0].strip(),
            "description": text,
            "tags": ["methods"],
            "security": [{"HTTPBearer": []}],
            "parameters": [_KEY],
            "requestBody": {"required": True, "content": {"application/json": {"schema": found[2 * position]}}},
            "responses": {**refused, "200": answer},
        }
    return schema


_KEY = {
    "name": "idempotency-key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    "description": "Names this request: one that is sent again with the same name is answered as the first was.",
}
_RESULTS: dict[str, Any] = {"count": dict[Mode, dict[RolloutState, int]]}
"""Results of methods that JSON has in another form."""


def _add_views(api: FastAPI, store: LightningStore, permissions: Permissions) -> None:
    allowed = _checked(permissions)

    async def one(request: HttpRequest, rollout_id: str) -> Rollout:
        found = await store.rollouts(**await allowed(request, "rollouts", query=RolloutQuery(ids=[rollout_id])))
        if not found:
            raise NotFoundError(f"no such rollout: {rollout_id}")
        return found[0]

    @api.get("/runs", response_model=list[Run], tags=["views"])
    async def list_runs(request: HttpRequest, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        """Runs, newest first."""
        return _json(await store.runs(**await allowed(request, "runs", ids=None, limit=limit)))

    @api.get("/rollouts", response_model=list[Rollout], tags=["views"])
    async def list_rollouts(
        request: HttpRequest,
        run_id: str,
        mode: Mode | None = None,
        state: RolloutState | None = None,
        step: int | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        newest_first: bool = False,
    ) -> Response:
        """Rollouts of a run; the last id of one page is the `after` of the next."""
        states = None if state is None else [state]
        query = RolloutQuery(
            run_id=run_id, mode=mode, states=states, step=step, after=after, limit=limit, newest_first=newest_first
        )
        return _json(await store.rollouts(**await allowed(request, "rollouts", query=query)))

    @api.get("/rollouts/{rollout_id}", response_model=Rollout, tags=["views"])
    async def show_rollout(request: HttpRequest, rollout_id: str) -> Response:
        """One rollout."""
        return _json(await one(request, rollout_id))

    @api.get("/rollouts/{rollout_id}/calls", response_model=list[Call], tags=["views"])
    async def list_calls(request: HttpRequest, rollout_id: str, attempt: int | None = None) -> Response:
        """The model calls of its latest attempt, or of the one named."""
        await one(request, rollout_id)
        given = await allowed(request, "calls", rollout_ids=[rollout_id], attempt=attempt)
        return _json(await store.calls(**given))


def _checked(permissions: Permissions) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
    async def allowed(request: HttpRequest, method: str, **given: Any) -> dict[str, Any]:
        """The arguments with which the caller may call the method."""
        return await permissions.check(request.scope[CALLER], method, given)

    return allowed


def _add_series(api: FastAPI, store: LightningStore, permissions: Permissions) -> None:
    allowed = _checked(permissions)

    @api.get("/summaries", response_model=SummaryPage, tags=["views"])
    async def list_summaries(
        request: HttpRequest,
        run_id: str | None = None,
        where: str = "",
        order_by: Order = "finished",
        descending: bool = True,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    ) -> Response:
        """Summaries of finished rollouts that match a filter; the `next` of one page is the `after` of the next."""
        query = SummaryQuery(
            run_id=run_id, where=where, order_by=order_by, descending=descending, after=after, limit=limit
        )
        return _json(await store.summaries(**await allowed(request, "summaries", query=query)))

    @api.get("/runs/{run_id}/series", response_model=dict[str, list[SeriesPoint]], tags=["views"])
    async def show_series(
        request: HttpRequest,
        run_id: str,
        name: Annotated[list[str] | None, Query()] = None,
        max_points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 500,
        after_step: int | None = None,
    ) -> Response:
        """Metrics of a run over its steps, all or those named, each as a bounded number of points."""
        given = {"run_id": run_id, "names": name, "max_points": max_points, "after_step": after_step}
        return _json(await store.series(**await allowed(request, "series", **given)))


def _add_secret(api: FastAPI, store: LightningStore, server_key: str | None, permissions: Permissions) -> None:
    @api.post("/signing_secret", tags=["gateways"])
    async def signing_secret(request: HttpRequest) -> dict[str, str]:
        """The secret that signs the keys of attempts, for further gateways over this store: admins."""
        await permissions.check(request.scope[CALLER], "signing_secret", {})
        if server_key is None and not (request.client is not None and is_loopback(request.client.host)):
            raise ServerKeyError("signing secret: a server without a key gives it to its own machine only")
        return {"secret": base64.b64encode(await store.signing_secret()).decode()}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(status: int, kind: type[AgentLightningError], message: str) -> Response:
    return Response(error_body(kind, message), status, media_type="application/json")


async def _on_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, AgentLightningError)
    return _error(error.http_status, type(error), str(error))


async def _on_bad_input(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _error(422, InputError, f"{'.'.join(map(str, first['loc'][1:]))}: {expected(first, 'an object')}")


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NotFoundError if error.status_code == 404 else InputError
    return _error(error.status_code, kind, f"{request.method} {request.url.path}: {error.detail}")
