"""Tuning: settings to try next, learned from the held-out rewards of runs that have finished.

Suggestions drive it. Optuna proposes and says which settings matter; a prediction from the nearest runs ranks what it
proposes, and is itself tested on every run that is known, as if it were not (leave-one-out). Where that predicts no better
than the mean of all runs, nothing is suggested.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.analysis.intervals import Interval
from agentlightning.analysis.run_settings import (
    LOG_RANGE,
    SEED,
    FlatSettings,
    differing,
    distances,
    flat_settings,
    is_number,
    setting_key,
)
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.records import JSON
from agentlightning.trainer.offline.settings import algorithm_class, make_algorithm
from agentlightning.trainer.policies import policy_configs, schedule_configs
from agentlightning.trainer.prompts.settings import searches

if TYPE_CHECKING:
    import optuna

MIN_RUNS = 10
"""Comparable runs below which nothing is said: see docs/compare.md."""
NEIGHBOURS = 3
"""Runs that a prediction rests on."""
NEAR = 0.05
"""Distance that counts like none in their weights, so that one run never decides alone."""
PROPOSALS = 32
SHOWN = 5


@dataclass(frozen=True, slots=True)
class TriedSettings:
    """A finished run: its settings and what they came to."""

    run_id: str
    settings: FlatSettings
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings to try, or those of the configuration itself."""

    settings: dict[str, Any]
    """Those that earlier runs varied."""
    predicted: Interval
    """Held-out reward; the interval from the errors of the backtest, `n` runs."""
    nearest: list[str]
    """Runs that the prediction rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings to try, with what the advice is worth."""

    runs: int
    importances: dict[str, float]
    """Share of the variance that each setting explains, by Optuna's PED-ANOVA; the largest first."""
    backtest_error: float
    """Mean absolute error where each run is predicted from the others."""
    mean_error: float
    """The same where each run is predicted as the mean of the others."""
    own: Proposal
    """The configuration as it is."""
    proposals: list[Proposal] = field(default_factory=list)
    """Best predicted first; none where `why_not` says why."""
    why_not: str | None = None


def tune(record: JSON, tried: Sequence[TriedSettings]) -> Tuning:
    """Settings to try next in place of those of a configuration (`config.run_record`), from at least MIN_RUNS runs.

    MissingExtraError without Optuna. The same runs give the same proposals.
    """
    own = flat_settings(record)
    names = _varied(tried)
    known = [_chosen(one.settings, names) for one in tried]
    errors, mean_errors = _backtest(known, [one.held_out for one in tried])
    study = _study(known, [one.held_out for one in tried]) if names else None
    shared: dict[str, Any] = {
        "runs": len(tried),
        "importances": {} if study is None else _importances(study),
        "backtest_error": statistics.fmean(errors),
        "mean_error": statistics.fmean(mean_errors),
        "own": _proposal(_chosen(own, names), tried, known, errors),
    }
    if study is None:
        return Tuning(**shared, why_not="no setting was varied in the comparable runs")
    if not shared["backtest_error"] < shared["mean_error"]:
        why = (
            f"earlier runs do not tell: predicted from the others, each is off by {shared['backtest_error']:.3f}, and by "
            f"{shared['mean_error']:.3f} where the mean is taken"
        )
        return Tuning(**shared, why_not=why)
    wanted = {setting_key(one): one for one in (*_asked(study, known), *known)}
    possible = [one for one in wanted.values() if _is_possible(record, one)]
    proposals = [_proposal(one, tried, known, errors) for one in possible]
    proposals.sort(key=lambda one: (-one.predicted.value, setting_key(one.settings)))
    return Tuning(**shared, proposals=proposals[:SHOWN])


def _varied(tried: Sequence[TriedSettings]) -> list[str]:
    """Settings that every run has and that differ: numbers, and others with few values, each of several runs."""
    found = []
    for row in differing([one.settings for one in tried]):
        distinct = {setting_key(value) for value in row.values}
        numbers = all(is_number(value) for value in row.values)
        if row.name != SEED and (numbers or 2 * len(distinct) <= len(tried)):
            found.append(row.name)
    return found


def _chosen(settings: FlatSettings, names: Sequence[str]) -> FlatSettings:
    return {name: settings.get(name) for name in names}


def _backtest(known: Sequence[FlatSettings], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Absolute errors of predicting each run from the others: by the nearest ones, and by their mean."""
    errors, mean_errors = [], []
    for place, (settings, value) in enumerate(zip(known, values, strict=True)):
        others = [*known[:place], *known[place + 1 :]]
        rest = [*values[:place], *values[place + 1 :]]
        errors.append(abs(value - _predicted(distances(settings, others), rest)[0]))
        mean_errors.append(abs(value - statistics.fmean(rest)))
    return errors, mean_errors


def _predicted(apart: Sequence[float], values: Sequence[float]) -> tuple[float, list[int]]:
    """The mean of the nearest values, weighted by 1 / (distance + NEAR), and their places."""
    nearest = sorted(range(len(values)), key=lambda place: apart[place])[:NEIGHBOURS]
    weights = [1 / (apart[place] + NEAR) for place in nearest]
    total = math.fsum(weight * values[place] for weight, place in zip(weights, nearest, strict=True))
    return total / math.fsum(weights), nearest


def _proposal(
    settings: FlatSettings, tried: Sequence[TriedSettings], known: Sequence[FlatSettings], errors: Sequence[float]
) -> Proposal:
    value, nearest = _predicted(distances(settings, known), [one.held_out for one in tried])
    rank = min(len(errors), math.ceil((len(errors) + 1) * 0.95))  # conformal: of fewer than 19 runs the largest error
    error = sorted(errors)[rank - 1]
    return Proposal(
        settings=settings,
        predicted=Interval(value, value - error, value + error, len(tried)),
        nearest=[tried[place].run_id for place in nearest],
    )


def _study(known: Sequence[FlatSettings], values: Sequence[float]) -> optuna.Study:
    """The runs as trials of a study that proposes by TPE."""
    try:
        import optuna
    except ImportError as cause:
        raise MissingExtraError("optuna", "suggest") from cause
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would tell of every study on standard error
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=MIN_RUNS, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    spaces = _spaces(known)
    for settings, value in zip(known, values, strict=True):
        params = {name: _param(settings[name], spaces[name]) for name in spaces}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=dict(spaces), value=value))
    return study


def _spaces(known: Sequence[FlatSettings]) -> dict[str, Any]:
    """The range of each setting that was seen: nothing outside it is proposed."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for name in known[0]:
        values = [one[name] for one in known]
        if not all(is_number(value) for value in values):
            found[name] = CategoricalDistribution(sorted({setting_key(value) for value in values}))
            continue
        low, high = min(values), max(values)
        log = low > 0 and high / low >= LOG_RANGE
        whole = all(isinstance(value, int) for value in values)
        found[name] = IntDistribution(low, high, log=log) if whole else FloatDistribution(low, high, log=log)
    return found


def _param(value: Any, space: Any) -> Any:
    from optuna.distributions import CategoricalDistribution

    return setting_key(value) if isinstance(space, CategoricalDistribution) else value


def _importances(study: optuna.Study) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    # The better half against all: its default, the best tenth, would be one or two runs.
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.5))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _asked(study: optuna.Study, known: Sequence[FlatSettings]) -> list[FlatSettings]:
    from optuna.distributions import CategoricalDistribution

    spaces = _spaces(known)
    found = []
    for _ in range(PROPOSALS):
        params = study.ask(spaces).params
        found.append(
            {
                name: orjson.loads(params[name]) if isinstance(space, CategoricalDistribution) else params[name]
                for name, space in spaces.items()
            }
        )
    return found


def _is_possible(record: JSON, settings: Mapping[str, Any]) -> bool:
    """True where the configuration with these settings is one."""
    table = copy.deepcopy({**record, "store": {}})
    for name, value in settings.items():
        *tables, key = name.split(".")
        place = table
        for one in tables:
            place = place.setdefault(one, {})
        place[key] = value
    try:
        for own in policy_configs(parse_config(table)).values():
            for _, part in schedule_configs(own):
                if not searches(part):
                    make_algorithm(part, algorithm_class(part))
    except ConfigError:
        return False
    return True
