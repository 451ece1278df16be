"""Model versions: entries of the model registry, their aliases, and references to them (``support@40``, ``support@best``).

Written by trainers and moved by people and canaries, through the store's methods (model_registry.py); kept when their run is
deleted. Pure functions and records; knows nothing of files or engines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentlightning.errors import InputError
from agentlightning.records import JSON

MAX_NAME_CHARS = 128
MAX_NOTES_CHARS = 10_000
MAX_TAG_CHARS = 256
MAX_HOLDER_CHARS = 200
MAX_LEASE_S = 86_400.0

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,62}")
_NUMBER = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """Weights that a run saved at a training step, with what made them."""

    name: str
    number: int
    """The training step, continued over the runs of a name. The store gives it, and ignores what is registered."""
    run_id: str
    policy: str
    step: int
    resource_version: int
    """Version of the run's resource of kind policy."""
    parent: str | None
    """``support@30``, or the base model."""
    base_model: str
    """As configured: ``model.path``."""
    weights: JSON
    """``{"kind": "full" | "adapter", "url": …, "manifest_hash": …, "bytes": …}``"""
    prompts: dict[str, int] = field(default_factory=dict)
    """Versions of the run's prompt templates that it goes with."""
    config_hash: str = ""
    code_hash: str = ""
    """Of the agent's code."""
    data_hash: str = ""
    """Of the tasks that it was trained on."""
    metrics: JSON = field(default_factory=dict)
    """The newest of the run: ``{"eval/reward": {"mean": …, "low": …, "high": …, "n": …}}``"""
    licence: str | None = None
    """Of the base model; None where nothing says it."""
    tags: dict[str, str] = field(default_factory=dict)
    notes: str = ""
    pinned: bool = False
    deleted: bool = False
    """Its weights are gone; the entry stays."""
    created_ns: int = 0

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAlias:
    """A name that is moved from version to version."""

    name: str
    alias: str
    number: int | None
    """None: it was removed."""
    previous: int | None
    """The version that it named before, to which it can be rolled back."""
    moved_ns: int


class ModelReference(NamedTuple):
    """The parts of ``NAME@NUMBER`` or ``NAME@ALIAS``."""

    name: str
    number: int | None
    alias: str | None


def is_reference(text: str) -> bool:
    """True for what has the form of a reference.

    >>> is_reference("support@40"), is_reference("support@best"), is_reference("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    name, found, which = text.rpartition("@")
    return bool(found and _NAME.fullmatch(name) and (_NUMBER.fullmatch(which) or _ALIAS.fullmatch(which)))


def parse_reference(text: str, where: str = "model") -> ModelReference:
    """The parts of a reference. InputError, which names `where` it stands, for other text.

    >>> parse_reference("support@production")
    ModelReference(name='support', number=None, alias='production')
    """
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
    check_description(version.tags, version.notes)


def check_description(tags: dict[str, str] | None, notes: str | None) -> None:
    """InputError where these are not the tags or notes of a version."""
    for name, value in (tags or {}).items():
        if not name or not name.isprintable() or not value.isprintable() or len(name) + len(value) > MAX_TAG_CHARS:
            raise InputError(
                f"tags: expected names and values of printable characters, at most {MAX_TAG_CHARS}, got {name!r:.80}"
            )
    if notes is not None and (len(notes) > MAX_NOTES_CHARS or "\0" in notes):
        raise InputError(f"notes: expected at most {MAX_NOTES_CHARS} characters, and none of them NUL")


def check_lease(holder: str, lifetime_s: float) -> None:
    """InputError where nobody can hold a lease so."""
    if not 1 <= len(holder) <= MAX_HOLDER_CHARS or not holder.isprintable():
        raise InputError(
            f"holder: expected 1 to {MAX_HOLDER_CHARS} printable characters, got {holder[:MAX_HOLDER_CHARS]!r}"
        )
    if not (math.isfinite(lifetime_s) and 0 < lifetime_s <= MAX_LEASE_S):
        raise InputError(f"lifetime_s: expected seconds, more than 0 and at most {MAX_LEASE_S:.0f}, got {lifetime_s}")


def next_number(taken: Sequence[int], own: tuple[int, int] | None, step: int) -> int:
    """The number of a version that is new: its step and the offset of its run.

    taken: all numbers of the name. own: number and step of the last version that the run registered under it. The offset of
    a run that registers its first is the highest number; where another run took the number meanwhile, it is one more than
    the highest, and so are those after it.

    >>> next_number([], None, 10), next_number([10, 20], None, 5), next_number([10, 20, 25], (25, 5), 10)
    (10, 25, 30)
    """
    highest = max(taken, default=0)
    offset = highest if own is None else own[0] - own[1]
    number = offset + step
    return highest + 1 if number < 0 or number in taken else number


def same_weights(one: JSON, other: JSON) -> bool:
    """True for the same weights at different URLs."""
    manifest_hash = one.get("manifest_hash")
    return bool(manifest_hash) and manifest_hash == other.get("manifest_hash") and one != other
