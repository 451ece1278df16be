"""Weights of model versions: a model setting that names one, and exports for other programs.

Driven by the command line and `Trainer`, before a run starts. Knows what saved folders hold, nothing of engines.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import orjson

from agentlightning.config.run import Config
from agentlightning.engines.folders import MANIFEST, UrlFolder, damage, first_line, new_folder
from agentlightning.errors import ConfigError, InputError, MissingExtraError, NotFoundError, StoreError
from agentlightning.runtime.children import inheritable
from agentlightning.runtime.disk import file_hash, make_private_folder
from agentlightning.store.models import ModelVersion, is_reference
from agentlightning.store.open import existing_store
from agentlightning.store.scan import find_model_version
from agentlightning.trainer.checkpoint import export_policy
from agentlightning.trainer.checkpoint_files import ADAPTER
from agentlightning.trainer.interrupts import run_interruptible

ExportFormat = Literal["hf", "peft", "gguf"]
GGUF_PROGRAMS = ("convert_hf_to_gguf.py", "convert_hf_to_gguf", "convert-hf-to-gguf")
"""Names under which llama.cpp's converter is installed."""


def with_versions(config: Config, runs: Path) -> Config:
    """The configuration with the folder of each model version that model.path, or a policy's model, names.

    The version is that of now: a run keeps it, however its alias moves. NotFoundError where there is no such version.
    """
    named = {"": config.model.path} | {alias: one.model or "" for alias, one in config.policies.items()}
    wanted = {alias: text for alias, text in named.items() if is_reference(text) and not Path(text).exists()}
    if not wanted:
        return config
    folders = run_interruptible(partial(_folders, config.store.url, wanted, runs))
    policies = {
        alias: one.model_copy(update={"model": str(folders[alias])}) if alias in folders else one
        for alias, one in config.policies.items()
    }
    path = str(folders.get("", config.model.path))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path}), "policies": policies})


async def _folders(store: str, wanted: dict[str, str], runs: Path) -> dict[str, Path]:
    async with existing_store(store) as opened:
        found = {}
        for alias, text in wanted.items():
            where = f"policies.{alias}.model" if alias else "model.path"
            found[alias] = await version_folder(await find_model_version(opened, text, where), runs)
        return found


def export_version(version: ModelVersion, folder: Path, to: Path, format: ExportFormat) -> Path:
    """Write a version's weights to the new folder `to`; returns it, or the file in it.

    hf: a folder that transformers and vLLM load. peft: the low-rank adapter alone, which peft loads over the base model.
    gguf: one file for llama.cpp, by its converter. folder: that of the weights. ConfigError where `to` is not empty, or
    there is no such form of this version.
    """
    if format == "hf":
        return export_policy(folder, to)
    return _export_adapter(version, folder, to) if format == "peft" else _export_gguf(version, folder, to)


def _export_adapter(version: ModelVersion, folder: Path, to: Path) -> Path:
    adapter = folder / ADAPTER
    if not adapter.is_dir():
        raise ConfigError(
            f"--format: {version.reference} was trained as a whole and has no adapter; expected hf or gguf"
        )
    with new_folder(to) as made:
        shutil.copytree(adapter, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        file = made / "adapter_config.json"
        table = orjson.loads(file.read_bytes()) | {"base_model_name_or_path": version.base_model}
        file.write_bytes(orjson.dumps(table, option=orjson.OPT_INDENT_2) + b"\n")
    return to


def _export_gguf(version: ModelVersion, folder: Path, to: Path) -> Path:
    program = next((found for name in GGUF_PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise ConfigError(
            f"--format: gguf needs llama.cpp's converter, and none of {', '.join(GGUF_PROGRAMS)} is on the PATH; put it "
            "there (https://github.com/ggml-org/llama.cpp), or export hf and convert that"
        )
    name = f"{version.name}-{version.number}.gguf"
    with new_folder(to) as made, TemporaryDirectory(dir=to.parent) as whole:
        export_policy(folder, Path(whole))
        words, environment = [program, whole, "--outfile", str(made / name)], inheritable(os.environ)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not (made / name).is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[-1]
            raise StoreError(f"{version.reference}: {Path(program).name} could not convert it: {last[-500:]}")
    return to / name


def push_folder(folder: Path, name: str, endpoint: str | None = None) -> str:
    """Uploads a folder to a model hub as OWNER/NAME; returns the address of the commit.

    A repository that is not there is made, private: its owner publishes it on the hub. endpoint: of the hub, by default
    HF_ENDPOINT or huggingface.co; its token is huggingface_hub's (HF_TOKEN, or a login). InputError for no such name,
    StoreError where the hub refuses.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"--to: expected hub:OWNER/NAME, got {name!r:.200}")
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as cause:
        raise MissingExtraError(str(cause.name), "train") from cause
    hub = HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT"))
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        return hub.upload_folder(repo_id=name, folder_path=folder, commit_message="agl models export").commit_url
    except Exception as cause:  # its errors of transport are those of a library that differs by version
        raise StoreError(f"hub:{name}: {first_line(cause)}") from cause


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
