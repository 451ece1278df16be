"""One OpenAI-compatible chat endpoint, asked for short answers: of judges.

Driven by reward functions and by the credit rule that ranks a group. A refusal is an error at once; what may pass (no
connection, 429, 5xx) is asked again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentlightning.adapters.conversations import JudgeReply
from agentlightning.errors import EngineError
from agentlightning.records import JSON
from agentlightning.runtime.backoff import Backoff

if TYPE_CHECKING:
    import httpx

MAX_TRIES = 5
"""Requests for one completion."""


@dataclass(frozen=True)
class ChatEndpoint:
    """Asks `url`, which ends in /v1."""

    client: httpx.AsyncClient
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    first_pause_s: float = 1.0
    """Between the first two tries; then it doubles."""

    async def __call__(self, request: JSON) -> JudgeReply:
        """The first choice's text. EngineError where the endpoint refuses, or does not answer."""
        problem, backoff = "", Backoff(self.first_pause_s, max_s=8.0)
        for attempt in range(MAX_TRIES):
            if attempt:
                await backoff.sleep()
            try:
                answer = await self.client.post(
                    f"{self.url.rstrip('/')}/chat/completions", json=request, headers=dict(self.headers)
                )
            except transport_errors() as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == 429 or answer.status_code >= 500:
                problem = f"status {answer.status_code}"
                continue
            if answer.status_code != 200:
                raise EngineError(
                    f"the judge at {self.url} refused the request: {answer.status_code} {answer.text:.200}"
                )
            return _reply(self.url, answer)
        raise EngineError(f"the judge at {self.url} did not answer {MAX_TRIES} times, at last: {problem}")


def transport_errors() -> tuple[type[Exception], ...]:
    """Of whichever HTTP library the client is made with; both know the same errors by the same names."""
    loaded = (sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    return tuple(library.TransportError for library in loaded)


def bearer(key_env: str | None) -> dict[str, str]:
    """The header with the key in this variable of the environment; none where no variable is named."""
    return {} if key_env is None else {"Authorization": f"Bearer {os.environ[key_env]}"}


def _reply(url: str, answer: httpx.Response) -> JudgeReply:
    try:
        body: Any = answer.json()
        text = body["choices"][0]["message"]["content"] or ""
        usage = body.get("usage") or {}
        return JudgeReply(
            text=str(text),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            sampled_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as cause:
        raise EngineError(f"the judge at {url} answered with no chat completion: {answer.text:.200}") from cause
