"""Renderers: the renderer of every policy, loaded once: of a folder of this host, or of files of the run in the store.

Driven by engine_router.py. A trainer on another host has its model's folder there, and puts what renders into the store.
"""

from __future__ import annotations

import asyncio
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


class Renderers:
    def __init__(self, store: LightningStore, load: Callable[[str], Renderer] = Renderer) -> None:
        self._store = store
        self._load = load
        self._loading: dict[bytes, asyncio.Task[Renderer]] = {}
        self._place: TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Remove the files; a second call does nothing."""
        if self._place is not None:
            self._place.cleanup()
        self._place = None

    async def find(self, run_id: str, tokenizer: Tokenizer) -> Renderer:
        """The renderer of a run's policy. ModelError where it does not load, EngineError where the store lacks files."""
        key = orjson.dumps(tokenizer, option=orjson.OPT_SORT_KEYS)
        loading = self._loading.get(key)
        if loading is None or (loading.done() and loading.exception() is not None):
            loading = self._loading[key] = asyncio.create_task(self._loaded(run_id, tokenizer, key))
        return await asyncio.shield(loading)

    async def _loaded(self, run_id: str, tokenizer: Tokenizer, key: bytes) -> Renderer:
        if not isinstance(tokenizer, str):
            files = await self._store.files(run_id, [*tokenizer.values()])
            tokenizer = await asyncio.to_thread(self._written, tokenizer, files, sha256(key).hexdigest())
        return await asyncio.to_thread(self._load, tokenizer)

    def _written(self, names: Mapping[str, str], files: Mapping[str, bytes], folder: str) -> str:
        """Writes the files into a folder and returns it. Processors and grammars read it when they are first used."""
        self._place = self._place or TemporaryDirectory(prefix="agentlightning-tokenizers-", ignore_cleanup_errors=True)
        path = Path(self._place.name) / folder
        path.mkdir(exist_ok=True)
        for name, expected in names.items():
            if Path(name).name != name or name.startswith("."):
                raise EngineError(f"the policy's tokenizer: expected plain names of files, got {name[:80]!r}")
            data = files.get(expected)
            if data is None or sha256(data).hexdigest() != expected:
                raise EngineError(f"the policy's tokenizer: the store does not have {name[:80]!r} as it was put there")
            (path / name).write_bytes(data)
        return str(path)
