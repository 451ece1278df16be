"""Random requests: nothing that anybody sends is a 500, a hang, or a look at the inside."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import schemathesis
from gateway_house import SERVER_KEY, House, path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from agentlightning.gateway.rest import description
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import NewRollout, WorkerStatus
from agentlightning.store.client import LightningStoreClient

DETAILS = (
    "the gateway failed",
    "Traceback",
    "site-packages",
    '.py\\", line',
    "/src/",
    "sqlite3",
    "sqlalchemy",
    "SELECT ",
    "INSERT ",
    "sk-agl-",
    SERVER_KEY,
)
"""Words of the inside, of keys, and of what a stream says when it breaks."""

MAX_WAIT_S = 30.0
"""Seconds that any answer may take."""

QUICK = settings(
    max_examples=6, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

OPERATIONS = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(json.loads(description())).get_all_operations()
}


def leaks(reply: httpx.Response) -> list[str]:
    """What a reply says of the inside. Words of the request may come back: hypothesis draws them from this very file too."""
    sent = reply.request.read().decode(errors="replace") + unquote(str(reply.request.url))
    return [detail for detail in DETAILS if detail in reply.text and detail not in sent]


# --- the REST face ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rest() -> Iterator[tuple[httpx.Client, dict[str, Any]]]:
    """A client of a server, and names of what it has."""
    with AgentLightningServer("memory://", server_key=SERVER_KEY) as server:

        async def fill() -> dict[str, Any]:
            async with LightningStoreClient(server.url, SERVER_KEY) as store:
                run = await store.create_run("fuzzed", {})
                await store.enqueue([NewRollout(run_id=run.id, task={}, group_id=str(n)) for n in range(50)])
                worker = WorkerStatus(id="w", run_id=run.id, host="h", pid=1, running=0, seen_ns=0)
                (claim,) = await store.claim(worker)
            return {
                "run_id": run.id, "rollout_id": claim.rollout.id, "rollout_ids": [claim.rollout.id], "ids": [run.id],
                "token": claim.lease.token, "attempt": 1, "group_id": "0", "replica": 0, "step": 0,
            }  # fmt: skip

        names = asyncio.run(fill())
        with httpx.Client(base_url=server.url, timeout=2 * MAX_WAIT_S) as client:
            yield client, names


LONG_POLLS = ("POST /wait", "POST /wait_aliases", "POST /wait_resources", "POST /follow_metrics")


def known(value: Any, names: dict[str, Any], draw: Any) -> Any:
    """The value with some of its names replaced by ones that exist, and waits short."""
    if isinstance(value, list):
        return [known(one, names, draw) for one in value]
    if not isinstance(value, dict):
        return value
    result = {key: known(one, names, draw) for key, one in value.items()}
    for key in result:
        if key in names and draw(st.booleans()):
            result[key] = names[key]
        if key in ("wait_s", "timeout_s") and isinstance(result[key], int | float | str):
            result[key] = 0.01
    return result


FAST = ("POST /enqueue", "POST /append_calls", "POST /append_spans", "GET /rollouts")


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=() if label in FAST else pytest.mark.slow) for label in OPERATIONS]
)
def test_a_random_request_to_the_store_is_answered_or_refused(
    label: str, rest: tuple[httpx.Client, dict[str, Any]]
) -> None:
    operation, (client, names) = OPERATIONS[label], rest
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))

    @QUICK
    @given(case=cases, data=st.data())
    def check(case: Any, data: Any) -> None:
        sent = case.as_transport_kwargs(base_url=str(client.base_url) + "/api")
        if isinstance(case.body, dict | list):
            sent["json"] = known(case.body, names, data.draw)
            if operation.label in LONG_POLLS and isinstance(sent["json"], dict):
                sent["json"].setdefault("timeout_s", 0.01)  # not the half minute that is meant otherwise
        elif "json" in sent:
            sent["json"] = case.body
        content = json.dumps(sent["json"]).encode() if "json" in sent else sent.get("data")
        headers = {"content-type": "application/json", "authorization": f"Bearer {SERVER_KEY}"}
        started = time.monotonic()
        try:
            reply = client.request(
                sent["method"], sent["url"], params=sent.get("params"), content=content, headers=headers
            )
        except (httpx.InvalidURL, TypeError, UnicodeEncodeError):
            return  # no client could send it
        assert time.monotonic() - started < MAX_WAIT_S
        if operation.label == "POST /signing_secret" and reply.status_code == 200:
            return
        assert reply.status_code < 500, (reply.status_code, content, reply.text)
        assert str(reply.status_code) in operation.definition.raw["responses"]
        said = reply.json()
        if reply.status_code != 200:
            assert set(said) == {"error"}
            assert not leaks(reply), reply.text

    check()


@pytest.mark.parametrize("seconds", ["nan", "inf", 1e308, 86_401, -1])
async def test_seconds_are_a_number_from_0_to_a_day(house: House, seconds: float | str) -> None:
    worker = {"id": "w", "run_id": house.run_id, "host": "h", "pid": 1, "running": 0, "seen_ns": 0}
    for verb, body in (
        ("heartbeat", {"worker": worker, "leases": [], "lease_s": seconds}),
        ("claim", {"worker": worker, "wait_s": seconds}),
        ("wait", {"run_id": house.run_id, "timeout_s": seconds}),
    ):
        headers = {"authorization": f"Bearer {SERVER_KEY}"}
        reply = await house.http().post(f"/api/{verb}", json=body, headers=headers)
        assert reply.status_code == 422
        assert "_s: expected a" in reply.json()["error"]["message"]


# --- the protocols ----------------------------------------------------------------------------------------------------

ROUTES = {
    "chat/completions": "chat",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
    "messages/count_tokens": "messages",
    "/v1beta/models/policy:generateContent": "generate_content",
    "/v1beta/models/policy:streamGenerateContent?alt=sse": "generate_content",
    "/v1beta/models/policy:countTokens": "generate_content",
    "embeddings": "embeddings",
    "reward": "reward",
}
RECORDED = json.loads((Path(__file__).parents[1] / "protocols" / "golden_requests.json").read_text(encoding="utf-8"))
VALID = {
    protocol: [one["body"] for one in cases if one["trained"] and "param" not in one["result"]]
    for protocol, cases in RECORDED.items()
} | {
    "embeddings": [{"model": "policy", "input": ["a", "b"], "encoding_format": "float", "dimensions": 3, "user": "u"}],
    "reward": [{"value": 0.5, "name": "reward", "call_id": None}],
}
"""Bodies by protocol."""

LONE = '"\\ud800"'
"""Half of a character: JSON, and no text."""

anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, 1e308]),
        st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6), st.just("\0"), st.just("x" * 5000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "role", "content", "text", "function", "name", "id"]), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, one in parts for place in places(one, (*here, key)))]


@st.composite
def mutated(draw: Any, valid: list[Any]) -> bytes:
    """A valid request with a few of its values replaced, removed, repeated or renamed; or bytes of any kind."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(st.binary(max_size=40))  # type: ignore[no-any-return]
    if kind == 1:
        return json.dumps(draw(anything)).encode()
    body = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 3))):
        choices = [place for place in places(body) if place]
        if not choices:
            break
        *above, last = draw(st.sampled_from(choices))
        holder = body
        for key in above:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat", "swap"])):
            case "replace":
                holder[last] = draw(anything)
            case "remove":
                del holder[last]
            case "repeat" if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case _:
                holder[last] = copy.deepcopy(draw(st.sampled_from([body, holder, "auto", "none", []])))
    if isinstance(body, dict) and draw(st.booleans()):
        body["stream"] = draw(st.booleans())
    text = json.dumps(body)
    return (text.replace('"hi"', LONE) if kind == 2 else text).encode()


def in_shape(route: str, body: bytes) -> bool:
    """Whether an error has the shape of its protocol."""
    said = json.loads(body)
    if route.startswith("/v1beta"):
        error = json.loads(body)["error"]
        return set(error) - {"details"} == {"code", "message", "status"} and isinstance(error["message"], str)
    if route.startswith("messages"):
        return bool(said["type"] == "error" and said["error"]["type"] and isinstance(said["error"]["message"], str))
    return set(said["error"]) == {"message", "type", "param", "code"} and isinstance(said["error"]["message"], str)


def under_root(route: str) -> str:
    """The path under that of the attempt."""
    return route if route.startswith("/") else f"/v1/{route}"


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_that_was_tampered_with_is_answered_or_refused(house: House, route: str, count: int) -> None:
    bodies: list[bytes] = []

    @settings(QUICK, max_examples=count)
    @given(body=mutated(VALID[ROUTES[route]]))
    def collect(body: bytes) -> None:
        bodies.append(body)

    collect()
    await house.serve_policy(unsupported_params="drop")  # so that more of them get through
    claim = await house.claim()
    http = house.http()
    for body in bodies:
        async with asyncio.timeout(MAX_WAIT_S):
            reply = await http.post(f"{path(claim)}{under_root(route)}", content=body)
        assert reply.status_code < 500, (body, reply.text)
        if reply.status_code != 200:
            assert in_shape(route, reply.content), reply.text
        elif reply.headers["content-type"].startswith("application/json"):
            reply.json()
        assert not leaks(reply), (body, reply.text)


@pytest.mark.parametrize(
    "route", ["chat", "chat/completions/x", "responses/resp_x", "models/x", "é", "%00", "a" * 5000]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_a_random_route_is_refused(house: House, route: str, method: str) -> None:
    claim = await house.claim()
    reply = await house.http().request(method, f"{path(claim)}/v1/{route}")
    assert 400 <= reply.status_code < 500
    assert not leaks(reply)
