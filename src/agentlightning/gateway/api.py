"""The REST face of the store: one POST route a verb, and a few GETs for people.

Mounted at /api by the gateway's app; its client is store/client.py. The routes are made from the signatures of
LightningStore, so that a verb which is added there is served here, described in OpenAPI and checked. Knows nothing of how a
store works.

    POST /claim {"worker": {...}, "limit": 4, "wait_s": 20}     every verb: its arguments by name, its result as JSON
    GET  /runs   /rollouts?run_id=…   /rollouts/{id}   /rollouts/{id}/calls

Errors are {"error": {"type": "NotFoundError", "message": "…"}} with the status of their class, never a traceback.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import math
import typing
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, create_model
from starlette.exceptions import HTTPException
from starlette.types import Message

from agentlightning.errors import AgentLightningError, InputError, NotFoundError
from agentlightning.gateway.edge import Edge, KeyRefused, error_body
from agentlightning.gateway.guard import is_loopback
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.types import Call, Claim, Lease, Metric, Mode, Rollout, RolloutState, Run

VERBS = tuple(
    sorted(LightningStore.__abstractmethods__ - {"open", "close", "signing_secret"})  # those are no verbs of clients
)

LONGEST_S = 86_400.0
"""Most seconds that a verb may be asked to wait, or a lease to last."""

_LONG_POLLS = frozenset({"claim", "wait"})


def create_api(
    store: LightningStore,
    server_key: str | None,
    *,
    boot: str | None = None,
    on_claim: Callable[[Sequence[Claim]], None] | None = None,
    on_finish: Callable[[Sequence[Lease]], None] | None = None,
    on_calls: Callable[[Sequence[Call]], None] | None = None,
    on_resources: Callable[[str], None] | None = None,
) -> FastAPI:
    """The API of an open store, to be mounted at /api.

    `server_key`: what callers must send as bearer token; None opens it to everybody who can connect, web pages excepted
    (loopback only).
    `boot`: id of this start of the server, sent with every answer; made here unless given.
    `on_claim` gets the claims that were granted, `on_finish` the leases of attempts that were finished, `on_calls` calls
    that were recorded, `on_resources` the run that got new ones: called before the answer is sent, and must not block.
    """
    api = FastAPI(
        title="Agent Lightning",
        dependencies=[Depends(HTTPBearer(auto_error=False, description="The server key (AGL_SERVER_KEY)."))],
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    api.add_middleware(Edge, boot=boot or uuid.uuid4().hex, server_key=server_key)
    api.add_exception_handler(AgentLightningError, _on_error)
    api.add_exception_handler(RequestValidationError, _on_bad_input)
    api.add_exception_handler(HTTPException, _on_http_error)

    def after(verb: str, given: dict[str, Any], result: Any) -> None:
        if verb == "claim" and on_claim is not None:
            on_claim(result)
        if verb == "finish" and on_finish is not None:
            on_finish([finish.lease for finish, held in zip(given["finishes"], result, strict=True) if held])
        if verb == "append_calls" and on_calls is not None:
            on_calls(given["calls"])
        if verb == "put_resources" and on_resources is not None:
            for run_id in {resource.run_id for resource in result}:
                on_resources(run_id)

    for verb in VERBS:
        _add_verb(api, store, verb, after)
    _add_views(api, store)
    _add_secret(api, store, server_key)
    return api


def _add_verb(
    api: FastAPI, store: LightningStore, verb: str, after: Callable[[str, dict[str, Any], Any], None]
) -> None:
    method: Callable[..., Coroutine[Any, Any, Any]] = getattr(store, verb)
    contract = getattr(LightningStore, verb)
    hints = typing.get_type_hints(contract)
    answer = hints.pop("return")
    body_model = _body_model(verb, contract, hints)

    async def serve(request: Request, body: BaseModel) -> Response:
        given = {name: getattr(body, name) for name in type(body).model_fields}
        work = method(**given)
        result = await (_while_connected(request, work) if verb in _LONG_POLLS else work)
        after(verb, given, result)
        return _json(_speakable(verb, result))

    async def serve_nothing_given() -> Response:
        return _json(await method())

    serve.__annotations__ = {"request": Request, "body": body_model, "return": Response}
    serve_nothing_given.__annotations__ = {"return": Response}
    api.add_api_route(
        f"/{verb}",
        serve if hints else serve_nothing_given,
        methods=["POST"],
        operation_id=verb,
        response_model=dict[Mode, dict[RolloutState, int]] if verb == "count" else answer,
        summary=(contract.__doc__ or "").split(". ")[0].strip(),
        description=inspect.cleandoc(contract.__doc__ or ""),
        tags=["verbs"],
    )


def _body_model(verb: str, contract: Callable[..., Any], hints: dict[str, Any]) -> type[BaseModel]:
    parameters = inspect.signature(contract).parameters
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        default = parameters[name].default
        seconds = Annotated[float, Field(allow_inf_nan=False, le=LONGEST_S)]
        fields[name] = (
            seconds if hint is float else hint,
            Field() if default is inspect.Parameter.empty else Field(default=default),
        )
    return create_model(
        "".join(part.capitalize() for part in verb.split("_")), __config__={"extra": "forbid"}, **fields
    )


def _add_views(api: FastAPI, store: LightningStore) -> None:
    async def one(rollout_id: str) -> Rollout:
        found = await store.rollouts(RolloutQuery(ids=[rollout_id]))
        if not found:
            raise NotFoundError(f"no such rollout: {rollout_id}")
        return found[0]

    @api.get("/runs", response_model=list[Run], tags=["views"])
    async def list_runs(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        """Runs, newest first."""
        return _json(await store.runs(limit=limit))

    @api.get("/rollouts", response_model=list[Rollout], tags=["views"])
    async def list_rollouts(
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
        return _json(await store.rollouts(query))

    @api.get("/rollouts/{rollout_id}", response_model=Rollout, tags=["views"])
    async def show_rollout(rollout_id: str) -> Response:
        """One rollout."""
        return _json(await one(rollout_id))

    @api.get("/rollouts/{rollout_id}/calls", response_model=list[Call], tags=["views"])
    async def list_calls(rollout_id: str, attempt: int | None = None) -> Response:
        """The model calls of its latest attempt, or of the one named."""
        await one(rollout_id)
        return _json(await store.calls([rollout_id], attempt))


def _add_secret(api: FastAPI, store: LightningStore, server_key: str | None) -> None:
    @api.post("/signing_secret", tags=["gateways"])
    async def signing_secret(request: Request) -> dict[str, str]:
        """The secret that signs the keys of attempts, for further gateways over this store: holders of the server key."""
        if server_key is None and not (request.client is not None and is_loopback(request.client.host)):
            raise KeyRefused("signing secret: a server without a key gives it to its own machine only")
        return {"secret": base64.b64encode(await store.signing_secret()).decode()}


class _Gone(AgentLightningError):
    """The caller hung up."""

    http_status = 499


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a long poll, which ends with its caller: else a worker that died could still be given rollouts."""
    task = asyncio.ensure_future(work)
    hung_up = asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone("the caller hung up")
        return task.result()
    finally:
        for unfinished in (task, hung_up):
            unfinished.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _speakable(verb: str, result: Any) -> Any:
    """What JSON cannot say: tuples as keys, and numbers that are none."""
    if verb == "count":
        by_mode: dict[str, dict[str, int]] = {}
        for (mode, state), number in result.items():
            by_mode.setdefault(mode, {})[state] = number
        return by_mode
    if verb == "metrics":
        return [metric if math.isfinite(metric.value) else _named(metric) for metric in result]
    return result


def _named(metric: Metric) -> dict[str, Any]:
    return {**asdict(metric), "value": str(metric.value)}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(status: int, kind: type[AgentLightningError], message: str) -> Response:
    return Response(error_body(kind, message), status, media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AgentLightningError)
    return _error(error.http_status, type(error), str(error))


async def _on_bad_input(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return _error(422, InputError, f"body: expected JSON: {first['ctx']['error']}")
    return _error(422, InputError, f"{'.'.join(place) or 'body'}: {first['msg']}")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NotFoundError if error.status_code == 404 else InputError
    return _error(error.status_code, kind, f"{request.method} {request.url.path}: {error.detail}")
