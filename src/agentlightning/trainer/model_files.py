"""Model files: the folder of a registered version's weights on this host, copied from its URL where it is at one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentlightning.engines.saved_folders import damage
from agentlightning.engines.url_folder import UrlFolder
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.model_versions import ModelVersion


async def version_folder(store: LightningStore, version: ModelVersion, runs: Path) -> Path:
    """A whole transformers folder. NotFoundError where the weights are deleted, damaged, or on another host."""
    if version.deleted:
        raise NotFoundError(f"{version.reference}: its weights were deleted")
    url, manifest_hash = str(version.weights["url"]), str(version.weights.get("manifest_hash") or "")
    if "://" not in url:
        folder = Path(url)
        if not await asyncio.to_thread(folder.is_dir):
            raise NotFoundError(
                f"{version.reference}: its weights in {url} are not here; serve it on the host that has them"
            )
    else:
        folder = runs / "models" / f"{version.name}-{version.number}"
        if not await asyncio.to_thread(folder.is_dir) or await asyncio.to_thread(damage, folder) is not None:
            await UrlFolder(url).download(manifest_hash, folder)
    if (found := await asyncio.to_thread(damage, folder)) is not None:
        raise NotFoundError(f"{version.reference}: its weights in {folder} are damaged: {found}")
    return folder
