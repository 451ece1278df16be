"""The sampler process: token ids in, token ids out, over HTTP (vLLM's /inference/v1/generate route).

    python -m agentlightning.engines.local.sampler --model DIR --fd N [--options JSON]

The engine starts it on a listening socket of its own, so that a restarted sampler keeps its port. One thread does both the
arithmetic and HTTP, taking turns: at tiny sizes two threads would spend their time handing the interpreter lock to each
other after every kernel. Where a turn takes long (large models), it runs in a worker thread and HTTP goes on beside it.
The routes are sampler_app.py's. Refuses to know agents, messages and rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from aiohttp import web

from agentlightning.engines.local.decoder import Decoder, open_decoder
from agentlightning.engines.local.decoding import Constraint
from agentlightning.engines.local.device import settle
from agentlightning.engines.local.options import WEIGHTS_KEY, SamplerOptions
from agentlightning.engines.local.sampler_app import create_app
from agentlightning.engines.local.sampling_params import (
    MAX_LOGPROBS,
    check_names,
    number,
    read_logits,
    read_seed,
    read_stop_ids,
    read_stops,
)
from agentlightning.engines.local.scheduler import SamplingRequest, Scheduler
from agentlightning.engines.local.vision import place_images
from agentlightning.engines.sampling_key import SAMPLING_KEY
from agentlightning.errors import AgentLightningError, InputError, ModelError, printable
from agentlightning.rendering.grammar import structured_outputs
from agentlightning.rendering.grammar_masks import Grammars
from agentlightning.rendering.model_folder import end_ids
from agentlightning.runtime.children import end_with_parent, give_way, keep_files_private
from agentlightning.runtime.log_lines import line_handler
from agentlightning.runtime.watchdog import beat_to_parent

NICENESS = 5
GATHER_S = 0.004
QUICK_TURN_S = 0.003
"""Below this turn time, with requests closer together than two of `GATHER_S`, every turn is preceded by a
pause of it: a turn over one row costs most of what one over twenty does, and the pause is time for those who ask."""
LONG_TURN_S = 0.02
"""A turn longer than this runs beside the event loop rather than in it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
log = logging.getLogger("agentlightning.sampler")


class Sampler:
    """Requests in flight over one scheduler; `run` is the loop that does the work."""

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        grammars: Grammars,
        long_turn_s: float = LONG_TURN_S,
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
        """Its client is gone or has its completion: free what it holds."""
        request.cancelled = True
        self._events.pop(request, None)

    async def load(self, folder: Path, version: str) -> None:
        """Between two turns, take other weights. Raises ModelError and keeps the old ones where they do not load."""
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
        """True where there is nothing to do."""
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
        """A turn's updated requests and its CPU seconds; on a crowded machine the clock would count other people's work."""
        started = time.thread_time()
        updated = self.scheduler.turn()
        return updated, time.thread_time() - started

    def parse(self, body: bytes) -> tuple[str, SamplingRequest]:
        """A request id and a request, or InputError naming the field that is wrong. Images may take seconds: not for an
        event loop."""
        try:
            given = orjson.loads(body)
        except orjson.JSONDecodeError as cause:
            raise InputError(f"the body is not JSON: {cause}") from cause
        if not isinstance(given, dict):
            raise InputError("the body must be a JSON object")
        prompt = self._prompt(given.get("token_ids"))
        sampling = given.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise InputError("sampling_params must be an object")
        check_names(sampling)
        placed = place_images(self._decoder, prompt, given.get("content_parts"))
        if placed is not None and sampling.get("prompt_logprobs") is not None:
            raise InputError("sampling_params.prompt_logprobs: not served for prompts with images; leave it out")
        prompt = prompt if placed is None else placed.ids
        room = self._decoder.context - len(prompt)
        max_tokens = number(sampling, "max_tokens", room, 1, float("inf"), whole=True)
        seed, ends = read_seed(sampling), read_stop_ids(sampling)
        return str(given.get("request_id", "")), SamplingRequest(
            prompt=prompt,
            max_tokens=int(min(max_tokens, room)),
            temperature=number(sampling, "temperature", 1.0, 0.0, float("inf")),
            top_p=number(sampling, "top_p", 1.0, 0.0, 1.0, above=True),
            seed=int.from_bytes(os.urandom(8)) if seed is None else seed,
            stops=read_stops(sampling),
            stop_ids=ends | (frozenset() if sampling.get("ignore_eos") else self._end_ids),
            streamed=bool(given.get("stream", False)),
            alternatives=int(number(sampling, "logprobs", 0, 0, MAX_LOGPROBS, whole=True)),
            prompt_alternatives=None
            if sampling.get("prompt_logprobs") is None
            else int(number(sampling, "prompt_logprobs", 0, 0, MAX_LOGPROBS, whole=True)),
            images=[] if placed is None else placed.images,
            shown_prompt=None if placed is None else placed.shown,
        )

    def constraint(self, body: bytes, request: SamplingRequest) -> Constraint | None:
        """The grammar, penalties and cuts of a request that `parse` has read. InputError naming the field that is wrong.

        A grammar may take a second to compile: not for an event loop.
        """
        sampling = orjson.loads(body).get("sampling_params") or {}
        wanted = sampling.get("structured_outputs")
        lark = None
        if wanted is not None:
            if not isinstance(wanted, dict):
                raise InputError("sampling_params.structured_outputs must be an object")
            lark = structured_outputs(wanted)["lark"]
        logits = read_logits(sampling, self._decoder.vocab)
        return (
            Constraint(self._grammars, lark, logits, request.shown_prompt or request.prompt) if lark or logits else None
        )

    def _prompt(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise InputError("token_ids must be a list of at least one token id")
        try:
            array = np.array(ids)
        except ValueError:  # a ragged list
            array = np.array(None)
        if array.ndim != 1 or array.dtype.kind != "i":
            raise InputError("token_ids must be a list of whole numbers")
        low, high = int(array.min()), int(array.max())
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
    folder: Path, options: SamplerOptions, *, weights: str = "", version: str = "0", long_turn_s: float = LONG_TURN_S
) -> Sampler:
    """A Sampler of the model in a folder, with the weights of another where that is given."""
    torch.set_num_threads(options.threads)
    hardware = settle(options.device, options.dtype)
    decoder = open_decoder(folder, DTYPES[hardware.dtype], hardware.device)
    if weights:
        decoder.load(Path(weights))
    scheduler = Scheduler(
        decoder,
        max_num_seqs=options.max_num_seqs,
        decode_text=_text_decoder(folder),
        cache_bytes=hardware.cache_bytes(options.kv_cache_memory_gb),
        version=version,
        device=hardware.device,
    )
    return Sampler(decoder, scheduler, Grammars(folder, end_ids(folder), decoder.vocab), long_turn_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentlightning.engines.local.sampler")
    parser.add_argument("--model", required=True, help="transformers folder")
    parser.add_argument("--weights-folder", type=Path, help="folder in which newer weights are published")
    parser.add_argument("--weights", default="", help="folder with newer weights of the same model")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a listening socket")
    parser.add_argument("--options", default="{}", help="SamplerOptions as JSON")
    given = parser.parse_args(arguments)
    options = SamplerOptions(**json.loads(given.options))
    handed_down = end_with_parent()
    keep_files_private()
    heartbeat = beat_to_parent()
    logging.basicConfig(level=logging.INFO, handlers=[line_handler("%(asctime)s sampler %(message)s")])
    try:
        sampler = open_sampler(Path(given.model), options, weights=given.weights, version=given.weight_version)
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return error.exit_code
    if settle(options.device, "float32").device == "cpu":
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
