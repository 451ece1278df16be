"""Renderers: the renderer of every policy, loaded once: of a folder of this host, or of files of the run in the store.

Driven by engine_router.py. A trainer on another host has its model's folder there, and puts what renders into the store:
what it puts is bounded here, since it shares this host's memory and disk with all other runs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from agentlightning.errors import EngineError
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore

Tokenizer = str | Mapping[str, str]
"""A folder of this host, or files of the run: SHA-256 by name."""

MAX_LOADED = 64
"""Renderers that are kept; one that a policy still has stays longer."""
MAX_FILES = 64
MAX_BYTES = 256 << 20
"""Of one tokenizer's files in the store; the largest vocabularies take 40 MiB."""


class Renderers:
    def __init__(
        self, store: LightningStore, load: Callable[[str], Renderer] = Renderer, max_loaded: int = MAX_LOADED
    ) -> None:
        self._store = store
        self._load = load
        self._max_loaded = max_loaded
        self._loading: OrderedDict[bytes, asyncio.Task[Renderer]] = OrderedDict()
        """The one used last comes last."""
        self._places: weakref.WeakSet[TemporaryDirectory[str]] = weakref.WeakSet()

    def close(self) -> None:
        """Remove the files; a second call does nothing."""
        for place in list(self._places):
            place.cleanup()

    async def find(self, run_id: str, tokenizer: Tokenizer) -> Renderer:
        """The renderer of a run's policy. ModelError where it does not load, EngineError where the store lacks files."""
        key = orjson.dumps(tokenizer, option=orjson.OPT_SORT_KEYS)
        loading = self._loading.get(key)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = self._loading[key] = asyncio.create_task(self._loaded(run_id, tokenizer))
        self._loading.move_to_end(key)
        while len(self._loading) > self._max_loaded:
            self._loading.popitem(last=False)
        return await asyncio.shield(loading)

    async def _loaded(self, run_id: str, tokenizer: Tokenizer) -> Renderer:
        if isinstance(tokenizer, str):
            return await asyncio.to_thread(self._load, tokenizer)
        try:
            place = TemporaryDirectory(prefix="agentlightning-tokenizer-", ignore_cleanup_errors=True)
        except OSError as cause:
            raise EngineError(f"the policy's tokenizer: this host has no place for its files: {cause}") from cause
        self._places.add(place)
        try:
            await self._fetch(run_id, tokenizer, Path(place.name))
            renderer = await asyncio.to_thread(self._load, place.name)
        except BaseException:
            place.cleanup()
            raise
        weakref.finalize(renderer, place.cleanup)  # processors and grammars read it when they are first used
        return renderer

    async def _fetch(self, run_id: str, names: Mapping[str, str], folder: Path) -> None:
        """Writes the files into the folder, one in memory at a time."""
        left = MAX_BYTES if len(names) <= MAX_FILES else 0
        for name, expected in names.items():
            if Path(name).name != name or name.startswith("."):
                raise EngineError(f"the policy's tokenizer: expected plain names of files, got {name[:80]!r}")
            data = (await self._store.files(run_id, [expected])).get(expected)
            if data is None or sha256(data).hexdigest() != expected:
                raise EngineError(f"the policy's tokenizer: the store does not have {name[:80]!r} as it was put there")
            left -= len(data)
            if left < 0:
                most = f"{MAX_FILES} files, {MAX_BYTES >> 20} MiB in all"
                raise EngineError(f"the policy's tokenizer: expected at most {most}")
            try:
                await asyncio.to_thread((folder / name).write_bytes, data)
            except (
                OSError,
                ValueError,
            ) as cause:  # as itself it would be taken for the engine's connection, and tried again
                raise EngineError(f"the policy's tokenizer: {name[:80]!r} cannot be written here: {cause}") from cause
