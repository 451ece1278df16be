"""WeightsServer: gives the weights that are being published to vLLM servers that share no path with this machine.

VllmServers starts it where weights are transferred; agentlightning_vllm.worker fetches from it. It gives nothing but the
safetensors files of that one folder, to whoever has the key.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from agentlightning.engines.local.parts import PublishedWeights
from agentlightning.engines.saved_folders import MANIFEST
from agentlightning.runtime.children import listen


class WeightsServer:
    def __init__(self, host: str) -> None:
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
        listener = listen(self._host, 0)
        await web.SockSite(self._runner, listener).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        """The update_info by which a server fetches these weights, and no others from now on."""
        self._weights = weights
        files = orjson.loads((weights.folder / MANIFEST).read_bytes())["files"]
        hashes = {name: file["sha256"] for name, file in files.items() if Path(name).suffix == ".safetensors"}
        return {"url": f"{self._url}/{weights.version}", "key": self._key, "files": hashes}

    async def _give(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized
        weights, file = self._weights, http.match_info["file"]
        if weights is None or http.match_info["version"] != str(weights.version) or Path(file).suffix != ".safetensors":
            raise web.HTTPNotFound
        return web.FileResponse(weights.folder / Path(file).name)
