"""Cluster: what the Kubernetes runner needs of an API server, in one namespace. Objects are what the API's JSON says.

`LightkubeCluster` is the real one; tests have one in memory, which passes the same suite. Decides nothing: what objects mean
is known to those who drive it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, Protocol

from agentlightning.errors import AgentLightningError
from agentlightning.records import JSON

Kind = Literal["Job", "Pod", "Secret", "Event"]


class ClusterError(AgentLightningError):
    """The API server refused a request, or did not answer it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """status: of its answer; None where there was none."""
        super().__init__(message)
        self.status = status


class Cluster(Protocol):
    """One namespace of a cluster. Every method may raise ClusterError."""

    async def create(self, manifest: JSON, *, dry_run: bool = False) -> JSON:
        """Create a Job or a Secret, or only check that it could be; 409 where there is one of this name. Returns it."""
        ...

    async def read(self, kind: Kind, name: str) -> JSON:
        """The object; 404 where there is none."""
        ...

    async def list(
        self, kind: Kind, labels: Mapping[str, str], fields: Mapping[str, str] | None = None
    ) -> Sequence[JSON]:
        """Objects with all of these labels and fields."""
        ...

    def follow(self, kind: Kind, labels: Mapping[str, str]) -> AsyncGenerator[tuple[str, JSON], None]:
        """Yields ("ADDED", object) for all that are there, ("LISTED", {}) after the last of them, and then each change
        ("ADDED", "MODIFIED", "DELETED") as it comes. Its connection is open until it is closed."""
        ...

    async def delete_job(self, name: str) -> None:
        """Delete a Job and, in the background, all that it owns; 404 where there is none."""
        ...

    async def log(self, pod: str, container: str, lines: int) -> str:
        """The last lines that a container printed on both streams; 400 or 404 where it never started or is gone."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...
