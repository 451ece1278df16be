"""A power cut for the processes of a test: what they had not synced is gone.

They run with a small library (power_cut.c) that keeps what they sync. `cut` puts a folder into the state that a disk may
have which wrote nothing that it was not asked to: files have the content of their last fsync, folders the names of theirs.
That is less than most disks would keep, needs no privileges, and takes a C compiler and Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("power_cut.c")
SYNC_ALL = """
import os, sys
for folder, _, files in os.walk(sys.argv[1]):
    for path in (*(os.path.join(folder, name) for name in files), folder):
        if not os.path.islink(path):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
"""


def missing() -> str | None:
    """Why there can be no cut here; None where there can."""
    if sys.platform != "linux":
        return "power cuts are made by a library for Linux"
    return None if shutil.which("cc") else "there is no C compiler (cc)"


class PowerCut:
    """What a disk holds of `root`, kept in the folder `disk` beside it. Processes that run with `environment` count."""

    def __init__(self, root: Path, disk: Path) -> None:
        self._root, self._disk = root.resolve(), disk.resolve()
        library = self._disk / "power_cut.so"
        self._disk.mkdir()
        compiler = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(compiler, check=True)
        places = {"POWER_CUT_ROOT": str(self._root), "POWER_CUT_DISK": str(self._disk)}
        self.environment = {"LD_PRELOAD": str(library), **places}
        self.sync()

    def sync(self) -> None:
        """All that is there now is on the disk."""
        for kind in ("files", "folders", "half"):
            shutil.rmtree(self._disk / kind, ignore_errors=True)
            (self._disk / kind).mkdir()
        everything = [sys.executable, "-c", SYNC_ALL, str(self._root)]
        subprocess.run(everything, check=True, env={**os.environ, **self.environment})

    def cut(self) -> None:
        """Leave what the disk holds. No process may use the folder any more."""
        after = self._disk / "after"
        self._build(self._key(self._root), after)
        shutil.rmtree(self._root)
        after.rename(self._root)
        self.sync()

    def _key(self, folder: Path) -> str:
        """The key of the root, which is the folder that nobody's list has."""
        asked = subprocess.run(["stat", "--format=%i", str(folder)], check=True, capture_output=True, text=True)
        inode = asked.stdout.strip()
        found = [path.name for path in (self._disk / "folders").iterdir() if path.name.partition("-")[0] == inode]
        assert len(found) == 1, f"{folder}: expected one list of it, got {found}"
        return found[0]

    def _build(self, key: str, folder: Path) -> None:
        folder.mkdir()
        entries = self._disk / "folders" / key
        for line in entries.read_bytes().split(b"\0")[:-1] if entries.exists() else ():
            kind, key_of_entry, name = line.decode().split(" ", 2)
            if kind == "d":
                self._build(key_of_entry, folder / name)
            elif (kept := self._disk / "files" / key_of_entry).exists():
                shutil.copyfile(kept, folder / name)
            else:
                (folder / name).touch()  # the name got there, and nothing of what was written
