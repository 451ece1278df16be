"""What the gateway keeps of one agent is bounded, whatever the agent sends."""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

from gateway_house import House, path

from agentlightning.gateway.asgi_response import AgentRequest
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.policy.recorded import MAX_UNDELIVERED, SdkRetries
from agentlightning.protocols.base import Completion
from agentlightning.records import Claim


def body(text: str = "hi") -> dict[str, object]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}]}


async def asked(house: House, claim: Claim, text: str, **headers: str) -> None:
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=body(text), headers=headers)
    assert reply.status_code == 200, reply.text


def call_with(attempt: TrackedAttempt, key: str | None = None) -> Any:
    """What the memory of retries reads of a call."""
    headers = [] if key is None else [(b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    return SimpleNamespace(attempt=attempt, request=AgentRequest(scope, None))


async def test_an_idempotency_key_keeps_no_completion_alive(house: House) -> None:
    claim = await house.claim()
    for number in range(3):
        await asked(house, claim, f"q{number}", **{"idempotency-key": f"k{number}"})
    gc.collect()
    assert not [
        one for one in gc.get_objects() if type(one) is Completion
    ]  # isinstance asks other objects for their class
    await asked(house, claim, "q0", **{"idempotency-key": "k0"})
    assert len(await house.store.calls([claim.rollout.id])) == 3  # the key still names its call


async def test_long_idempotency_keys_and_undelivered_completions_of_one_request_are_bounded(house: House) -> None:
    claim = await house.claim()
    retries, attempt = SdkRetries(house.store), TrackedAttempt(claim.rollout, 1, 0.0)
    tracemalloc.start()
    for number in range(200):
        pending = retries.begin(call_with(attempt, f"{number:032d}" * 1000), "default", b"h")
        pending.call_id = str(number)
        retries.end(pending)
    keys, _ = tracemalloc.get_traced_memory()
    assert keys < 1_000_000
    call = call_with(attempt)
    for number in range(10_000):
        pending = retries.begin(call, "default", b"h")
        pending.abandoned, pending.call_id = True, f"{number:0100d}"
        retries.end(pending)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown - keys < 100 * 10 * MAX_UNDELIVERED
