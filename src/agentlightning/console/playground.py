"""The playground: one message to two models side by side, each with a system prompt of its own; promotion of either.

Made with Gradio, which it needs (extra ``console``), and mounted at /playground when somebody first opens that. Models are
registered versions and what they were trained from: their safetensors are loaded by transformers on this host's processors,
no code of theirs is run, and nothing that is said here is stored.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from agentlightning.analysis.intervals import paired_bootstrap
from agentlightning.analysis.rollout_view import content_text
from agentlightning.console.reader import Reader
from agentlightning.console.render import interval, number
from agentlightning.errors import AgentLightningError, InputError, ModelError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.models import is_reference
from agentlightning.store.scan import find_model_version
from agentlightning.store.templates import CandidateRecord, read_candidates, validation_rewards
from agentlightning.trainer.model_weights import version_folder

PATH = "/playground"
NEEDS = ("gradio", "torch", "transformers")
ROLE = "agl.role"
"""Key of a request's scope that holds the sender's role."""
BASE = "base of "
"""Beginning of the name of the model that a version was trained from."""
MAX_VERSIONS = 100
MAX_LOADED = 2
MAX_CHARS = 20_000
"""Bound of a conversation with one model."""
MAX_TOKENS = 512

Messages = list[dict[str, str]]
Complete = Callable[[str, Messages, float, int], str]
"""The completion of a conversation by the model in a folder (or of a hub name that this host has), at a temperature, with at
most so many tokens."""


def is_installed() -> bool:
    """True where all that it needs can be imported."""
    return all(importlib.util.find_spec(name) for name in NEEDS)


class Playground:
    """An ASGI application, made when it is first asked for something: Gradio takes seconds to import."""

    def __init__(self, reader: Reader, complete: Complete | None = None) -> None:
        self._reader = reader
        self._complete = complete or Transformers()
        self._app: FastAPI | None = None
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._worker = ThreadPoolExecutor(1, "playground")
        """One completion at a time: the pages have the other processors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opening:
            if self._app is None:
                app = await asyncio.to_thread(self._mounted)
                await self._stack.enter_async_context(app.router.lifespan_context(app))
                self._app = app
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Ends what it started; a completion that is under way is not waited for."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        await self._stack.aclose()

    def _mounted(self) -> FastAPI:
        from agentlightning.console.playground_page import mounted

        return mounted(self)

    async def models(self) -> list[str]:
        """Names of the models to choose from: the newest versions first, then what they were trained from."""
        found = [one for one in await self._reader.store.models() if not one.deleted][-MAX_VERSIONS:][::-1]
        bases = {one.base_model: BASE + one.reference for one in found}
        return [*(one.reference for one in found), *bases.values()]

    async def prompt(self, query: Mapping[str, str], side: str) -> str:
        """The text of the run's prompt that an address names for a side: ``run=RUN&prompt_a=NAME@VERSION``."""
        name, _, version = query.get(f"prompt_{side}", "").rpartition("@")
        if not name or not version.isdigit():
            return ""
        found = await self._reader.store.resources(query.get("run", ""), name, latest=False)
        return next((str(one.value.get("template", "")) for one in found if one.version == int(version)), "")

    async def paired(self, query: Mapping[str, str]) -> str:
        """The rewards that a search recorded of the two prompts of an address, paired by task; '' where it has none."""
        run_id, chosen = query.get("run", ""), [query.get(f"prompt_{side}", "") for side in "ab"]
        if not run_id or not all(chosen):
            return ""
        try:
            candidates = await read_candidates(self._reader.store, run_id)
        except NotFoundError:
            return ""
        rewards = await validation_rewards(self._reader.store, run_id)
        first, second = (_rewards(candidates, rewards, one) for one in chosen)
        both = [(first[task], second[task]) for task in first if task in second]
        if (difference := paired_bootstrap([a - b for a, b in both])) is None:
            return ""
        a, b = (number(statistics.fmean(side), 2) for side in zip(*both, strict=True))
        return f"Recorded over {len(both)} validation tasks of both: A {a}, B {b}; A less B {interval(difference)}"

    async def answer(
        self, model: str, system: str, said: Sequence[Mapping[str, Any]], temperature: float, tokens: int
    ) -> str:
        """The completion of a conversation by a model, or the sentence that says why there is none."""
        messages = [{"role": "system", "content": system}] if system.strip() else []
        messages += [{"role": str(one["role"]), "content": content_text(one["content"])} for one in said]
        if sum(len(one["content"]) for one in messages) > MAX_CHARS:
            return f"(expected at most {MAX_CHARS:,} characters; clear the conversation)"
        try:
            folder = await model_place(self._reader.store, model)
            work = self._worker.submit(self._complete, folder, messages, temperature, min(tokens, MAX_TOKENS))
            return await asyncio.wrap_future(work)
        except AgentLightningError as error:
            return f"({error})"

    async def promote(self, model: str, alias: str, role: str) -> str:
        """Moves an alias to a version; the sentence that says so. InputError for a role that only reads."""
        if role != "admin":
            raise InputError("promote: expected the server's key; a reader's token only reads")
        version = await find_model_version(self._reader.store, model)
        moved = await self._reader.store.set_alias(version.name, alias.removeprefix("@"), version.number)
        return f"{moved.name}@{moved.alias} is version {moved.number}; before: {moved.previous or 'none'}"


def _rewards(
    candidates: Sequence[CandidateRecord], rewards: Mapping[int, Mapping[int, float]], prompt: str
) -> Mapping[int, float]:
    """Rewards by validation task of the first candidate that has a prompt version, NAME@VERSION."""
    name, _, version = prompt.rpartition("@")
    numbers = (one.number for one in candidates if str(one.versions.get(name)) == version)
    return rewards.get(next((one for one in numbers if one is not None), -1), {})


async def model_place(store: LightningStore, model: str) -> str:
    """The folder of a model's weights, or its hub name. NotFoundError where it is not on this host."""
    if not model.startswith(BASE):
        return str(await version_folder(await find_model_version(store, model), Path("runs")))
    base = (await find_model_version(store, model.removeprefix(BASE))).base_model
    return await model_place(store, base) if is_reference(base) else base


class Transformers:
    """Completes with models that it keeps loaded, the ones used last."""

    def __init__(self) -> None:
        self._loaded: LRUCache[str, tuple[Any, Any]] = LRUCache(MAX_LOADED)

    def __call__(self, folder: str, messages: Messages, temperature: float, tokens: int) -> str:
        import torch

        try:
            model, tokenizer = self._loaded.get(folder) or self._load(folder)
            as_prompt = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            given = tokenizer.apply_chat_template(messages, **as_prompt)
            how = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
            )
            with torch.inference_mode():
                ids = model.generate(**given, max_new_tokens=tokens, **how)
        except (OSError, ValueError, RuntimeError, ImportError, KeyError) as cause:
            raise ModelError(f"{folder}: no completion: {cause}") from cause
        return str(tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    def _load(self, folder: str) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        safe = {"local_files_only": True, "trust_remote_code": False}  # a record names it: no download, no code
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **safe)
        self._loaded[folder] = model, tokenizer
        return self._loaded[folder]
