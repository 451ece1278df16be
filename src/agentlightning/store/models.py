"""The model registry: versions, aliases, references to them (``support@40``, ``support@best``), and the store's methods.

Kept when their run is deleted. The rules are pure functions that the stores apply in one transaction. Knows nothing of files
or engines.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentlightning.errors import InputError
from agentlightning.records import JSON
from agentlightning.store.rules import refusal

MAX_NAME_CHARS = 128

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,62}")
_NUMBER = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """Weights that a run saved at a training step, with their origin."""

    name: str
    number: int
    """The training step, continued over the runs of a name. The store gives it, and ignores what is registered."""
    run_id: str
    policy: str
    step: int
    resource_version: int  # version of the run's resource of kind policy
    parent: str | None  # ``support@30``, or the base model
    base_model: str  # as configured: ``model.path``
    weights: JSON  # ``{"kind": "full" | "adapter", "url": …, "manifest_hash": …, "bytes": …}``
    prompts: dict[str, int] = field(default_factory=dict)  # versions of the run's prompt templates that it goes with
    config_hash: str = ""
    code_hash: str = ""  # of the agent's code
    data_hash: str = ""  # of the tasks that it was trained on
    metrics: JSON = field(default_factory=dict)
    """The newest of the run: ``{"eval/reward": {"mean": …, "low": …, "high": …, "n": …}}``"""
    licence: str | None = None  # of the base model; None where nothing says it
    deleted: bool = False  # its weights are gone; the entry stays
    created_ns: int = 0
    revision: int = 0
    """Counts its changes: a change names the one that it was made from. 0 in what is new."""

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAlias:
    """A name that is moved from version to version."""

    name: str
    alias: str
    number: int | None  # none removes it
    previous: int | None  # the version that it named before, to which it can be rolled back
    moved_ns: int
    revision: int = 0  # counts its moves, as that of a version counts its changes


class ModelReference(NamedTuple):
    """The parts of ``NAME@NUMBER`` or ``NAME@ALIAS``."""

    name: str
    number: int | None
    alias: str | None


def is_reference(text: str) -> bool:
    """True for what has the form of a reference."""
    name, found, which = text.rpartition("@")
    return bool(found and _NAME.fullmatch(name) and (_NUMBER.fullmatch(which) or _ALIAS.fullmatch(which)))


def parse_reference(text: str, where: str = "model") -> ModelReference:
    """The parts of a reference. InputError, which names `where` it stands, for other text."""
    if not is_reference(text):
        raise InputError(
            f"{where}: expected NAME@NUMBER or NAME@ALIAS, such as support@40 or support@production, got {text!r:.200}"
        )
    name, _, which = text.rpartition("@")
    return ModelReference(name, int(which), None) if which.isdigit() else ModelReference(name, None, which)


def check_name(name: str) -> None:
    """InputError where a model cannot have this name; a run's id is one."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"name: expected at most {MAX_NAME_CHARS} letters, digits, '.', '_' and '-', got {name!r:.200}"
        )


def check_alias(alias: str) -> None:
    """InputError where an alias cannot be this: numbers are versions."""
    if not _ALIAS.fullmatch(alias):
        raise InputError(f"alias: expected small letters, digits and '-', beginning with a letter, got {alias!r:.200}")


def check_version(version: ModelVersion) -> None:
    """InputError where a version cannot be registered."""
    check_name(version.name)
    if version.step < 0:
        raise InputError(f"step: expected 0 or more, got {version.step}")
    if version.weights.get("kind") not in ("full", "adapter") or not isinstance(version.weights.get("url"), str):
        raise InputError('weights: expected {"kind": "full" | "adapter", "url": …, "manifest_hash": …, "bytes": …}')


def next_number(taken: Sequence[int], own: tuple[int, int] | None, step: int) -> int:
    """The number of a version that is new: its step and the offset of its run.

    taken: all numbers of the name. own: number and step of the last version that the run registered under it. A run's first
    has the highest number as its offset; where another run took the number meanwhile, it is one more than the highest.

    >>> next_number([], None, 10), next_number([10, 20], None, 5), next_number([10, 20, 25], (25, 5), 10)
    (10, 25, 30)
    """
    highest = max(taken, default=0)
    offset = highest if own is None else own[0] - own[1]
    number = offset + step
    return highest + 1 if number < 0 or number in taken else number


def changed_version(
    new: ModelVersion, known: ModelVersion | None, aliases: Sequence[ModelAlias], now_ns: int
) -> ModelVersion:
    """The version as it is stored in place of the known one. aliases: of its name. ConflictError where it was changed
    meanwhile, or its weights are to be deleted and are in use."""
    if known is None:
        raise refusal("no_model", new.reference)
    identity = known.revision, known.run_id, known.policy, known.step
    if identity != (new.revision, new.run_id, new.policy, new.step):
        raise refusal("model_changed", new.reference)
    if new.deleted and not known.deleted and (use := use_of(new, aliases)):
        raise refusal("model_in_use", new.reference, use)
    created_ns = now_ns if known.deleted and not new.deleted else known.created_ns
    return replace(new, revision=known.revision + 1, created_ns=created_ns)


def moved_alias(new: ModelAlias, known: ModelAlias | None, version: ModelVersion | None, now_ns: int) -> ModelAlias:
    """The alias as it is stored in place of the known one. version: the one that it is to name. ConflictError where the
    alias was moved meanwhile, or the version's weights are gone."""
    reference = f"{new.name}@{new.alias}"
    if new.revision != (0 if known is None else known.revision):
        raise refusal("model_changed", reference)
    if new.number is None and known is None:
        raise refusal("no_alias", reference)
    if new.number is not None and version is None:
        raise refusal("no_model", f"{new.name}@{new.number}")
    if version is not None and version.deleted:
        raise refusal("model_deleted", version.reference)
    previous = None if known is None else known.number
    return replace(new, previous=previous, moved_ns=now_ns, revision=new.revision + 1)


def use_of(version: ModelVersion, aliases: Sequence[ModelAlias]) -> str:
    """The reasons why a version's weights must stay; empty where they may be deleted."""
    uses = []
    for one in aliases:
        if one.number == version.number:
            uses.append(f"named by the alias {one.alias}")
        elif one.previous == version.number:
            uses.append(f"what the alias {one.alias} is rolled back to")
    return ", ".join(uses)


class ModelRegistry(abc.ABC):
    """The store's methods for model versions and aliases, which are changed by compare-and-set; part of LightningStore."""

    @abc.abstractmethod
    async def put_model(self, version: ModelVersion) -> ModelVersion:
        """Stores a version. One of revision 0 is new, gets a number, and is stored once for its run, policy and step: the
        one that is there is returned as it is. Another replaces the version of its number.

        NotFoundError if there is no such run or version. ConflictError, and nothing changes, where the version was changed
        since the revision given, or its weights are to be deleted and an alias names it, now or before its last move. Delete
        files after this returned.
        """

    @abc.abstractmethod
    async def models(self, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
        """Versions of a name, of a run, or all, by name and number; those whose weights were deleted among them."""

    @abc.abstractmethod
    async def put_alias(self, alias: ModelAlias) -> ModelAlias:
        """Moves an alias to a version, or removes it. NotFoundError if there is no such version
        or alias. ConflictError where the alias was moved since the revision given, or the version's weights were deleted."""

    @abc.abstractmethod
    async def aliases(self, name: str | None = None) -> list[ModelAlias]:
        """Aliases of a name, or all, by name and alias."""

    @abc.abstractmethod
    async def wait_aliases(self, name: str, known: Mapping[str, int], timeout_s: float = 30.0) -> list[ModelAlias]:
        """Aliases of a name, as soon as they are others than `known` (alias and number), or after `timeout_s` seconds.
        Pushed, not polled."""

    async def register_model(self, version: ModelVersion) -> ModelVersion:
        """Registers a version whose weights are whole. One that is registered already gets those given where its weights had
        been deleted, or where the same weights (by manifest_hash) have another URL now, and stays as it is otherwise."""
        known = await self.put_model(replace(version, number=0, revision=0, deleted=False))
        if known.deleted:
            kept = {name: getattr(known, name) for name in ("name", "number", "revision")}
            return await self.put_model(replace(version, **kept, deleted=False))
        hashes = known.weights.get("manifest_hash"), version.weights.get("manifest_hash")
        if hashes[0] and hashes[0] == hashes[1] and known.weights != version.weights:
            return await self.put_model(replace(known, weights=version.weights))
        return known

    async def delete_model(self, name: str, number: int) -> None:
        """Marks the weights of a version as deleted; does nothing where they are."""
        known = await self._model(name, number)
        if not known.deleted:
            await self.put_model(replace(known, deleted=True))

    async def set_alias(self, name: str, alias: str, number: int | None) -> ModelAlias:
        """Moves an alias to a version, or removes it (None); does nothing where it names the version already."""
        known = next((one for one in await self.aliases(name) if one.alias == alias), None)
        if known is not None and known.number == number:
            return known
        revision = 0 if known is None else known.revision
        new = ModelAlias(name=name, alias=alias, number=number, previous=None, moved_ns=0, revision=revision)
        return await self.put_alias(new)

    async def retire_models(self, run_id: str) -> None:
        """Marks all versions of a run that is deleted. ConflictError, and nothing changes, where one of them is in use."""
        aliases = await self.aliases()
        found = [version for version in await self.models(run_id=run_id) if not version.deleted]
        used = [(version, [one for one in aliases if one.name == version.name]) for version in found]
        if said := [f"{version.reference} is {use}" for version, named in used if (use := use_of(version, named))]:
            raise refusal("run_has_models", run_id, "; ".join(said))
        for version in found:
            await self.put_model(replace(version, deleted=True))

    async def _model(self, name: str, number: int) -> ModelVersion:
        found = [version for version in await self.models(name) if version.number == number]
        if not found:
            raise refusal("no_model", f"{name}@{number}")
        return found[0]
