"""Alert state: which alarms of a run began when, and what people said of them, in the run's summary.

`metric_logger.py` adds to the history and asks whether an alarm is quiet; ``agl alerts`` writes what people say, and the
console shows both. It survives the trainer, which reads it with every row: what somebody with a key wrote there in another
form is no alarm, and ends neither the run nor a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.errors import InputError
from agentlightning.records import JSON, Run
from agentlightning.trainer.monitor.alert_rules import LOAD_CHECKS
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, Alarm

ACTIVE = "alarms"
"""Key of the summary: the text of each alarm that holds, by name."""
HISTORY = "alert_history"
"""Key of the summary: alarms as they began, oldest first."""
MAX_HISTORY = 100
MAX_NS = 2**63 - 1
"""Nanoseconds since the epoch as stores keep them; later is no time."""
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
    return {name: str(text) for name, text in _table(run.summary.get(ACTIVE)).items()}


def history(run: Run) -> list[JSON]:
    """Alarms as they began, oldest first: step, time (seconds since the epoch), name, text."""
    return _history(run.summary)


def shown_alerts(run: Run, now_ns: int) -> list[ShownAlert]:
    """Alarms that hold, that were silenced, or that are in the history, each once; those that hold come first."""
    active = active_alarms(run)
    since = {one["name"]: int(one["step"]) for one in history(run)}
    said = {key.removeprefix(SAID): _table(value) for key, value in run.summary.items() if key.startswith(SAID)}
    silenced = {name for name, one in said.items() if _silenced_until(one) > now_ns}
    found = []
    for name in dict.fromkeys([*active, *sorted(silenced), *reversed(since)]):
        if name in silenced:
            state = "silenced"
        elif name not in active:
            state = "ended"
        else:
            state = "acknowledged" if said.get(name, {}).get("acknowledged") else "active"
        until = _silenced_until(said[name]) if name in silenced else 0
        found.append(ShownAlert(name, active.get(name), state, since.get(name), until))
    return found


def is_quiet(summary: JSON, name: str, now_ns: int) -> bool:
    """True where an alarm is silenced for now, or was acknowledged and lasts."""
    said = _table(summary.get(SAID + name))
    return bool(said.get("acknowledged")) or _silenced_until(said) > now_ns


def begun(summary: JSON, found: Sequence[Alarm], step: int, now_ns: int) -> JSON:
    """The change of the summary that adds alarms to the history, and forgets acknowledgements of those that ended.

    A step that a crash undid is executed again and has the same alarms: they stand once.
    """
    active = _table(summary.get(ACTIVE))
    change: JSON = {
        key: {**said, "acknowledged": False}
        for key, said in summary.items()
        if key.startswith(SAID) and _table(said).get("acknowledged") and key.removeprefix(SAID) not in active
    }
    kept = _history(summary)
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
    rules = _table(_table(run.config.get("alerts")).get("rules"))
    known = {*HEALTH_CHECKS, *LOAD_CHECKS, *rules, *active_alarms(run)}
    if name not in known and name.rpartition("/")[2] not in known:
        raise InputError(f"{name[:80]}: no such alarm; expected one of {', '.join(sorted(known))}")
    return _change(run, name, {"silenced_until_ns": until_ns})


def _change(run: Run, name: str, change: JSON) -> JSON:
    return {SAID + name: {**_table(run.summary.get(SAID + name)), **change}}


def _silenced_until(said: JSON) -> int:
    until = said.get("silenced_until_ns")
    return until if isinstance(until, int) and until <= MAX_NS else 0


def _history(summary: JSON) -> list[JSON]:
    kept = summary.get(HISTORY)
    return [one for one in kept if _is_entry(one)] if isinstance(kept, list) else []


def _is_entry(one: object) -> bool:
    return (
        isinstance(one, dict)
        and all(isinstance(one.get(key), str) for key in ("name", "text"))
        and isinstance(one.get("step"), int)
        and isinstance(time_s := one.get("time"), int | float)
        and 0 <= time_s <= MAX_NS / 1e9
    )


def _table(value: object) -> JSON:
    return value if isinstance(value, dict) else {}
