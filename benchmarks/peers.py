"""Peers: what a benchmark compares with, each in a virtual environment of its own, made from its lock file."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path


def install_peer(name: str, environment: Path, lock: Path, torch: str | None = None) -> None:
    """Make the environment where it is not there or is that of another lock file; `torch` is the version it needs."""
    made = environment / ".installed"
    if made.exists() and made.read_text() == lock.read_text():
        return
    print(f"installing {name} into {environment.name}, once", flush=True)
    venv.create(environment, clear=True, with_pip=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    if torch is not None:
        _install_torch(pip, torch)
    if subprocess.run([*pip, "--requirement", str(lock)], check=False).returncode:
        sys.exit(f"{name} could not be installed from {lock.name}; pip said why")
    made.write_text(lock.read_text())


def _install_torch(pip: list[str], version: str) -> None:
    """First and alone, as a CPU build: anything else that asks for it would pull gigabytes of CUDA packages."""
    wanted = [*pip, f"torch=={version}+cpu" if sys.platform == "linux" else f"torch=={version}"]
    if subprocess.run(wanted, check=False, capture_output=True).returncode:
        subprocess.run([*wanted, "--extra-index-url", "https://download.pytorch.org/whl/cpu"], check=False)
