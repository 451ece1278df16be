"""Saved folders: on the disk, whole, and known to be so by a manifest of sizes and hashes.

Driven by learners, who write checkpoints, and by the trainer, which chooses the one to resume from. A power cut leaves
whatever had reached the disk: a file may be there, named and empty. Knows nothing of what the files mean.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from agentlightning.runtime.disk import file_hash, open_private, sync

MANIFEST = "manifest.json"
LEARNER_STATE, LEARNER_FOLDER = "learner.pt", "learner"
"""A learner's state beside the weights of a saved policy: a file, by which such a folder is known and which is never empty,
and a folder for what does not go into one file. An exported policy has neither."""
REPLACED = ".replaced"
"""Suffix of a folder on its way out, while another takes its name."""


def seal(folder: Path) -> None:
    """Write the manifest of a complete folder, and have all of it on the disk before returning. Raises OSError."""
    files = {}
    for path in _files(folder):
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        sync(path)
    manifest = folder / MANIFEST
    with open_private(manifest, "wb") as file:
        file.write(orjson.dumps({"files": files}, option=orjson.OPT_INDENT_2))
    sync(manifest)
    for each in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(each)


def damage(folder: Path) -> str | None:
    """Returns what a folder that was sealed lacks, in words; None where it is as it was written, or has no manifest."""
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
        return None  # written by an earlier version
    except OSError as cause:
        return f"it cannot be read: {cause.strerror or cause}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def copy_weights(saved: Path, to: Path) -> None:
    """Copy a saved policy into the folder `to` as a plain transformers folder, without the learner's state and the manifest.
    Raises OSError."""
    for entry in sorted(saved.iterdir()):
        if entry.name in (LEARNER_STATE, LEARNER_FOLDER, MANIFEST):
            continue
        if entry.is_dir():  # the adapter, where one was trained
            shutil.copytree(entry, to / entry.name)
        else:
            shutil.copy2(entry, to / entry.name)


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


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
