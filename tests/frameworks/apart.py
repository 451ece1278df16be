"""Frameworks that conflict over the versions of a package stand in virtual environments of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFLICTING = {
    "pydantic-ai": "openai3",
    "smolagents": "openai3",
    "llamaindex": "openai2",
    "mini-swe-agent": "openai2",
    "crewai": "crewai",
    "litellm": "agents",
    "strands": "agents",
    "agno": "agents",
    "haystack": "agents",
    "agent-framework": "agents",
    "adk": "agents",
    "mcp": "agents",
    "dspy": "agents",
    "instructor": "agents",
    "semantic-kernel": "kernel",
    "camel": "kernel",
}
"""Which lock file of this folder has the framework of a page."""

NODE = {
    "program": ROOT / "tests" / "sdk" / "node",
    "ai-sdk": ROOT / "tests" / "frameworks" / "node",
    "langchain-js": ROOT / "tests" / "frameworks" / "node",
    "mastra": ROOT / "tests" / "frameworks" / "node",
}
"""Which folder has the npm packages of a page."""

BY_HAND = frozenset([name for name, lock in CONFLICTING.items() if lock in ("agents", "kernel")] + [*NODE][1:])
"""Pages whose packages `make test-clients` installs: more than CI has the time for."""


def stand_apart(folder: Path, name: str) -> None:
    """The environment of the page's framework, where the page has its reader make it; without it the test is left out."""
    environment = ROOT / f".venv-frameworks-{CONFLICTING[name]}"
    if not (environment / ".installed").exists():
        pytest.skip(f"needs {environment.name}: `make {'clients' if name in BY_HAND else 'frameworks'}` installs it")
    (folder / "agent-venv").symlink_to(environment)


CODING = ("aider", "claude-code", "codex", "gemini-cli", "llm", "opencode", "qwen-code")
"""Pages of whole programs, which tests/coding_agents runs."""


def need_node(folder: Path, name: str) -> None:
    """The packages that the page's reader installs, where the program looks for them; without them the test is left out."""
    packages = NODE[name] / "node_modules"
    if shutil.which("node") is None or not packages.is_dir():
        pytest.skip(f"needs Node and {packages.relative_to(ROOT)}: make installs them where npm is there")
    (folder / "node_modules").symlink_to(packages)
