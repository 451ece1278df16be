"""Frameworks that quarrel over the versions of a package stand in virtual environments of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUARRELS = {
    "pydantic-ai": "openai3",
    "smolagents": "openai3",
    "llamaindex": "openai2",
    "mini-swe-agent": "openai2",
    "crewai": "crewai",
}
"""Which lock file of this folder has the framework of a page."""


def stand_apart(folder: Path, name: str) -> None:
    """The environment of the page's framework, where the page has its reader make it; without it the test is left out."""
    environment = ROOT / f".venv-frameworks-{QUARRELS[name]}"
    if not (environment / ".installed").exists():
        pytest.skip(f"needs {environment.name}: `make frameworks` installs it")
    (folder / "agent-venv").symlink_to(environment)
