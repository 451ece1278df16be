"""Memory and processes of one sandbox, bounded by a control group where one can be made, of version 2 or 1.

A group is made below the worker's own or the nearest one above it that hands the controllers down. Without one, limits per
process are all there is, which bound no user root: `rlimits`. Knows nothing of what runs in a sandbox.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "agl-sandbox-"
REMOVE_TIMEOUT_S = 2.0
"""Time for the kernel to count the last process of a group as gone."""
LIMIT_FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
"""By controller: the file of version 2, then that of version 1."""
OOM_FILES = ("memory.events", "memory.oom_control")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The groups of one sandbox: one, or with version 1 one for each controller."""

    folders: tuple[Path, ...]

    @property
    def entries(self) -> list[str]:
        """Files that a process writes its id to before it becomes the sandbox."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def ran_out_of_memory(self) -> bool:
        """Returns whether the kernel killed one of its processes at the limit of memory."""
        for file in (folder / name for folder in self.folders for name in OOM_FILES):
            with contextlib.suppress(OSError):
                for line in file.read_text().splitlines():
                    name, _, count = line.partition(" ")
                    if name == "oom_kill" and count.strip() != "0":
                        return True
        return False

    def remove(self) -> None:
        """Kill what is left in them, and remove them."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        for folder in self.folders:
            with contextlib.suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            while not _removed(folder) and time.monotonic() < deadline:
                time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Folders in which control groups can be made here, one for each controller that has its own."""

    parents: tuple[Path, ...] = field(default_factory=lambda: _parents())

    def __bool__(self) -> bool:
        return bool(self.parents)

    def make(self, name: str, memory: int, processes: int) -> Cgroup:
        """A group with these limits. Raises OSError where it cannot be made any more."""
        group = Cgroup(tuple(parent / f"{PREFIX}{os.getpid()}-{name}" for parent in self.parents))
        try:
            for folder in group.folders:
                folder.mkdir()
                _write(folder, ("memory.swap.max",), "0")
                _write(folder, LIMIT_FILES["memory"], str(memory))
                _write(folder, LIMIT_FILES["pids"], str(processes))
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove the empty groups of workers that were killed."""
        for folder in (folder for parent in self.parents for folder in parent.glob(f"{PREFIX}*")):
            owner = folder.name.removeprefix(PREFIX).partition("-")[0]
            if not Path(f"/proc/{owner}").exists():
                _removed(folder)


def rlimits(memory: int, processes: int) -> str:
    """The same limits for each process alone, as the relay reads them."""
    return f"DATA={memory},NPROC={processes}"


def _write(folder: Path, names: tuple[str, ...], value: str) -> None:
    for file in (folder / name for name in names):
        if file.exists():
            file.write_text(value)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _parents() -> tuple[Path, ...]:
    """Folders in which groups with both controllers can be made; none where a controller has none."""
    found = [_parent(controller) for controller in LIMIT_FILES]
    return tuple(dict.fromkeys(folder for folder in found if folder is not None)) if all(found) else ()


def _parent(controller: str) -> Path | None:
    for folder in _candidates(controller):
        trial = Cgroup((folder / f"{PREFIX}{os.getpid()}-trial",))
        try:
            trial.folders[0].mkdir()
        except OSError:
            continue
        usable = any((trial.folders[0] / name).exists() for name in LIMIT_FILES[controller])
        trial.remove()
        if usable and os.access(folder / "cgroup.procs", os.W_OK):
            return folder
    return None


def _candidates(controller: str) -> Iterator[Path]:
    """The worker's own group in each hierarchy that may have the controller, then those above it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, point, kind, options, *_ in mounts:
        first = kind == "cgroup" and controller in options.split(",")
        if not first and kind != "cgroup2":
            continue
        for _, names, path in own:
            if (controller in names.split(",")) if first else names == "":
                inside = Path(point) / path.lstrip("/")
                yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(point))
