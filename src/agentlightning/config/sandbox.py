"""Settings of the table ``[sandbox]``: what untrusted command agents run in. What they mean is `runner/sandbox`'s affair."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentlightning.config.base import Table, matching

SandboxKind = Literal["bubblewrap", "gvisor", "docker", "podman"]


class SandboxConfig(Table):
    """A sandbox for each attempt of a command agent."""

    kind: SandboxKind
    """bubblewrap: namespaces of Linux; gvisor: a kernel of its own (runsc); docker, podman: a container of `image`."""
    image: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", "the name of a container image")] | None = None
    """Container image, of docker and podman, which holds the agent's program and python3."""
    readable: tuple[str, ...] = (".",)
    """Files and folders that the agent may read beside the system's, at the path that they have here. Relative ones begin
    in the worker's folder. Those of runs and of an SQLite store are left out of them."""
    memory_mb: int = Field(2048, ge=32)
    """Memory of an attempt's processes together, at most."""
    processes: int = Field(256, ge=8)
    """Processes and threads of an attempt, at most."""
    disk_mb: int = Field(1024, ge=1)
    """Size of an attempt's own /tmp, which is in memory and ends with it."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        contained = self.kind in ("docker", "podman")
        if contained and self.image is None:
            raise ValueError(f"image: is required with kind = {self.kind!r}")
        if not contained and self.image is not None:
            raise ValueError(f"image: has no effect with kind = {self.kind!r}")
        return self
