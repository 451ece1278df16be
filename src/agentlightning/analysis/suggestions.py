"""Suggestions: what earlier runs of a store say about a configuration, with their evidence.

``agl runs suggest`` and the console drive it. Rules come from the alarms of comparable runs, which train the same model on
the same tasks for the same reward; settings to try come from `tuning.py` once there are enough of them. Reads configurations
and summaries of runs, never their rollouts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.analysis.compare import HELD_OUT
from agentlightning.analysis.run_settings import (
    FlatSettings,
    SettingDifference,
    differing,
    distances,
    flat_settings,
    is_number,
    setting_key,
    without_seed,
)
from agentlightning.analysis.tuning import MIN_RUNS, TriedSettings, Tuning, tune
from agentlightning.errors import MissingExtraError
from agentlightning.records import JSON, Run, RunState
from agentlightning.store.base import LightningStore
from agentlightning.trainer.monitor.health_checks import active_alarms

MAX_RUNS = 1000
"""Runs of a store that are looked at, the newest."""
NEAREST = 5
IDENTITY = (
    *("model.path", "data.train", "data.val", "data.from_run", "algorithm.type"),
    *("agent.run", "agent.command", "agent.reward"),
)
"""Settings in which comparable runs agree."""
SETTING = re.compile(r"\b(?:trainer|algorithm|model|engine|agent)\.[a-z_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAlarm:
    """An alarm of a run of these settings that goes on."""

    run_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """A rule from the alarms of comparable runs, about one setting or about all of them."""

    alarm: str
    """A name of HEALTH_CHECKS."""
    text: str
    setting: str | None = None
    """The setting that tells runs with the alarm from those without; None where none does."""
    alarmed: list[str]
    quiet: list[str]
    """Runs with the alarm and without: the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """A comparable run."""

    run_id: str
    state: RunState
    distance: float
    """Of its settings, from 0 to 1: see `run_settings.distances`."""
    held_out: float | None
    alarms: list[str]
    differs: list[SettingDifference]
    """Settings in which it differs: the configuration's value, then its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """Everything that earlier runs say about a configuration."""

    comparable: int
    finished: int
    """Comparable runs that finished with a held-out reward."""
    active: list[ActiveAlarm]
    """While there is one, nothing else is suggested: first comes what it says."""
    rules: list[AlarmRule] = field(default_factory=list)
    nearest: list[EarlierRun] = field(default_factory=list)
    best: EarlierRun | None = None
    tuning: Tuning | None = None
    no_tuning: str | None = None
    """The reason why there is none."""


async def suggest(store: LightningStore, record: JSON) -> Suggestions:
    """Suggestions for a configuration, given as a store keeps it (`config.run_record`)."""
    return suggest_among(record, await store.runs(limit=MAX_RUNS))


def suggest_among(record: JSON, runs: Sequence[Run]) -> Suggestions:
    """The same among these runs, newest first: seconds of work where there are hundreds."""
    own = flat_settings(record)
    return suggest_from(record, [run for run in runs if comparable(own, run)])


def comparable(own: FlatSettings, run: Run, but: Sequence[str] = ()) -> bool:
    """True for a run of the same model, tasks, agent, reward and kind of algorithm; settings of `but` may be others."""
    other = flat_settings(run.config)
    return "model.path" in other and all(
        name in but or setting_key(own.get(name)) == setting_key(other.get(name)) for name in IDENTITY
    )


def suggest_from(record: JSON, runs: Sequence[Run]) -> Suggestions:
    """The same from runs that are comparable, newest first."""
    own, settings = flat_settings(record), [flat_settings(run.config) for run in runs]
    finished = [
        TriedSettings(run.id, of_run, float(run.summary[HELD_OUT]))
        for run, of_run in zip(runs, settings, strict=True)
        if run.state == "finished" and is_number(run.summary.get(HELD_OUT))
    ]
    active = [
        ActiveAlarm(run_id=run.id, name=name, text=text)
        for run, of_run in zip(runs, settings, strict=True)
        if run.state == "running" and without_seed(of_run) == without_seed(own)
        for name, text in active_alarms(run).items()
    ]
    counts: dict[str, Any] = {"comparable": len(runs), "finished": len(finished), "active": active}
    if active:
        return Suggestions(**counts, no_tuning="an alarm is active: first comes what it says")
    apart = dict(zip([run.id for run in runs], distances(own, settings), strict=True))
    earlier = [_earlier(run, own, of_run, apart[run.id]) for run, of_run in zip(runs, settings, strict=True)]
    found: dict[str, Any] = {
        **counts,
        "rules": rules(own, runs, settings),
        "nearest": sorted(earlier, key=lambda one: one.distance)[:NEAREST],
        "best": max(
            (one for one in earlier if one.held_out is not None), key=lambda one: one.held_out or 0.0, default=None
        ),
    }
    if len(finished) < MIN_RUNS:
        why = f"not enough runs: {len(finished)} comparable ones have finished with a held-out reward, {MIN_RUNS} are needed"
        return Suggestions(**found, no_tuning=why)
    try:
        tuning = tune(record, finished)
    except MissingExtraError as missing:  # what needs no extra is said all the same
        return Suggestions(**found, no_tuning=str(missing))
    return Suggestions(**found, tuning=tuning, no_tuning=tuning.why_not)


def rules(own: FlatSettings, runs: Sequence[Run], settings: Sequence[FlatSettings]) -> list[AlarmRule]:
    """Rules that concern these settings.

    A setting that an alarm's text names, and that all runs with the alarm have above (or below) all runs without it, is a
    rule where the configuration has it there, too. Learning rates 1e-3 and 5e-4 with the alarm, 1e-5 without: a rule for
    6e-4, none for 1e-4. An alarm that no setting explains is one where at least half of the runs had it.
    """
    texts: dict[str, str] = {}
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        for name, text in active_alarms(run).items():
            texts.setdefault(name, text)
            holders[name].append(place)
    found = []
    for name, alarmed in sorted(holders.items()):
        quiet = [place for place in range(len(runs)) if place not in alarmed]
        shared: dict[str, Any] = {
            "alarm": name,
            "alarmed": [runs[place].id for place in alarmed],
            "quiet": [runs[place].id for place in quiet],
        }
        told = [
            AlarmRule(setting=setting, text=f"{sentence}: {texts[name]}", **shared)
            for setting in dict.fromkeys(SETTING.findall(texts[name]))
            if (sentence := _apart(setting, own, [settings[at] for at in alarmed], [settings[at] for at in quiet]))
        ]
        if not told and 2 * len(alarmed) >= len(runs):
            told = [AlarmRule(text=f"{len(alarmed)} of {len(runs)} comparable runs: {texts[name]}", **shared)]
        found += told
    return found


def _apart(
    setting: str, own: FlatSettings, alarmed: Sequence[FlatSettings], quiet: Sequence[FlatSettings]
) -> str | None:
    """A sentence where the setting tells the two apart, and the configuration is on the side of the alarm."""
    mine, *others = (own.get(setting), *(one.get(setting) for one in (*alarmed, *quiet)))
    numbers = [value for value in others if is_number(value)]
    if not quiet or not is_number(mine) or len(numbers) < len(others):
        return None
    bad, good = numbers[: len(alarmed)], numbers[len(alarmed) :]
    for side, edge, apart, there in (
        ("more", min(bad), min(bad) > max(good), mine >= min(bad)),
        ("less", max(bad), max(bad) < min(good), mine <= max(bad)),
    ):
        if apart and there:
            alarmed_runs = f"all {len(bad)} runs with {edge:g} or {side} had the alarm"
            return f"{setting} = {mine:g}: {alarmed_runs}, none of {len(good)} others"
    return None


def _earlier(run: Run, own: FlatSettings, settings: FlatSettings, distance: float) -> EarlierRun:
    held_out = run.summary.get(HELD_OUT)
    return EarlierRun(
        run_id=run.id,
        state=run.state,
        distance=distance,
        held_out=float(held_out) if is_number(held_out) else None,
        alarms=sorted(active_alarms(run)),
        differs=differing([own, settings]),
    )
