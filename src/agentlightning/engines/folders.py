"""Folders: models by folder or hub name, and saved folders, known to be whole by a manifest of sizes and hashes.

Learners write checkpoints, the trainer chooses the one to resume from, and UrlFolder copies them to an object store or a
shared disk and back. A power cut leaves whatever had reached the disk: a file may be there, named and empty. Without torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import os
import shutil
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from agentlightning.config.base import checked_folder_url
from agentlightning.errors import ConfigError, MissingExtraError, ModelError, StoreError
from agentlightning.rendering.model_folder import CHAT_TEMPLATES
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.disk import file_hash, make_private_folder, open_private, sync

T = TypeVar("T")

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "processor_config.json"),
    "preprocessor_config.json",
)
MANIFEST = "manifest.json"
LEARNER_STATE, LEARNER_FOLDER = "learner.pt", "learner"
"""A learner's state beside the weights of a saved policy: a file that is never empty, and a folder for what does not go into
one file. An exported policy has neither."""
REPLACED = ".replaced"
"""Suffix of a folder on its way out, while another takes its name."""


def find_model(name: str | Path) -> Path:
    """The folder of a model given by folder or hub name; a hub model is downloaded unless it is cached."""
    check_model(folder := locate_model(str(name)))
    return folder


def locate_model(name: str) -> Path:
    """Like `find_model`, whatever is in the folder."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"model {name}: neither a folder here nor a model that the Hugging Face hub serves ({first_line(cause)})"
        ) from cause


def check_model(folder: Path) -> None:
    """ModelError, naming the folder, unless it looks like a transformers model with weights."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model {folder}: it holds an adapter (adapter_config.json); expected a model that has it merged into its "
            f"weights, as `agl models import {folder}` makes one"
        )
    check_files(folder)
    for file in sorted(folder.glob("*.json")):
        with file.open("rb") as opened:
            if opened.read(len(BOM_UTF8)) == BOM_UTF8:
                raise ModelError(
                    f"model {folder}: {file.name} begins with a byte order mark, which transformers does not read; save it "
                    f"as UTF-8 without one, or train the copy that `agl models import {folder}` makes"
                )


def check_files(folder: Path) -> None:
    """ModelError where a file is missing without which there is no model."""
    if not folder.is_dir():
        raise ModelError(f"model {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {folder}: not a transformers model folder (it has no config.json)")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model {folder}: it has no weights (*.safetensors)")


def context_length(config: Any) -> int:
    """Positions the model has, or fewer where some layer sees a window: inside the window all attention is the same."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None) or 2048
    return min(longest, windowed) if windowed else int(longest)


TINY_PARAMETERS = 10_000_000
"""A model with fewer was trained from scratch for one task; its defaults are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    parameters: int | None
    """None: not known."""
    context: int
    """Positions that it has."""

    @property
    def tiny(self) -> bool:
        return self.parameters is not None and self.parameters < TINY_PARAMETERS

    def __str__(self) -> str:
        if self.parameters is None:
            return "a model of unknown size"
        digits = f"{self.parameters / 1e6:.2g}" if self.tiny else f"{self.parameters / 1e6:,.0f}"
        return f"{digits} million parameters"


def model_size(folder: Path) -> ModelSize:
    """By the headers of its weights' files, without reading these."""
    found: int | None = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                header = orjson.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            found += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
        except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError):
            return ModelSize(parameters=None, context=max_row_tokens(folder))  # whoever loads it names what is wrong
    return ModelSize(parameters=found or None, context=max_row_tokens(folder))


def max_row_tokens(model: Path) -> int:
    """Most tokens of a row: what the model's context holds."""
    table: dict[str, Any] = orjson.loads((model / "config.json").read_bytes())
    table = table.get("text_config") or table
    return context_length(type("ModelConfig", (), table))


def window_note(model: Path) -> str | None:
    """A sentence where the model's context is cut to the sliding window of some of its layers; None where it is whole."""
    table: dict[str, Any] = orjson.loads((model / "config.json").read_bytes())
    whole, used = (table.get("text_config") or table).get("max_position_embeddings") or 0, max_row_tokens(model)
    return f"context: {used} of {whole} tokens, the sliding window of the model's layers" if used < whole else None


def copy_text(source: Path, target: Path) -> None:
    """Copy a file without the byte order mark that it may begin with, which transformers does not read."""
    target.write_bytes(source.read_bytes().removeprefix(BOM_UTF8))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, so that a saved folder is a model on its own."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            copy_text(source / name, target / name)
    if (source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / CHAT_TEMPLATES, target / CHAT_TEMPLATES)


def first_line(error: BaseException) -> str:
    """First line of an error, short enough for a sentence."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def seal(folder: Path) -> None:
    """Write the manifest of a complete folder, and have all of it on the disk before returning. Raises OSError."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        sync(path)
    manifest = folder / MANIFEST
    with open_private(manifest, "wb") as file:
        file.write(orjson.dumps({"files": files}, option=orjson.OPT_INDENT_2))
    sync(manifest)
    for each in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(each)


def damage(folder: Path) -> str | None:
    """Describes what a sealed folder lacks; None if it is as it was written or has no manifest."""
    try:
        files = orjson.loads((folder / MANIFEST).read_bytes())["files"]
        for name, expected in sorted(files.items()):
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
            if file_hash(path) != expected["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return None
    except OSError as cause:
        return f"it cannot be read: {cause.strerror or cause}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def copy_weights(saved: Path, to: Path) -> None:
    """Copy a saved policy into the folder `to`, without the learner's state and the manifest. Raises OSError."""
    for entry in sorted(saved.iterdir()):
        if entry.name in (LEARNER_STATE, LEARNER_FOLDER, MANIFEST):
            continue
        if entry.is_dir():  # the adapter, where one was trained
            shutil.copytree(entry, to / entry.name)
        else:
            shutil.copy2(entry, to / entry.name)


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A folder beside `to`, which gets that name if the block ends well. ConfigError where `to` is not empty, StoreError
    where it cannot be written."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to}: exists and is not an empty folder; give a new one")
    folder = to.resolve().with_name(f".{to.resolve().name}.{os.getpid()}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder)
        yield folder
        folder.rename(to)
    except OSError as cause:
        raise StoreError(f"{to}: cannot be written: {cause.strerror or cause}; choose another folder") from cause
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Give `new` the name of `folder`; what had it is removed. Killed in between, `restore_replaced` brings that back."""
    if not folder.exists():
        new.rename(folder)
        return
    old = folder.with_name(f".{folder.name}{REPLACED}")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """Rename folders back whose replacement never came."""
    for old in parent.glob(f".*{REPLACED}"):
        folder = old.with_name(old.name.removeprefix(".").removesuffix(REPLACED))
        if not folder.exists():
            old.rename(folder)


PACKAGES = {"file": ("fsspec", "train"), "s3": ("s3fs", "s3"), "abfs": ("adlfs", "azure")}
"""Package that each scheme needs, and the extra that brings it."""
ANSWER_TIMEOUT_S = 60.0
MIN_BYTES_PER_S = 1e6
"""One file may take ANSWER_TIMEOUT_S and a second for so many bytes of it; then it counts as late."""
RETRY_S = 60.0
"""Time from the first failure after which nothing is tried again."""


class UrlFolder:
    """A folder of an object store or a shared disk. The manifest goes last and is known by its hash: half a copy, or one
    that two hosts wrote at once, is never taken for a whole one.

    ConfigError where the URL is none of a folder, MissingExtraError where its scheme needs a package; every method raises
    StoreError where the place cannot be reached, says no or is late.
    """

    def __init__(self, url: str, *, answer_timeout_s: float = ANSWER_TIMEOUT_S, retry_s: float = RETRY_S) -> None:
        try:
            self.url = checked_folder_url(url)
        except ValueError as wrong:
            raise ConfigError(f"{url}: {wrong}") from wrong
        self._scheme = self.url.partition("://")[0]
        self._answer_timeout_s = answer_timeout_s
        self._retry_s = retry_s
        self._found: tuple[Any, str] | None = None
        package, extra = PACKAGES[self._scheme]
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)

    async def upload(self, folder: Path) -> str:
        """Copy a sealed folder here; returns the SHA-256 of its manifest, by which `download` knows it again."""
        files: dict[str, Any] = orjson.loads((folder / MANIFEST).read_bytes())["files"]
        await self.delete(MANIFEST)  # of a copy that this one replaces: it must not vouch for a mixture
        for name, file in files.items():
            await self._put(folder / name, name, file["bytes"])
        await self._put(folder / MANIFEST, MANIFEST, 0)
        if self._scheme == "file":
            await self._try("writing", 0, self._sync_folders)
        return await asyncio.to_thread(file_hash, folder / MANIFEST)

    async def download(self, manifest_hash: str, folder: Path) -> str | None:
        """Copy what is here to `folder`, whole or not at all; None once it is there, else what is wrong here, in words, and
        an empty text where nothing is here."""
        try:
            manifest: bytes = await self._try(f"reading {MANIFEST}", 0, lambda: self._at(MANIFEST, "cat_file"))
        except FileNotFoundError:
            return ""
        if hashlib.sha256(manifest).hexdigest() != manifest_hash:
            return f"{MANIFEST} is not what was written"
        copy = folder.with_name(f".{folder.name}.{os.getpid()}")  # a name that a run's next trainer clears away
        shutil.rmtree(copy, ignore_errors=True)
        try:
            make_private_folder(copy)
            for name, expected in orjson.loads(manifest)["files"].items():
                target = copy / name
                if not target.resolve().is_relative_to(copy.resolve()):
                    return f"{MANIFEST} names {name}, which is in another folder"
                target.parent.mkdir(parents=True, exist_ok=True)
                get = partial(self._at, name, "get_file", str(target))
                try:
                    await self._try(f"reading {name}", expected["bytes"], get)
                except FileNotFoundError:
                    return f"{name} is missing"
            (copy / MANIFEST).write_bytes(manifest)
            if (found := await asyncio.to_thread(damage, copy)) is None:
                replace_folder(copy, folder)
            return found
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    async def names(self) -> list[str]:
        """Names of the files and folders in it; none where it is not there."""
        try:
            found: list[str] = await self._try("listing", 0, lambda: self._at("", "ls", detail=False))
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    async def delete(self, name: str) -> None:
        """Delete a file or a folder in it, if it is there."""
        try:
            await self._try(f"deleting {name}", 0, lambda: self._at(name, "rm", recursive=True))
        except FileNotFoundError:
            return

    async def _put(self, file: Path, name: str, size: int) -> None:
        try:
            await self._try(f"writing {name}", size, partial(self._write, file, name))
        except FileNotFoundError as cause:
            raise StoreError(
                f"{self.url}: {name} cannot be written: {str(cause) or 'there is no such place'}"
            ) from cause

    def _place(self) -> tuple[Any, str]:
        """fsspec's file system, and the folder's path there. Made once: each has connections and credentials of its own."""
        if self._found is None:
            from fsspec.core import url_to_fs

            # Others write here, too, so no listing may be remembered.
            options = {"auto_mkdir": True} if self._scheme == "file" else {"use_listings_cache": False}
            self._found = url_to_fs(self.url, skip_instance_cache=True, **options)
        return self._found

    def _at(self, name: str, method: str, *arguments: Any, **options: Any) -> Any:
        files, path = self._place()
        return getattr(files, method)(f"{path}/{name}".rstrip("/"), *arguments, **options)

    def _write(self, file: Path, name: str) -> None:
        files, path = self._place()
        files.put_file(str(file), f"{path}/{name}")
        if self._scheme == "file":
            sync(Path(path) / name)

    def _sync_folders(self) -> None:
        path = Path(self._place()[1])
        for folder in (*(each for each in path.rglob("*") if each.is_dir()), path, *path.parents[:2]):
            sync(folder)

    async def _try(self, what: str, size: int, work: Callable[[], T]) -> T:
        """Do the work in a thread, and again where that failed for a reason that may pass; FileNotFoundError is raised."""
        backoff = Backoff(first_s=0.5, max_s=10.0, timeout_s=self._retry_s)
        limit_s = self._answer_timeout_s + size / MIN_BYTES_PER_S
        while True:
            cause: Exception
            try:
                async with asyncio.timeout(limit_s):
                    return await asyncio.wrap_future(_in_thread(work))
            except FileNotFoundError:
                raise
            except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as refused:
                raise StoreError(f"{self.url}: {what} is not possible: {refused}") from refused
            except TimeoutError as late:
                cause, reason = late, f"not done within {limit_s:g} s"
            except Exception as failed:
                cause, reason = failed, f"{type(failed).__name__}: {failed}"
            if not await backoff.sleep():
                raise StoreError(f"{self.url}: {what} failed {backoff.failures} times: {reason}") from cause


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """The work's outcome. Nobody waits for the thread: what hangs in a library must not keep the process from ending."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only left alone

    def target() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=target, name="url-folder", daemon=True).start()
    return outcome
