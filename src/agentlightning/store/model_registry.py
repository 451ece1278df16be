"""ModelRegistry: the store's methods about model versions, their aliases and their leases.

Part of LightningStore (base.py), whose rules hold here too: each method is one transaction. Driven by trainers, which
register what they saved, by servers, which lease what they serve, and by whoever moves an alias.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from agentlightning.records import JSON
from agentlightning.store.model_versions import ModelAlias, ModelVersion


class ModelRegistry(abc.ABC):
    """The abstract registry of models."""

    @abc.abstractmethod
    async def register_model(self, version: ModelVersion) -> ModelVersion:
        """Registers a version whose weights are whole; returns it with its number and time.

        One that is registered already, by run, policy and step, is returned as it is; where its weights had been deleted it
        gets those given, and keeps its number, tags and notes, and where the same weights (by manifest_hash) have another
        URL now, that. NotFoundError if there is no such run.
        """

    @abc.abstractmethod
    async def models(self, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
        """Versions of a name, of a run, or all, by name and number; those whose weights were deleted among them."""

    @abc.abstractmethod
    async def describe_model(
        self,
        name: str,
        number: int,
        *,
        tags: dict[str, str] | None = None,
        notes: str | None = None,
        pinned: bool | None = None,
    ) -> ModelVersion:
        """Changes what is given of a version. `tags` are merged into its own; an empty value removes the tag.

        NotFoundError if there is no such version, ConflictError where one is to be pinned whose weights were deleted.
        """

    @abc.abstractmethod
    async def set_alias(self, name: str, alias: str, number: int | None, reason: JSON) -> ModelAlias:
        """Moves an alias to a version, or removes it (None); the audit log gets `reason`, with its numbers.

        An alias that names this version already stays as it is, and nothing is noted. NotFoundError if there is no such
        version, or no such alias to remove, ConflictError where the version's weights were deleted.
        """

    @abc.abstractmethod
    async def aliases(self, name: str | None = None) -> list[ModelAlias]:
        """Aliases of a name, or all, by name and alias; those that were removed are not among them."""

    @abc.abstractmethod
    async def wait_aliases(self, name: str, known: Mapping[str, int], timeout_s: float = 30.0) -> list[ModelAlias]:
        """Aliases of a name, as soon as they are others than `known` (alias and number), or after `timeout_s` seconds.

        Pushed, not polled: a move is known within a second everywhere.
        """

    @abc.abstractmethod
    async def lease_model(self, name: str, number: int, holder: str, lifetime_s: float) -> None:
        """Keeps a version's weights for `lifetime_s` seconds from now; called again by the same holder, for as long anew.

        NotFoundError if there is no such version, ConflictError where its weights were deleted.
        """

    @abc.abstractmethod
    async def release_model(self, name: str, number: int, holder: str) -> None:
        """Ends a lease; one that is not held is ignored."""

    @abc.abstractmethod
    async def delete_model(self, name: str, number: int) -> None:
        """Marks the weights of a version as deleted; whoever does removes its files only after this returned.

        ConflictError, and nothing is marked, where it is pinned or leased, or an alias names it, now or before its last
        move. Does nothing where they were deleted already. NotFoundError if there is no such version.
        """
