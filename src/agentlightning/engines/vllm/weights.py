"""Places from which vLLM servers that share no path with this machine fetch weights: this process, over HTTP, or a URL.

VllmServers drives them; agentlightning_vllm.fetch reads what they announce.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Any, Protocol

import orjson
from aiohttp import web

from agentlightning.engines.local.parts import PublishedWeights
from agentlightning.engines.saved_folders import MANIFEST
from agentlightning.engines.url_folder import UrlFolder
from agentlightning.runtime.children import listen


class WeightsSource(Protocol):
    """A place from which servers fetch weights."""

    async def start(self) -> None: ...

    async def put(self, weights: PublishedWeights) -> None:
        """Have these weights there; servers may still be fetching those before them. Raises StoreError."""
        ...

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        """The update_info by which a server fetches these weights."""
        ...

    async def close(self) -> None: ...


class WeightsServer:
    """Gives the safetensors files of the weights that were published last, and nothing else, to holders of the key."""

    def __init__(self, host: str) -> None:
        """host: by which servers know this machine."""
        self._host = host
        self._key = secrets.token_urlsafe(32)
        self._url = ""
        self._weights: PublishedWeights | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens on a free port. Raises OSError where the host is no address of this machine."""
        app = web.Application()
        app.router.add_get("/{version}/{file}", self._give)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        listener = listen(self._host.strip("[]"), 0)
        await web.SockSite(self._runner, listener).start()
        self._url = f"http://{self._host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def put(self, weights: PublishedWeights) -> None:
        self._weights = weights

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        return {"url": f"{self._url}/{weights.version}", "key": self._key, "files": _hashes(weights)}

    async def _give(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized
        weights, file = self._weights, http.match_info["file"]
        if weights is None or http.match_info["version"] != str(weights.version) or Path(file).suffix != ".safetensors":
            raise web.HTTPNotFound
        return web.FileResponse(weights.folder / Path(file).name)


class WeightsUrl:
    """A folder of an object store or a shared disk."""

    def __init__(self, url: str, work_dir: Path) -> None:
        """work_dir: of the engine; of the run's folder, or of a policy's in it, it has the names that no other run has."""
        path = work_dir.resolve()
        name = f"{path.parents[1].name}/{path.name}" if path.parent.name == "policies" else path.name
        self._folder = UrlFolder(f"{url}/{name}")
        self._last: str | None = None

    async def start(self) -> None:
        """Nothing is started."""

    async def put(self, weights: PublishedWeights) -> None:
        """Those before them stay, which a server may be fetching; older ones go, also those of a process that was killed."""
        name = f"v{weights.version}"
        for file, announced in _files(weights).items():
            await self._folder.put(weights.folder / file, f"{name}/{file}", announced["bytes"])
        kept, self._last = {self._last, name}, name
        for other in await self._folder.names():
            if other not in kept:
                await self._folder.delete(other)

    async def close(self) -> None:
        """Delete what is there: servers that run on have what they sample with. Raises StoreError."""
        for name in await self._folder.names():
            await self._folder.delete(name)

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        return {"url": f"{self._folder.url}/v{weights.version}", "files": _hashes(weights)}


def _hashes(weights: PublishedWeights) -> dict[str, str]:
    return {file: announced["sha256"] for file, announced in _files(weights).items()}


def _files(weights: PublishedWeights) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of the safetensors files."""
    files = orjson.loads((weights.folder / MANIFEST).read_bytes())["files"]
    return {name: announced for name, announced in files.items() if Path(name).suffix == ".safetensors"}
