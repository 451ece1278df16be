"""Alert state: which alarms of a run began when, and what people said of them, in the run's summary.

`metric_logger.py` adds to the history and asks whether an alarm is quiet; ``agl alerts`` writes what people say, and the
console shows both. It survives the trainer, which reads it with every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import InputError
from agentlightning.trainer.monitor.alert_rules import LOAD_CHECKS
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, Alarm
from agentlightning.types import JSON, Run

ACTIVE = "alarms"
"""Key of the summary: the text of each alarm that holds, by name."""
HISTORY = "alert_history"
"""Key of the summary: alarms as they began, oldest first."""
MAX_HISTORY = 100
SAID = "alert:"
"""Keys of the summary begin so that hold what people said of an alarm, and end with its name."""


@dataclass(frozen=True, slots=True)
class ShownAlert:
    """An alarm of a run as people see it."""

    name: str
    text: str | None
    """None where it does not hold now."""
    state: str
    """active, acknowledged, silenced, or ended."""
    since_step: int | None = None
    """Step after which it was last told or would have been; None where the history does not reach back so far."""
    silenced_until_ns: int = 0


def active_alarms(run: Run) -> dict[str, str]:
    """The alarms that hold after the run's last row, by name."""
    return dict(run.summary.get(ACTIVE) or {})


def history(run: Run) -> list[JSON]:
    """Alarms as they began, oldest first: step, time (seconds since the epoch), name, text."""
    return list(run.summary.get(HISTORY) or ())


def shown_alerts(run: Run, now_ns: int) -> list[ShownAlert]:
    """Alarms that hold, that were silenced, or that are in the history, each once; those that hold come first."""
    active = active_alarms(run)
    since = {one["name"]: int(one["step"]) for one in history(run)}
    said = {key.removeprefix(SAID): value for key, value in run.summary.items() if key.startswith(SAID)}
    silenced = {name for name in said if _silenced_until(said, name) > now_ns}
    found = []
    for name in dict.fromkeys([*active, *sorted(silenced), *reversed(since)]):
        if name in silenced:
            state = "silenced"
        elif name not in active:
            state = "ended"
        else:
            state = "acknowledged" if said.get(name, {}).get("acknowledged") else "active"
        until = _silenced_until(said, name) if name in silenced else 0
        found.append(ShownAlert(name, active.get(name), state, since.get(name), until))
    return found


def is_quiet(summary: JSON, name: str, now_ns: int) -> bool:
    """True where an alarm is silenced for now, or was acknowledged and lasts."""
    said = summary.get(SAID + name) or {}
    return bool(said.get("acknowledged")) or said.get("silenced_until_ns", 0) > now_ns


def begun(summary: JSON, found: Sequence[Alarm], step: int, now_ns: int) -> JSON:
    """The change of the summary that adds alarms to the history, and forgets acknowledgements of those that ended.

    A step that a crash undid is executed again and has the same alarms: they stand once.
    """
    active = set(summary.get(ACTIVE) or ())
    change: JSON = {
        key: {**said, "acknowledged": False}
        for key, said in summary.items()
        if key.startswith(SAID) and said.get("acknowledged") and key.removeprefix(SAID) not in active
    }
    kept = list(summary.get(HISTORY) or ())
    known = {(one["step"], one["name"]) for one in kept}
    new = [
        {"step": step, "time": now_ns / 1e9, "name": alarm.name, "text": alarm.text}
        for alarm in found
        if (step, alarm.name) not in known
    ]
    return change | ({HISTORY: [*kept, *new][-MAX_HISTORY:]} if new else {})


def acknowledged(run: Run, name: str) -> JSON:
    """The change of the summary that acknowledges an alarm until it ends. InputError where it does not hold."""
    active = active_alarms(run)
    if name not in active:
        holding = f"those that hold are {', '.join(sorted(active))}" if active else "none holds"
        raise InputError(f"{name[:80]}: expected an alarm that holds; {holding}")
    return _change(run, name, {"acknowledged": True})


def silenced(run: Run, name: str, until_ns: int) -> JSON:
    """The change of the summary that silences an alarm up to a time; 0: no longer. InputError for an unknown name."""
    rules = (run.config.get("alerts") or {}).get("rules") or {}
    known = {*HEALTH_CHECKS, *LOAD_CHECKS, *rules, *active_alarms(run)}
    if name not in known and name.rpartition("/")[2] not in known:
        raise InputError(f"{name[:80]}: no such alarm; expected one of {', '.join(sorted(known))}")
    return _change(run, name, {"silenced_until_ns": until_ns})


def _change(run: Run, name: str, change: JSON) -> JSON:
    return {SAID + name: {**(run.summary.get(SAID + name) or {}), **change}}


def _silenced_until(said: Mapping[str, Any], name: str) -> int:
    return int((said.get(name) or {}).get("silenced_until_ns", 0))
