"""Suggestions: what earlier runs of a store say about a configuration, with their evidence.

``agl runs suggest`` and the console drive it. Rules come from the alarms of comparable runs, which train the same model on
the same tasks for the same reward; Optuna proposes settings to try from the held-out rewards of those that finished. Reads
configurations and summaries of runs, never their rollouts.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.analysis.compare import HELD_OUT
from agentlightning.analysis.run_settings import (
    LOG_RANGE,
    SEED,
    FlatSettings,
    SettingDifference,
    differing,
    flat_settings,
    is_number,
    setting_key,
    without_seed,
)
from agentlightning.config.file import set_setting
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.records import JSON, Run, RunState
from agentlightning.store.base import LightningStore
from agentlightning.trainer.monitor.health_checks import active_alarms
from agentlightning.trainer.serving import is_training

if TYPE_CHECKING:
    import optuna

MAX_RUNS = 1000
"""Runs of a store that are read, the newest."""
BEST = 5
MIN_RUNS = 10
"""Finished comparable runs below which no settings are proposed."""
PROPOSALS = 5
IDENTITY = (
    *("model.path", "data.train", "data.val", "data.from_run", "algorithm.type"),
    *("agent.run", "agent.command", "agent.reward"),
)
"""Settings in which comparable runs agree."""
SETTING = re.compile(r"\b(?:trainer|algorithm|model|engine|agent)\.[a-z_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAlarm:
    """An alarm that holds in a run with these settings."""

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
    """The setting that separates runs with the alarm from those without; None if none does."""
    alarmed: list[str]
    quiet: list[str]
    """Runs with the alarm and without: the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """A comparable run."""

    run_id: str
    state: RunState
    held_out: float
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
    """While there is one, nothing else is suggested: resolve it first."""
    rules: list[AlarmRule] = field(default_factory=list)
    best: list[EarlierRun] = field(default_factory=list)
    """Those with the highest held-out reward, the best first."""
    importances: dict[str, float] = field(default_factory=dict)
    """Share of the variance in held-out reward that each setting explains, by Optuna's PED-ANOVA; the largest first."""
    proposals: list[dict[str, Any]] = field(default_factory=list)
    """Settings to try, by Optuna's TPE, within the range that was tried."""
    no_proposals: str | None = None
    """The reason why there are none."""


async def suggest(store: LightningStore, record: JSON) -> Suggestions:
    """Suggestions for a configuration, given as a store keeps it (`config.run_record`)."""
    return suggest_among(record, await store.runs(limit=MAX_RUNS))


def suggest_among(record: JSON, runs: Sequence[Run]) -> Suggestions:
    """The same among these runs, newest first: seconds of work if there are hundreds."""
    own = flat_settings(record)
    pairs = [(run, flat_settings(run.config)) for run in runs if is_training(run)]
    pairs = [(run, settings) for run, settings in pairs if _comparable(own, settings)]
    runs, settings = [run for run, _ in pairs], [settings for _, settings in pairs]
    tried = [
        (of_run, float(run.summary[HELD_OUT]))
        for run, of_run in pairs
        if run.state == "finished" and is_number(run.summary.get(HELD_OUT))
    ]
    active = [
        ActiveAlarm(run_id=run.id, name=name, text=text)
        for run, of_run in pairs
        if run.state == "running" and without_seed(of_run) == without_seed(own)
        for name, text in active_alarms(run).items()
    ]
    found = Suggestions(comparable=len(runs), finished=len(tried), active=active)
    if active:
        return replace(found, no_proposals="an alarm is active: resolve it first")
    earlier = [
        EarlierRun(
            run_id=run.id,
            state=run.state,
            held_out=float(run.summary[HELD_OUT]),
            alarms=sorted(active_alarms(run)),
            differs=differing([own, of_run]),
        )
        for run, of_run in pairs
        if is_number(run.summary.get(HELD_OUT))
    ]
    best = sorted(earlier, key=lambda one: -one.held_out)[:BEST]
    found = replace(found, rules=rules(own, runs, settings), best=best)
    names = _varied([one for one, _ in tried])
    if len(tried) < MIN_RUNS:
        known = f"{len(tried)} comparable ones have finished with a held-out reward, {MIN_RUNS} are needed"
        return replace(found, no_proposals=f"not enough runs: {known}")
    if not names:
        return replace(found, no_proposals="no setting was varied in the comparable runs")
    try:
        study, spaces = _study([({name: one[name] for name in names}, value) for one, value in tried])
    except MissingExtraError as missing:
        return replace(found, no_proposals=str(missing))
    return replace(found, importances=_importances(study), proposals=_proposals(study, spaces, record))


def _comparable(own: FlatSettings, other: FlatSettings) -> bool:
    """True for a run of the same model, tasks, agent, reward and kind of algorithm."""
    same = (setting_key(own.get(name)) == setting_key(other.get(name)) for name in IDENTITY)
    return "model.path" in other and all(same)


def rules(own: FlatSettings, runs: Sequence[Run], settings: Sequence[FlatSettings]) -> list[AlarmRule]:
    """Rules that concern these settings.

    A setting that an alarm's text names, and that all runs with the alarm have above (or below) all runs without it, is a
    rule if the configuration has it there, too. Learning rates 1e-3 and 5e-4 with the alarm, 1e-5 without: a rule for 6e-4,
    none for 1e-4. An alarm that no setting explains is a rule if at least half of the runs had it.
    """
    holders: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for place, run in enumerate(runs):
        for name, text in active_alarms(run).items():
            holders[name][place] = text
    found = []
    for name, alarmed in sorted(holders.items()):
        quiet, text = [place for place in range(len(runs)) if place not in alarmed], next(iter(alarmed.values()))
        sides = [[settings[place] for place in places] for places in (alarmed, quiet)]
        about = {setting: _apart(setting, own, *sides) for setting in dict.fromkeys(SETTING.findall(text))}
        told: dict[str | None, str | None] = {setting: sentence for setting, sentence in about.items() if sentence}
        if not told and 2 * len(alarmed) >= len(runs):
            told = {None: f"{len(alarmed)} of {len(runs)} comparable runs"}
        ids = [[runs[place].id for place in places] for places in (alarmed, quiet)]
        found += [
            AlarmRule(alarm=name, setting=setting, text=f"{sentence}: {text}", alarmed=ids[0], quiet=ids[1])
            for setting, sentence in told.items()
        ]
    return found


def _apart(
    setting: str, own: FlatSettings, alarmed: Sequence[FlatSettings], quiet: Sequence[FlatSettings]
) -> str | None:
    """A sentence if the setting separates the two, and the configuration is on the side of the alarm."""
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


def _varied(tried: Sequence[FlatSettings]) -> list[str]:
    """Settings that differ: numbers, and others with few values, each of several runs."""
    found = []
    for row in differing(tried):
        distinct = {setting_key(value) for value in row.values}
        numbers = all(is_number(value) for value in row.values)
        if row.name != SEED and (numbers or 2 * len(distinct) <= len(tried)):
            found.append(row.name)
    return found


def _study(tried: Sequence[tuple[FlatSettings, float]]) -> tuple[optuna.Study, dict[str, Any]]:
    """The runs as trials of a study that proposes by TPE, and the range of each setting that was seen."""
    try:
        import optuna
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    except ImportError as cause:
        raise MissingExtraError("optuna", "suggest") from cause
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces: dict[str, Any] = {}
    for name in tried[0][0]:
        values = [settings[name] for settings, _ in tried]
        if not all(is_number(value) for value in values):
            spaces[name] = CategoricalDistribution(sorted({setting_key(value) for value in values}))
            continue
        low, high = min(values), max(values)
        log = low > 0 and high / low >= LOG_RANGE
        kind = IntDistribution if all(isinstance(value, int) for value in values) else FloatDistribution
        spaces[name] = kind(low, high, log=log)
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=MIN_RUNS, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for settings, value in tried:
        params = {
            name: setting_key(settings[name]) if isinstance(space, CategoricalDistribution) else settings[name]
            for name, space in spaces.items()
        }
        study.add_trial(optuna.trial.create_trial(params=params, distributions=dict(spaces), value=value))
    return study, spaces


def _importances(study: optuna.Study) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    # The better half against all: its default, the best tenth, would be one or two runs.
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.5))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _proposals(study: optuna.Study, spaces: Mapping[str, Any], record: JSON) -> list[dict[str, Any]]:
    from optuna.distributions import CategoricalDistribution

    found: dict[str, dict[str, Any]] = {}
    for _ in range(4 * PROPOSALS):  # some are no configuration
        params = study.ask(dict(spaces)).params
        settings = {
            name: orjson.loads(params[name]) if isinstance(space, CategoricalDistribution) else params[name]
            for name, space in spaces.items()
        }
        if _is_possible(record, settings):
            found.setdefault(setting_key(settings), settings)
    return list(found.values())[:PROPOSALS]


def _is_possible(record: JSON, settings: Mapping[str, Any]) -> bool:
    """True if the configuration with these settings is valid."""
    table = copy.deepcopy({**record, "store": {}})
    try:
        for name, value in settings.items():
            set_setting(table, name, value)
        parse_config(table)
    except ConfigError:
        return False
    return True
