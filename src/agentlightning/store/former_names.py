"""Names that settings and metrics had before schema 5 of SQL stores (2 of Redis), and what they are called since.

Pure functions, driven by the migrations of stores and of run folders. All of them may be applied again: an upgrade that was
killed is repeated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from agentlightning.records import JSON

_SETTINGS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("upstreams", "external", {}),
    ("agent.sampling_policy", "unsupported_params", {"refuse": "error", "force": "drop"}),
    ("agent.posts_rewards", "allow_posted_rewards", {}),
    ("trainer.surplus", "overprovision", {}),
    ("trainer.group_order", "batch_order", {"queued": "fifo", "finished": "first_finished"}),
    ("trainer.guard", "health_checks", {}),
    ("air.rules.*.most", "cap", {}),
    *(
        one
        for table in ("", "policies.*.")
        for one in (
            (f"{table}engine.rows", "packing", {"tree": "prefix_tree"}),
            (f"{table}engine.max_rows", "max_num_seqs", {}),
            (f"{table}engine.microbatch_tokens", "max_tokens_per_microbatch", {}),
            (f"{table}algorithm.ratio", "ratio", {"sampler": "rollout", "trainer": "old_policy"}),
            (f"{table}algorithm.critic.trunk", "backbone_grad_scale", {}),
        )
    ),
)
"""Former path of a setting (* is any name), its name now, and those of its values that have new names."""

OUTCOMES = {"surplus": "overprovisioned"}
KINDS = {"upstream": "external", "hold": "pause"}
"""Kinds of resources. The name of a pause begins with its kind."""

_GROUPS = ("train", "eval", "rollout", "policy", "critic", "judge", "air", "time", "policies")
_NO_METRICS = ("step", "alarms", "rollouts", "calls")
"""In the summary of a run."""


def upgraded_config(config: JSON) -> JSON:
    """A run's configuration with the settings' names of today."""
    new: JSON = orjson.loads(orjson.dumps(config))
    for path, name, values in _SETTINGS:
        *tables, former = path.split(".")
        for table in _tables(new, tables):
            if former in table:
                value = table.pop(former)
                table[name] = values.get(value, value) if isinstance(value, str) else value
    return new


def upgraded_metric(name: str) -> str:
    """A metric's name of today; of several policies a metric was ALIAS/name. A name of no metric of ours stays."""
    alias, slash, rest = name.rpartition("/")
    if slash:
        return name if alias.split("/")[0] in _GROUPS else f"policies/{alias}/{upgraded_metric(rest)}"
    known = _metrics()
    if name in known["names"]:
        return str(known["names"][name])
    for pattern, new in known["patterns"]:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return name


def upgraded_summary(summary: JSON) -> JSON:
    return {name if name in _NO_METRICS else upgraded_metric(name): value for name, value in summary.items()}


def upgraded_row(row: JSON) -> JSON:
    """A row of metrics.jsonl."""
    kept = {"step": row["step"], "kind": upgraded_kind(row["kind"]), "time": row.get("time")}
    return kept | {upgraded_metric(name): value for name, value in row.items() if name not in kept}


def upgraded_kind(kind: str) -> str:
    """A kind of row of metrics.jsonl."""
    return str(_metrics()["kinds"].get(kind, kind))


def upgraded_resource(kind: str, name: str) -> tuple[str, str]:
    new = KINDS.get(kind, kind)
    return new, f"pause:{name.removeprefix('hold:')}" if kind == "hold" else name


def _tables(table: JSON, path: list[str]) -> list[JSON]:
    """The tables at this path, where there are any."""
    if not path:
        return [table]
    chosen = table.values() if path[0] == "*" else [table.get(path[0])]
    return [found for inner in chosen if isinstance(inner, dict) for found in _tables(inner, path[1:])]


@functools.cache
def _metrics() -> dict[str, Any]:
    known: dict[str, Any] = orjson.loads(resources.files(__package__).joinpath("former_metrics.json").read_bytes())
    return known
