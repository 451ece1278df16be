"""The folder in which an engine on this machine publishes weights: where it lies, and what killed runs left of theirs.

Driven by the engine. Refuses to know what is in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path


def make_weights_folder(work_dir: Path, *, in_work_dir: bool = False) -> Path:
    """Makes an empty one that only this user can open; those of killed runs of this folder are removed."""
    left = [*weights_folders(work_dir), work_dir / "weights"]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    if in_work_dir:
        left[-1].mkdir(mode=0o700)
        return left[-1]
    shared, prefix = weights_place(work_dir)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=shared))


def weights_folders(work_dir: Path) -> list[Path]:
    """The folders of published weights of engines that worked in this folder: no links, and nobody else's."""
    shared, prefix = weights_place(work_dir)
    found = []
    for path in shared.glob(f"{prefix}*"):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(path)
    return found


def weights_place(work_dir: Path) -> tuple[Path, str]:
    """Returns the folder in which weights are published, and how the name of theirs begins: shared memory, where there is
    any, is everybody's; named after the run's folder, what a killed run left there is found."""
    name = hashlib.sha256(str(work_dir.resolve()).encode()).hexdigest()[:16]
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else work_dir), f"agentlightning-{name}-"
