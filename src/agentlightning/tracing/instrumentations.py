"""Instrumentations: packages of the OpenTelemetry and OpenInference ecosystems, found by name and switched on.

Every such package announces itself by an entry point: ``langchain`` of openinference-instrumentation-langchain,
``httpx`` of opentelemetry-instrumentation-httpx. None of them is known here by name, so any of them will do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentlightning.errors import ConfigError

GROUPS = ("openinference_instrumentor", "opentelemetry_instrumentor")
"""In this order: of two packages for one framework, OpenInference's says more about agents."""


def find(names: Iterable[str]) -> list[EntryPoint]:
    """The instrumentations of these names: of an entry point (langchain), or of the package that has it, where two packages
    instrument the same framework (opentelemetry-instrumentation-langchain). Imports none of them.

    ConfigError names the one that is not installed, with the packages that would have it.
    """
    installed = [entry for group in GROUPS for entry in entry_points(group=group)]
    return [_one(name, installed) for name in names]


def enable(found: Iterable[EntryPoint], provider: Any) -> None:
    """Let each write spans to this OpenTelemetry TracerProvider. ConfigError where one does not fit what is installed."""
    for entry in found:
        try:
            instrumentor = entry.load()()
            instrumentor.instrument(tracer_provider=provider, raise_exception_on_conflict=True)
        except Exception as cause:  # of somebody else's package: whatever it raises, it does not run
            raise ConfigError(
                f"agent.trace: {_package(entry)} cannot instrument {entry.name!r} here: {cause}"
            ) from cause


def _one(name: str, installed: list[EntryPoint]) -> EntryPoint:
    wanted = _plain(name)
    for entry in installed:
        if wanted in (_plain(entry.name), _plain(_package(entry))):
            return entry
    known = ", ".join(sorted({entry.name for entry in installed})) or "none"
    raise ConfigError(
        f"agent.trace: no instrumentation named {name!r} is installed; install it with: pip install "
        f"openinference-instrumentation-{_dashed(name)} (or opentelemetry-instrumentation-{_dashed(name)}); "
        f"installed are {known}"
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _dashed(name: str) -> str:
    return _plain(name).replace("_", "-")
