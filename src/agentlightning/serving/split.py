"""The split of new sessions between two versions of a served model, and the evidence that the newer one is worse.

The split is a resource of the serving run. Whoever opens a session asks `choose_version`, a pure function; the serving run
asks `read_evidence` and takes a canary that is worse out of the split. Everything is read from the store: a process that was
killed counts the same sessions again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from agentlightning.algorithms.sequential_tests import MeanDifferenceTest
from agentlightning.config.base import Table
from agentlightning.config.run import parse_settings
from agentlightning.errors import NotFoundError
from agentlightning.records import FINAL_STATES, JSON, Resource, Rollout
from agentlightning.serving.settings import ServeConfig
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.rules import NEVER_FINAL
from agentlightning.store.scan import read_rollouts

SPLIT_RESOURCE = "routes"
"""Name of the resource of a serving run that holds its split."""
CLOCK_SKEW_MS = 10_000
"""Between gateways, whose clocks are in the ids of sessions."""
MAX_SESSIONS = 2000
"""Sessions of the canary that count; after them a person decides."""

Measure = Literal["reward", "error"]


class Split(Table):
    """The versions that new sessions get, by number."""

    stable: int = Field(ge=1)
    canary: int | None = Field(None, ge=1)
    weight: float = Field(0.0, ge=0, le=1)
    """Share of new sessions that get the canary."""
    reason: JSON = Field(default_factory=dict)
    """The decision that made this split, with its evidence."""

    @model_validator(mode="after")
    def _needs_canary(self) -> Split:
        if self.weight and self.canary is None:
            raise ValueError("weight: has no effect without canary")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The time in which a canary has been in the split."""

    split: Split
    version: int
    """Of the newest split."""
    started_ns: int
    """Time at which the canary got its first share of new sessions alongside this stable version."""


class SessionResult(NamedTuple):
    """One session in one measure, from 0 to 1."""

    at_ns: int
    canary: bool
    measure: Measure
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEvidence:
    """The results so far, and whether they show that the canary is worse."""

    worse: Measure | None
    figures: JSON
    """By measure: sessions and mean of both versions, and the wealth of the test with its bound."""


def choose_version(session_id: str, split: Split) -> int:
    """The number of the version for a new session.

    Sticky: the hash of the session's id, as a number in [0, 1), is compared with the canary's weight, so that every gateway
    chooses alike, and a larger weight keeps the sessions that the smaller one chose.

    >>> choose_version("s", Split(stable=40)), choose_version("s", Split(stable=40, canary=50, weight=1.0))
    (40, 50)
    """
    if split.canary is None:
        return split.stable
    digest = blake2b(session_id.encode(errors="surrogatepass"), digest_size=8).digest()
    place = (int.from_bytes(digest, "big") >> 11) / 2**53  # a float has 53 bits: 1 is never reached
    return split.canary if place < split.weight else split.stable


def version_alias(name: str, number: int) -> str:
    """The policy of the serving run that samples a version.

    >>> version_alias("support", 40)
    'support-40'
    """
    return f"{name}-{number}"


async def put_split(store: LightningStore, run_id: str, split: Split, *, after: int | None = None) -> Resource:
    """Stores a new split, which gateways follow at once.

    `after`: the version that it follows from; ConflictError where there is a newer one.
    """
    resource = Resource(run_id=run_id, name=SPLIT_RESOURCE, kind="routes", value=split.model_dump(mode="json"))
    [stored] = await store.put_resources([resource], None if after is None else {SPLIT_RESOURCE: after})
    return stored


async def read_trial(store: LightningStore, run_id: str) -> Trial:
    """The newest split of a serving run, and since when its two versions are together. NotFoundError where it serves
    nothing, ConfigError where the resource is no split."""
    history = await store.resources(run_id, SPLIT_RESOURCE, latest=False)
    if not history:
        raise NotFoundError(f"{run_id}: serves no model; start one with: agl serve --policy NAME@ALIAS")
    newest = parse_settings(Split, dict(history[-1].value), f"split of {run_id}", ".")
    started_ns = history[-1].created_ns
    for each in reversed(history):
        same = (each.value.get("stable"), each.value.get("canary")) == (newest.stable, newest.canary)
        if not same or not each.value.get("weight"):
            break
        started_ns = each.created_ns
    return Trial(split=newest, version=history[-1].version, started_ns=started_ns)


async def read_evidence(store: LightningStore, run_id: str, trial: Trial, settings: ServeConfig) -> CanaryEvidence:
    """Reads the results of a trial's sessions and weighs them."""
    results = await _read_results(store, run_id, trial, settings.reward_range)
    return await asyncio.to_thread(weigh, results, settings.alpha)


def weigh(results: Sequence[SessionResult], alpha: float) -> CanaryEvidence:
    """Tests, in the order in which results came about, whether the stable version is better in a measure.

    The probability that a canary which is worse in neither measure is ever found worse is at most alpha: each of the two
    tests needs a wealth of 2 / alpha.
    """
    measures: tuple[Measure, ...] = ("reward", "error")
    tests = {measure: MeanDifferenceTest() for measure in measures}
    values: dict[Measure, tuple[list[float], list[float]]] = {measure: ([], []) for measure in measures}
    bound = len(measures) / alpha
    worse: Measure | None = None
    for result in sorted(results):
        values[result.measure][result.canary].append(result.value)
        test = tests[result.measure]
        test.record(b=result.value) if result.canary else test.record(a=result.value)
        if test.wealth >= bound:
            worse = result.measure
            break
    figures: JSON = {
        measure: {
            **{name: _arm(values[measure][canary]) for canary, name in enumerate(("stable", "canary"))},
            "wealth": tests[measure].wealth,
            "bound": bound,
        }
        for measure in measures
    }
    return CanaryEvidence(worse=worse, figures=figures)


def _arm(values: Sequence[float]) -> JSON:
    return {"sessions": len(values), "mean": sum(values) / len(values) if values else None}


async def _read_results(
    store: LightningStore, run_id: str, trial: Trial, reward_range: tuple[float, float]
) -> list[SessionResult]:
    sessions = await _read_sessions(store, run_id, trial)
    canary = trial.split.canary
    found = [
        SessionResult(
            one.finished_ns or 0, one.step == canary, "error", float(one.state == "succeeded" and not one.warning)
        )
        for one in sessions.values()
        if one.state in FINAL_STATES
    ]
    low, high = reward_range
    counted: set[str] = set()
    rewards = (
        await store.rewards([*sessions]) if sessions else []
    )  # of open sessions too, whose own reward is settled later
    for reward in sorted(rewards, key=lambda one: one.created_ns):
        # The first final reward of each session counts; later ones correct it.
        if reward.rollout_id in counted or reward.call_id is not None or reward.source in NEVER_FINAL:
            continue
        counted.add(reward.rollout_id)
        value = min(1.0, max(0.0, (reward.value - low) / (high - low)))
        is_canary = sessions[reward.rollout_id].step == canary
        found.append(SessionResult(reward.created_ns, is_canary, "reward", value))
    return found


async def _read_sessions(store: LightningStore, run_id: str, trial: Trial) -> dict[str, Rollout]:
    """The sessions that began with one of the two versions in the trial, by id, up to MAX_SESSIONS of the canary."""
    split, found, canaries = trial.split, dict[str, Rollout](), 0
    first_ms = max(0, trial.started_ns // 1_000_000 - CLOCK_SKEW_MS)
    query = RolloutQuery(run_id=run_id, after=str(uuid.UUID(int=first_ms << 80)))
    async for portion in read_rollouts(store, query):
        for one in portion:
            began = one.kind == "session" and one.created_ns >= trial.started_ns
            if began and one.step in (split.stable, split.canary):
                found[one.id] = one
                canaries += one.step == split.canary
                if canaries >= MAX_SESSIONS:
                    return found
    return found
