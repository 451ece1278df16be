"""SamplingClient: the policy as ids in, ids and log-probabilities out, for agents that own their tokens.

The methods are those of Tinker's client of the same name, so that code written for it runs here; what is sampled is recorded
and trained like any call. Over the gateway's ``/v1/tokens`` routes; knows no tokenizer.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from agentlightning.errors import EngineError, InputError
from agentlightning.records import JSON
from agentlightning.runner.chat_endpoint import transport_errors
from agentlightning.runtime.backoff import Backoff

if TYPE_CHECKING:
    from agentlightning.runner.agent import LLM

T = TypeVar("T")

MAX_RETRIES = 4
"""Further tries of a request that found the gateway away or busy; a completion that was recorded is not sampled again."""


class TokenInput(Protocol):
    """A holder of a prompt's ids, such as Tinker's ModelInput."""

    def to_ints(self) -> list[int]: ...


Prompt = Sequence[int] | TokenInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of a request. `temperature` and `top_p` are the rollout's own, whatever stands here; what was asked for is
    recorded with the call. `top_k` is treated as the run's other requests with it are."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    """Texts or token ids at which a sample ends; it ends at the model's own end token in any case."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sample: everything that was sampled, the token that ended it among it."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResponse:
    """The samples of one prompt; where they were asked for, log-probabilities of its own tokens, None for the first."""

    sequences: list[SampledSequence]
    call_id: str
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class SamplingClient:
    """Samples from the policy behind `llm`.

        client = agl.SamplingClient(llm)
        response = await client.sample_async(prompt_ids, num_samples=1, sampling_params=agl.SamplingParams(max_tokens=20))
        prompt_ids += response.sequences[0].tokens

    A prompt that begins with an earlier prompt and what was sampled for it continues that call: the tokens of both are one
    training row. Without the suffix `_async` a method returns a future at once. EngineError where the gateway does not
    answer, InputError where it refuses.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """Samples of one prompt, as a future."""
        request = _request(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)
        return _in_thread(lambda: _response(self._post("generate", request), _ids(prompt), topk_prompt_logprobs))

    async def sample_async(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        """Samples of one prompt."""
        request = _request(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)
        return _response(await self._post_async("generate", request), _ids(prompt), topk_prompt_logprobs)

    def compute_logprobs(self, prompt: Prompt) -> Future[list[float | None]]:
        """The log-probability of each token given those before it, None for the first, as a future."""
        ids = _ids(prompt)
        return _in_thread(lambda: _logprobs(self._post("logprobs", {"token_ids": ids})))

    async def compute_logprobs_async(self, prompt: Prompt) -> list[float | None]:
        """The log-probability of each token given those before it, None for the first. Nothing is sampled or recorded."""
        return _logprobs(await self._post_async("logprobs", {"token_ids": _ids(prompt)}))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _post(self, route: str, request: JSON) -> JSON:
        call = _HttpCall(self._llm, route, request)
        while call.found is None:
            try:
                call.read(self._llm.sync_http_client.post(call.url, json=call.body, headers=call.headers))
            except transport_errors() as cause:
                call.fail(f"{type(cause).__name__}: {cause}")
            if call.found is None:
                time.sleep(call.pause_s)
        return call.found

    async def _post_async(self, route: str, request: JSON) -> JSON:
        call = _HttpCall(self._llm, route, request)
        while call.found is None:
            try:
                call.read(await self._llm.http_client.post(call.url, json=call.body, headers=call.headers))
            except transport_errors() as cause:
                call.fail(f"{type(cause).__name__}: {cause}")
            if call.found is None:
                await asyncio.sleep(call.pause_s)
        return call.found


class _HttpCall:
    """One request with its tries. The gateway knows a further one by the count and the key: it samples nothing twice."""

    def __init__(self, llm: LLM, route: str, request: JSON) -> None:
        self.url = f"{llm.base_url}/tokens/{route}"
        self.body = {"model": llm.model, **request}
        self.headers = {"Authorization": f"Bearer {llm.api_key}", "Idempotency-Key": str(uuid.uuid4())}
        self.found: JSON | None = None
        self.pause_s = 0.0
        self._backoff = Backoff(first_s=0.5, max_s=8.0)

    def read(self, answer: Any) -> None:
        """Take in a response; after one that may pass, `pause_s` is to be waited. EngineError, InputError."""
        if answer.status_code == 200:
            self.found = answer.json()
        elif answer.status_code in (408, 409, 429) or answer.status_code >= 500:
            self.fail(f"{answer.status_code} {_reason(answer)}", final=answer.headers.get("x-should-retry") == "false")
        else:
            raise InputError(f"the gateway refused the request: {_reason(answer)}")

    def fail(self, problem: str, final: bool = False) -> None:
        """Prepare the next try. EngineError where this was the last."""
        if final or self._backoff.failures >= MAX_RETRIES:
            raise EngineError(f"the gateway at {self.url} did not answer: {problem}")
        self.pause_s = self._backoff.next_s() or 0.0
        self.headers["x-stainless-retry-count"] = str(self._backoff.failures)


def _reason(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(answer.text)[:200]


def _ids(prompt: Prompt) -> list[int]:
    """The ids as the gateway's JSON has them; numpy's integers are no JSON."""
    return [int(one) for one in (prompt if isinstance(prompt, Sequence) else prompt.to_ints())]


def _request(
    prompt: Prompt, num_samples: int, params: SamplingParams | None, include_prompt_logprobs: bool, topk: int
) -> JSON:
    params = params or SamplingParams()
    stop: list[str | int] = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    texts = [one for one in stop if isinstance(one, str)]
    asked: JSON = {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "stop": texts or None,
        "stop_token_ids": [int(one) for one in stop if not isinstance(one, str)] or None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k != -1 else None,
        "prompt_logprobs": topk if include_prompt_logprobs or topk else None,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return {"prompt_ids": _ids(prompt), "n": num_samples, **given}


def _response(body: JSON, ids: list[int], topk: int) -> SampleResponse:
    tables = body.get("prompt_logprobs")
    return SampleResponse(
        sequences=[
            SampledSequence(
                tokens=one["token_ids"],
                logprobs=one["logprobs"],
                stop_reason="length" if one["finish_reason"] == "length" else "stop",
            )
            for one in body["choices"]
        ],
        call_id=body["id"],
        prompt_logprobs=None if tables is None else _own(tables, ids),
        topk_prompt_logprobs=None if tables is None or not topk else [_likeliest(table, topk) for table in tables],
    )


def _own(tables: list[JSON | None], ids: list[int]) -> list[float | None]:
    return [None if table is None else table[str(index)]["logprob"] for index, table in zip(ids, tables, strict=True)]


def _likeliest(table: JSON | None, topk: int) -> list[tuple[int, float]] | None:
    if table is None:
        return None
    ranked = sorted(table.items(), key=lambda entry: entry[1]["rank"])
    return [(int(index), entry["logprob"]) for index, entry in ranked[:topk]]


def _logprobs(body: JSON) -> list[float | None]:
    found: list[float | None] = body["logprobs"]
    return found


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of `work` in a thread of its own, which knows whose agent it is: names and spans are context."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks the future gets it
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="agl-sample", daemon=True).start()
    return future
