"""Files of ours on the disk: there before something relies on them, and for their owner alone.

Driven by whatever writes into run folders, stores and exports, also in a user's own process, whose umask is not ours to
change. Knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

log = logging.getLogger(__name__)

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk before returning. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_private(path: Path, mode: Literal["ab", "wb", "xb"]) -> BinaryIO:
    """Open a file to write to. One that this makes is for this user alone; one that is there keeps its mode."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE))


def make_private_folder(folder: Path) -> None:
    """Make a folder for this user alone, where it is not there. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Take a file or folder of this user that everybody may use from all others. Raises OSError.

    What a group alone may use stays: somebody chose that.
    """
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXO:
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
        log.warning("%s: everybody on this machine could use it; from now on only its owner can", path)
