"""WeightsUrl: the weights that are being published at a URL, for vLLM servers that fetch them from an object store.

VllmServers drives it where weights are transferred so; agentlightning_vllm.fetch reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from agentlightning.engines.local.parts import PublishedWeights
from agentlightning.engines.saved_folders import MANIFEST
from agentlightning.engines.url_folder import UrlFolder


class WeightsUrl:
    def __init__(self, url: str, work_dir: Path) -> None:
        """work_dir: of the engine; of the run's folder, or of a policy's in it, it has the names that no other run has."""
        path = work_dir.resolve()
        name = f"{path.parents[1].name}/{path.name}" if path.parent.name == "policies" else path.name
        self._folder = UrlFolder(f"{url}/{name}")
        self._last: str | None = None

    async def copy(self, weights: PublishedWeights) -> None:
        """Copy these weights there. Those before them stay, which a server may be fetching; older ones go, also those that
        a process left which was killed. StoreError where that cannot be."""
        for file, announced in _files(weights).items():
            await self._folder.put(weights.folder / file, f"{_name(weights)}/{file}", announced["bytes"])
        kept = {self._last, _name(weights)}
        self._last = _name(weights)
        for name in await self._folder.names():
            if name not in kept:
                await self._folder.delete(name)

    async def close(self) -> None:
        """Delete what is there: servers that run on have what they sample with."""
        for name in await self._folder.names():
            await self._folder.delete(name)

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        """The update_info by which a server fetches these weights."""
        hashes = {file: announced["sha256"] for file, announced in _files(weights).items()}
        return {"url": f"{self._folder.url}/{_name(weights)}", "files": hashes}


def _name(weights: PublishedWeights) -> str:
    return f"v{weights.version}"


def _files(weights: PublishedWeights) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of the safetensors files."""
    files = orjson.loads((weights.folder / MANIFEST).read_bytes())["files"]
    return {name: announced for name, announced in files.items() if Path(name).suffix == ".safetensors"}
