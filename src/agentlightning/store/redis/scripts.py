"""The Lua scripts of the Redis store: one per method, each with what it shares with others in front.

Read from the package's files when a store is made. Which keys and records there are is said in `lua/prelude.lua` and in
the scripts that write them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

import orjson

from agentlightning.store.sentences import REASONS

_ENDING = ("prelude", "records", "ending", "settle")
_RECORDS = ("prelude", "records")
_STEPS = ("prelude", "reopen")
_MODELS = ("prelude", "models")

_WRITING = {
    "prepare": ("prelude",),
    "create_run": ("prelude",),
    "update_run": ("prelude",),
    "enqueue": ("prelude", "templates"),
    "claim": ("prelude", "ending", "see_worker", "templates"),
    "heartbeat": ("prelude", "ending", "see_worker"),
    "finish": _ENDING,
    "cancel": ("prelude", "ending"),
    "expire": _ENDING,
    "open_session": ("prelude", "templates"),
    "record_feedback": _ENDING,
    "append_calls": _RECORDS,
    "replace_calls": ("prelude",),
    "put_files": ("prelude",),
    "append_spans": _RECORDS,
    "record_rewards": _RECORDS,
    "put_resources": ("prelude",),
    "log_metrics": ("prelude",),
    "open_step": _STEPS,
    "close_step": _STEPS,
    "reopen_steps": _STEPS,
    "put_checkpoint": ("prelude",),
    "record_credit": ("prelude",),
    "drop_credit": ("prelude",),
    "drop_records": ("prelude", "files"),
    "delete_run": ("prelude", "files", "models"),
    "add_token": ("prelude",),
    "revoke_token": ("prelude",),
    "register_model": _MODELS,
    "describe_model": _MODELS,
    "set_alias": _MODELS,
    "lease_model": _MODELS,
    "release_model": ("prelude",),
    "delete_model": _MODELS,
}
_READING = (
    "read_runs",
    "read_counts",
    "read_rollouts",
    "read_finished",
    "read_summaries",
    "read_attempts",
    "read_records",
    "read_resources",
    "read_metrics",
    "read_steps",
    "read_statistics",
    "read_sizes",
    "read_tokens",
)


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str
    """Its name on a server that has loaded it."""


def load() -> dict[str, Script]:
    """Every script by its method's name."""
    names = {**{name: (*shared, name) for name, shared in _WRITING.items()}}
    names |= {name: ("reading", name) for name in _READING}
    folder = resources.files(__package__).joinpath("lua")
    parts = {
        part: folder.joinpath(f"{part}.lua").read_text() for part in {part for each in names.values() for part in each}
    }
    reasons = f"local REASONS = cjson.decode([==[{orjson.dumps(REASONS).decode()}]==])"
    return {name: _script("\n".join([reasons, *(parts[part] for part in each)])) for name, each in names.items()}


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
