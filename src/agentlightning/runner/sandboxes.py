"""Finds what runs a command agent's attempts: as the worker's user, or in the sandbox that the run's settings name.

Sandboxes are edges, which nothing in the core imports: their modules are loaded by name, where a run asks for one. Each has
``async start_runner(agent: CommandAgent)`` and ``check(agent: CommandAgent)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.config.agent import NoSandbox, Sandboxed
from agentlightning.records import Claim
from agentlightning.runner.command import CommandRunner
from agentlightning.runner.function import AgentRunner
from agentlightning.runner.guardian import Guardian
from agentlightning.store.base import LightningStore
from agentlightning.store.server_keys import find_key_file
from agentlightning.store.urls import sqlite_file

MODULES = {
    "bubblewrap": "agentlightning.sandbox.runner",
    "container": "agentlightning.sandbox.runner",
    "kubernetes": "agentlightning.kubernetes.runner",
}
"""By the `type` of ``[sandbox]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """A run's command agent, and the worker that runs it."""

    command: str
    sandbox: Sandboxed | NoSandbox
    server_url: str
    run_id: str = ""
    worker_id: str = ""
    scored: bool = False
    """A reward function judges its output."""
    hidden: Sequence[Path] = ()
    """Folders that no agent in a sandbox may read."""
    guardian: Guardian = field(default_factory=Guardian)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRunner:
    """A runner that can take its first attempt."""

    runner: AgentRunner
    left: Sequence[tuple[Claim, float]] | None = None
    """Attempts of this worker's predecessor whose agents still run, with the seconds since they began; None where agents
    end with the worker that runs them."""


async def start_runner(agent: CommandAgent, store: LightningStore) -> StartedRunner:
    """The runner of a command agent. ConfigError where its sandbox cannot be had here."""
    if isinstance(agent.sandbox, NoSandbox):
        runner = CommandRunner(agent.command, scored=agent.scored, guardian=agent.guardian)
        return StartedRunner(runner=runner)
    started: StartedRunner = await importlib.import_module(MODULES[agent.sandbox.type]).start_runner(agent, store)
    return started


def check_sandbox(agent: CommandAgent) -> str:
    """Try an empty sandbox, and describe it; "" where there is none. ConfigError where it cannot be had here. Blocks."""
    if isinstance(agent.sandbox, NoSandbox):
        return ""
    described: str = importlib.import_module(MODULES[agent.sandbox.type]).check(agent)
    return described


def store_folders(config: Mapping[str, Any], server_url: str | None) -> list[Path]:
    """The folders of a run's SQLite store and of the key of its server, where they are on this machine."""
    table = config.get("store")
    url = str(table.get("url", "")) if isinstance(table, dict) else ""
    store = sqlite_file(url)
    files = [] if store is None else [store.absolute()]
    if server_url is not None and (key := find_key_file(server_url)) is not None:
        files.append(key)
    return [file.parent for file in files]
