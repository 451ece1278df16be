"""The sampler process: token ids in, token ids out, over HTTP (vLLM's /inference/v1/generate route).

    python -m agentlightning.engines.local.sampler --model DIR --fd N [--setup JSON]

The engine starts it on a socket of its own, so that a restarted sampler keeps its port. One thread does both the arithmetic
and HTTP, taking turns: at tiny sizes two would hand the interpreter lock to each other after every kernel. A turn that takes
long (large models) runs in a worker thread.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import logging
import math
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import torch
from aiohttp import web
from msgspec import Meta

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.decoder import Decoder, open_decoder
from agentlightning.engines.local.decoding import Constraint
from agentlightning.engines.local.images import read_images
from agentlightning.engines.local.model import is_tiny, settle
from agentlightning.engines.local.parts import WEIGHTS_KEY
from agentlightning.engines.local.scheduler import (
    PREFILL_TOKENS,
    TINY_PREFILL_TOKENS,
    SamplingRequest,
    Scheduler,
    Score,
)
from agentlightning.engines.machine import default_threads
from agentlightning.engines.sampler_address import SAMPLING_KEY, asks_for, holds, refusal, refusal_body
from agentlightning.errors import AgentLightningError, EngineError, InputError, MissingExtraError, ModelError, printable
from agentlightning.rendering.grammar import Grammars, structured_outputs
from agentlightning.rendering.model_folder import end_ids
from agentlightning.runtime.children import end_with_parent, give_way, keep_files_private
from agentlightning.runtime.log_lines import line_handler
from agentlightning.runtime.watchdog import ChildHeartbeat, beat_to_parent

CONSTRAINTS = (
    *("structured_outputs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("top_k", "min_p", "min_tokens", "allowed_token_ids"),
)
"""Parameters that change the distribution that tokens are drawn from, besides temperature and top_p; see decoding.py."""
MAX_LOGPROBS = 20
NUMBER_FROM_0 = Annotated[float, Meta(ge=0)] | None
COUNT = Annotated[int, Meta(ge=0)] | None
PENALTY = Annotated[float, Meta(ge=-2, le=2)] | None
STOP = Annotated[str, Meta(min_length=1)]


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters that are served, by vLLM's names; None is the default of each."""

    temperature: NUMBER_FROM_0 = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: STOP | list[STOP] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: PENALTY = None
    frequency_penalty: PENALTY = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: COUNT = None
    allowed_token_ids: list[int] | None = None
    # Served only with the values that change nothing:
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=0)] | None = None
    # About text, which the token path has none of:
    detokenize: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    output_kind: Any = None

    def logits(self, vocab: int) -> dict[str, Any]:
        """Penalties, logit_bias and cuts, without those that are neutral."""
        bias, allowed = self.logit_bias or {}, self.allowed_token_ids or []
        if not all(token.isdecimal() and int(token) < vocab for token in bias):
            raise InputError(f"sampling_params.logit_bias must map token ids from 0 to {vocab - 1} to numbers")
        if not all(0 <= token < vocab for token in allowed):
            raise InputError(f"sampling_params.allowed_token_ids must be a list of token ids from 0 to {vocab - 1}")
        neutral = {"repetition_penalty": 1.0, "top_k": -1}
        values = {name: getattr(self, name) for name in CONSTRAINTS if name != "structured_outputs"}
        found = {name: value for name, value in values.items() if value and value != neutral.get(name)}
        return found | ({"stop_token_ids": self.stop_token_ids or []} if "min_tokens" in found else {})


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of a request, as far as it is read."""

    request_id: str = ""
    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: SamplingParams | None = None
    content_parts: Any = None
    stream: bool | None = False


_REQUEST = msgspec.json.Decoder(GenerateRequest)


def read_request(body: bytes) -> GenerateRequest:
    """InputError naming the field that is wrong, and what was expected."""
    try:
        return _REQUEST.decode(body)
    except msgspec.ValidationError as wrong:
        message, _, place = str(wrong).partition(" - at `$.")
        raise InputError(f"{place.rstrip('`')}: {message}" if place else message) from wrong
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InputError(f"the body is not JSON: {cause}") from cause


MAX_BODY = 64 << 20
"""Bytes of a request, images included."""
NICENESS = 5
GATHER_S = 0.004
QUICK_TURN_S = 0.003
"""A turn this quick, with requests closer together than two of `GATHER_S`, is preceded by a pause of that: a turn over one
row costs most of what one over twenty does."""
LONG_TURN_S = 0.02
"""A turn longer than this runs beside the event loop rather than in it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = logging.getLogger("agentlightning.sampler")


def create_app(
    sampler: Sampler,
    heartbeat: ChildHeartbeat | None = None,
    *,
    weights_key: str = "",
    weights_folder: Path | None = None,
    sampling_key: str = "",
) -> web.Application:
    """The HTTP routes: with a sampling key its holder's, but for /health. Weights are taken from the holder of the key for
    them, and from folders in `weights_folder`; from nobody where either is missing."""
    routes = _Routes(sampler, heartbeat, weights_key, weights_folder)
    app = web.Application(
        client_max_size=MAX_BODY, middlewares=asks_for(sampling_key, but=("/health", "/collective_rpc"))
    )
    app.router.add_post("/inference/v1/generate", routes.generate)
    app.router.add_post("/collective_rpc", routes.collective_rpc)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.cleanup_ctx.append(routes.run)
    return app


class _Routes:
    def __init__(
        self, sampler: Sampler, heartbeat: ChildHeartbeat | None, weights_key: str, weights_folder: Path | None
    ) -> None:
        self._sampler = sampler
        self._heartbeat = heartbeat
        self._weights_key = weights_key
        self._weights_folder = weights_folder

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        # Images and grammars may take seconds: not for an event loop.
        slow = any(name.encode() in body for name in ("content_parts", *CONSTRAINTS))
        try:
            parsed = asyncio.to_thread(self._sampler.parse, body) if slow else None
            request_id, request = self._sampler.parse(body) if parsed is None else await parsed
        except (InputError, MissingExtraError) as error:
            return refusal(400, error)
        event = self._sampler.submit(request)
        try:
            if request.streamed:
                return await _stream(http, request_id, request, event)
            await event.wait()
        finally:
            self._sampler.drop(request)
        if request.finish == "error":
            return refusal(_status(request), _not_finite(request))
        return web.Response(body=_answer(request_id, request, 0, request.finish)[0], content_type="application/json")

    async def collective_rpc(self, http: web.Request) -> web.Response:
        if not self._weights_key or not holds(http, self._weights_key):
            return refusal(401, InputError("the key for weights is missing or wrong; only the engine has it"))
        try:
            given = orjson.loads(await http.read())
            method, kwargs = given["method"], given.get("kwargs", {})
            folder, version = Path(kwargs["weights_path"]), str(kwargs["weight_version"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return refusal(400, InputError("expected method, kwargs.weights_path and kwargs.weight_version"))
        if method != "reload_weights":
            return refusal(400, InputError(f"method {method!r} is not known; reload_weights is"))
        if not _lies_in(folder, above := self._weights_folder):
            return refusal(400, InputError(f"kwargs.weights_path: expected a folder in {above}, got {folder}"))
        try:
            await self._sampler.load(folder, version)
        except ModelError as error:
            return refusal(400, error)
        return web.json_response({"results": [None]})

    async def models(self, _: web.Request) -> web.Response:
        listed = [{"object": "model", "max_model_len": self._sampler.context}]
        return web.json_response({"object": "list", "data": listed})

    async def health(self, _: web.Request) -> web.Response:
        scheduler = self._sampler.scheduler
        counts = dict(zip(("active", "waiting"), scheduler.counts, strict=True))
        about = {"images": self._sampler.reads_images, "device": scheduler.device}
        return web.json_response({"version": scheduler.version, **counts, **about})

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """The work loop, as long as the app runs."""
        beat = self._heartbeat
        tasks = [asyncio.create_task(self._sampler.run(beat.progress if beat else lambda: None))]
        if beat is not None:
            tasks.append(asyncio.create_task(beat.follow_loop(lambda: self._sampler.idle)))
        for task in tasks:
            task.add_done_callback(_end_on_failure)
        yield
        for task in tasks:
            task.cancel()


async def _stream(
    http: web.Request, request_id: str, request: SamplingRequest, event: asyncio.Event
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    sent = 0
    while True:
        await event.wait()
        event.clear()
        finish = request.finish
        if finish == "error":
            body = orjson.dumps(refusal_body(_status(request), _not_finite(request)))
        else:
            body, sent = _answer(request_id, request, sent, finish)
        await response.write(b"data: " + body + (b"\n\ndata: [DONE]\n\n" if finish else b"\n\n"))
        if finish:
            await response.write_eof()
            return response


def _answer(request_id: str, request: SamplingRequest, start: int, finish: str | None) -> tuple[bytes, int]:
    """The completion from token `start` on, and where it ends; versions come with the end of the completion. A turn in
    another thread appends a token before its logprob and sets `finish` after both, which is why the caller read `finish`
    first."""
    end = len(request.logprobs)
    tokens, logprobs = request.sampled[start:end], request.logprobs[start:end]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": _content(request, start, tokens, logprobs)},
        "finish_reason": finish,
        "stop_reason": request.stop_reason if finish else None,
    }
    if finish:
        ends = [begin for _, begin in request.versions[1:]] + [end]
        choice["weight_versions"] = [
            {"version": version, "start": begin, "end": end}
            for (version, begin), end in zip(request.versions, ends, strict=True)
            if begin < end
        ]
    body: dict[str, Any] = {"request_id": request_id, "choices": [choice]}
    if start == 0 and request.prompt_scores is not None:
        body["prompt_logprobs"] = [None, *map(_score_table, request.prompt_scores)]
    if start == 0 and request.shown_prompt is not None:
        body["prompt_token_ids"] = request.shown_prompt
    return orjson.dumps(body), end


def _score_table(scores: list[Score]) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": rank} for token, logprob, rank in scores}


def _content(request: SamplingRequest, start: int, tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    if not request.alternatives:
        return [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
    return [
        {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"token_id": other, "logprob": value} for other, value in request.top[at]],
        }
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start)
    ]


def _status(request: SamplingRequest) -> int:
    """A grammar that cannot be followed is its sender's fault, what the model computes is not."""
    return 500 if request.error is None else 400


def _not_finite(request: SamplingRequest) -> EngineError:
    version = request.versions[-1][0]
    return EngineError(request.error or f"the model's logits are not finite (weights version {version})")


def _lies_in(folder: Path, above: Path | None) -> bool:
    return above is not None and folder.resolve().parent == above.resolve()


def _end_on_failure(work: asyncio.Task[None]) -> None:
    """A fault in the work loop ends the process: the engine starts it again, and nothing waits for ever."""
    if not work.cancelled() and work.exception() is not None:
        log.critical("sampling failed", exc_info=work.exception())
        os._exit(1)


class Sampler:
    """Requests in flight over one scheduler; `run` is the loop that does the work."""

    def __init__(
        self, decoder: Decoder, scheduler: Scheduler, grammars: Grammars, long_turn_s: float = LONG_TURN_S
    ) -> None:
        self.scheduler = scheduler
        self._grammars = grammars
        self._decoder = decoder
        self._end_ids = frozenset(grammars.end_ids)
        self._long_turn_s = long_turn_s
        self._wake = asyncio.Event()
        self._events: dict[SamplingRequest, asyncio.Event] = {}
        self._loads: list[tuple[Path, str, asyncio.Future[None]]] = []
        self._arrived = 0.0
        """time.monotonic() of the last request."""
        self._loading = False

    def submit(self, request: SamplingRequest) -> asyncio.Event:
        """Queue a request; the event is set whenever it has new tokens."""
        self._events[request] = asyncio.Event()
        self._arrived = time.monotonic()
        self.scheduler.submit(request)
        self._wake.set()
        return self._events[request]

    def drop(self, request: SamplingRequest) -> None:
        """Its client is gone, or has its completion: free what it holds."""
        request.cancelled = True
        self._events.pop(request, None)

    async def load(self, folder: Path, version: str) -> None:
        """Between two turns, take other weights. Raises ModelError and keeps the old ones if they do not load."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((folder, version, loaded))
        self._wake.set()
        await loaded

    @property
    def context(self) -> int:
        """Tokens that prompt and completion may have together."""
        return self._decoder.context

    @property
    def idle(self) -> bool:
        return not (self._loading or self._loads or self.scheduler.busy)

    async def run(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Do the work, for ever; `on_progress` is called after every part of it."""
        loop = asyncio.get_running_loop()
        took_s = math.inf  # the first turn may take minutes, and health probes are answered meanwhile
        with ThreadPoolExecutor(1, "turn") as beside:
            while True:
                while self._loads:
                    folder, version, loaded = self._loads.pop(0)
                    self._loading = True
                    try:
                        await loop.run_in_executor(beside, self.scheduler.load, folder, version)
                    except ModelError as error:
                        loaded.set_exception(error)
                    else:
                        log.info("sampling with weights version %s", version)
                        loaded.set_result(None)
                    self._loading = False
                    on_progress()
                if not self.scheduler.busy:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                long_turns = took_s > self._long_turn_s
                updated, took_s = await loop.run_in_executor(beside, self._turn) if long_turns else self._turn()
                on_progress()
                for request in updated:
                    if request in self._events:
                        self._events[request].set()
                # Two passes of the loop: one reads what clients sent, one runs the handlers that this wakes.
                await asyncio.sleep(GATHER_S if took_s < QUICK_TURN_S and self._crowded() else 0)
                await asyncio.sleep(0)

    def _crowded(self) -> bool:
        """True where further requests are likely soon."""
        active, _ = self.scheduler.counts
        return 1 < active < self.scheduler.max_num_seqs // 2 and time.monotonic() - self._arrived < 2 * GATHER_S

    def _turn(self) -> tuple[list[SamplingRequest], float]:
        """A turn's updated requests and its CPU seconds: on a crowded machine the clock counts other people's work."""
        started = time.thread_time()
        updated = self.scheduler.turn()
        return updated, time.thread_time() - started

    @property
    def reads_images(self) -> bool:
        return self._decoder.images is not None

    def parse(self, body: bytes) -> tuple[str, SamplingRequest]:
        """A request id and a request, or InputError naming the field that is wrong."""
        given = read_request(body)
        params = given.sampling_params or SamplingParams()
        prompt, placed = self._check_prompt(given.token_ids), None
        if given.content_parts:
            if self._decoder.images is None:
                raise InputError("content_parts: the model has no sight; expected text only")
            if params.prompt_logprobs is not None:
                raise InputError("sampling_params.prompt_logprobs: not served for prompts with images; leave it out")
            placed = self._decoder.images.place(prompt, read_images(given.content_parts), self._decoder.context)
            prompt = placed.ids
        room = self._decoder.context - len(prompt)
        request = SamplingRequest(
            prompt=prompt,
            max_tokens=min(params.max_tokens or room, room),
            temperature=1.0 if params.temperature is None else params.temperature,
            top_p=params.top_p or 1.0,
            seed=int.from_bytes(os.urandom(8)) if params.seed is None else params.seed,
            stops=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
            stop_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._end_ids),
            streamed=bool(given.stream),
            alternatives=params.logprobs or 0,
            prompt_alternatives=params.prompt_logprobs,
            images=[] if placed is None else placed.images,
            shown_prompt=None if placed is None else placed.shown,
        )
        wanted, logits = params.structured_outputs, params.logits(self._decoder.vocab)
        if wanted is not None or logits:
            lark = None if wanted is None else structured_outputs(wanted)["lark"]
            request.constraint = Constraint(self._grammars, lark, logits, request.shown_prompt or prompt)
        return given.request_id, request

    def _check_prompt(self, ids: list[int]) -> list[int]:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._decoder.vocab:
            wrong = low if low < 0 else high
            raise InputError(f"token_ids holds {wrong}; the model's vocabulary has ids 0 to {self._decoder.vocab - 1}")
        if len(ids) >= self._decoder.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens; the model's context is {self._decoder.context}, answer included"
            )
        return ids


def _text_decoder(folder: Path) -> Callable[[list[int]], str]:
    """Ids to text; the tokenizer is loaded when the first stop string asks for it."""
    loaded: list[Any] = []

    def decode(ids: list[int]) -> str:
        if not loaded:
            from transformers import AutoTokenizer

            loaded.append(AutoTokenizer.from_pretrained(folder))
        text: str = loaded[0].decode(ids, skip_special_tokens=False)
        return text

    return decode


def open_sampler(
    folder: Path, config: EngineConfig, *, weights: str = "", version: str = "0", long_turn_s: float = LONG_TURN_S
) -> Sampler:
    """A Sampler of the model in a folder, with the weights of another where that is given."""
    tiny = is_tiny(folder)
    hardware = settle(config.device, config.dtype, tiny=tiny)
    decoder = open_decoder(folder, DTYPES[hardware.dtype], hardware.device)
    if weights:
        decoder.load(Path(weights))
    scheduler = Scheduler(
        decoder,
        max_num_seqs=config.max_num_seqs,
        decode_text=_text_decoder(folder),
        cache_bytes=hardware.cache_bytes(),
        version=version,
        device=hardware.device,
        prefill_tokens=TINY_PREFILL_TOKENS if tiny else PREFILL_TOKENS,
    )
    return Sampler(decoder, scheduler, Grammars(folder, end_ids(folder), decoder.vocab), long_turn_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentlightning.engines.local.sampler")
    parser.add_argument("--model", required=True, help="transformers folder")
    parser.add_argument("--weights-folder", type=Path, help="folder in which newer weights are published")
    parser.add_argument("--weights", default="", help="folder with newer weights of the same model")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a listening socket")
    parser.add_argument("--setup", default="{}", help="LearnerSetup as JSON, whose configuration counts")
    given = parser.parse_args(arguments)
    setup = LearnerSetup.from_json(given.setup)
    config = setup.config
    handed_down = end_with_parent()
    keep_files_private()
    heartbeat = beat_to_parent()
    logging.basicConfig(level=logging.INFO, handlers=[line_handler("%(asctime)s sampler %(message)s")])
    try:
        torch.set_num_threads(default_threads("sampler", turns=setup.turns, tiny=is_tiny(Path(given.model))))
        sampler = open_sampler(Path(given.model), config, weights=given.weights, version=given.weight_version)
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return error.exit_code
    if settle(config.device, "float32").device == "cpu":
        # Where cores are short, agents and gateway go first: they bring the requests that make a batch worth sampling.
        give_way(NICENESS)
    listener = socket.socket(fileno=given.fd)
    log.info("serving %s", given.model)
    web.run_app(
        create_app(
            sampler,
            heartbeat,
            weights_key=handed_down.get(WEIGHTS_KEY, ""),
            sampling_key=handed_down.get(SAMPLING_KEY, ""),
            weights_folder=given.weights_folder,
        ),
        sock=listener,
        access_log=None,
        print=None,
        handler_cancellation=True,
        keepalive_timeout=3600.0,
        shutdown_timeout=0.5,  # completions in flight are sampled again by whoever asked
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
