"""Model files: the folder of a registered version's weights on this host, copied from its URL where it is at one.

Driven by whoever serves, evaluates, trains on from or exports a version. Weights that are not as they were
registered are refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentlightning.engines.saved_folders import MANIFEST, damage
from agentlightning.engines.url_folder import UrlFolder
from agentlightning.errors import NotFoundError
from agentlightning.runtime.disk import file_hash, make_private_folder
from agentlightning.store.models import ModelVersion

FETCHED = "models"
"""Folder beside those of the runs for weights that were copied from an object store."""


async def version_folder(version: ModelVersion, runs: Path) -> Path:
    """A whole transformers folder; one at the URL of an object store is copied to `runs` once.

    NotFoundError where the weights are deleted, damaged, others than were registered, or on another host.
    """
    if version.deleted:
        raise NotFoundError(f"{version.reference}: its weights were deleted")
    url, known = str(version.weights["url"]), str(version.weights.get("manifest_hash") or "")
    if "://" in url and not url.startswith("file://"):
        folder = (runs / FETCHED / f"{version.name}-{version.number}").resolve()
        if await asyncio.to_thread(_wrong, folder, known) is not None:
            make_private_folder(folder.parent)
            if (found := await UrlFolder(url).download(known, folder)) is not None:
                raise NotFoundError(f"{version.reference}: its weights in {url} are {found or 'not there'}")
        return folder
    folder = Path(url.removeprefix("file://"))
    if not await asyncio.to_thread(folder.is_dir):
        raise NotFoundError(
            f"{version.reference}: its weights in {url} are not here; use it on the host that has them, or train with "
            "trainer.checkpoint_url"
        )
    if (found := await asyncio.to_thread(_wrong, folder, known)) is not None:
        raise NotFoundError(f"{version.reference}: its weights in {folder} are damaged: {found}")
    return folder


def _wrong(folder: Path, known: str) -> str | None:
    """Says in which way a folder is not the one whose manifest has this hash; None where it is. Any is, without a hash."""
    manifest = folder / MANIFEST
    if known and not (manifest.is_file() and file_hash(manifest) == known):
        return f"{MANIFEST} is not what was registered"
    return damage(folder)
