"""CanaryController: watches the canary of a serving run, and promotes it or rolls it back by its rule.

Runs in the process that serves, as a task beside it. All it knows is in the store (routes, sessions, rewards), so that a
controller that was killed goes on where it was. A decision is the next version of the run's routes, and refused where others
came meanwhile: of several controllers one decides. All gateways follow it at once, for new sessions: those that began with
the canary stay with it to their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentlightning.config.canary import CanaryConfig
from agentlightning.config.run import parse_settings
from agentlightning.config.serve import ROUTES_RESOURCE, RoutesConfig
from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.records import JSON, Resource
from agentlightning.store.base import LightningStore
from agentlightning.trainer.canary.results import WAIT_S, SessionResults
from agentlightning.trainer.canary.rule import CanaryRule, Verdict
from agentlightning.trainer.canary.shadows import read_shadow_figures

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""After a failed request to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTrial:
    """The time in which a canary runs beside a stable version."""

    routes: RoutesConfig
    version: int
    """Of the newest routes."""
    started_ns: int
    """Time at which the canary got its first share of new sessions beside this stable version."""


class CanaryController:
    """Use from one event loop; `run` never returns."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str,
        model: str,
        *,
        alias: str | None = "production",
        on_decision: Callable[[JSON], None] = lambda decision: None,
    ) -> None:
        """model: name of the registered model; alias: moved to a canary that is promoted, None: to none."""
        self._store = store
        self._run_id = run_id
        self._model = model
        self._alias = alias
        self._on_decision = on_decision

    async def run(self) -> None:
        """Judge one canary after the other. NotFoundError where the run is no more."""
        while True:
            try:
                trial = await read_trial(self._store, self._run_id)
                if _is_promoted(trial.routes):
                    await self._promote(trial)
                elif trial.routes.canary is None or trial.routes.rule is None:
                    await self._store.wait_resources(self._run_id, {ROUTES_RESOURCE: trial.version}, WAIT_S)
                else:
                    await self._judge(trial, trial.routes.rule)
            except NotFoundError:
                raise
            except StoreError as cause:
                log.warning("the canary of run %s is not judged: %s", self._run_id, cause)
                await asyncio.sleep(PAUSE_S)

    async def _judge(self, trial: CanaryTrial, config: CanaryConfig) -> None:
        """Until a decision, or other routes."""
        rule = CanaryRule(config)
        results = SessionResults(self._store, self._run_id, trial.routes, config, trial.started_ns)
        changed = asyncio.create_task(self._changed(trial.version))
        held = trial.routes.reason.get("decision") == "hold"
        try:
            while not changed.done():
                for result in await results.read():
                    value = rule.scaled_reward(result.value) if result.measure == "reward" else result.value
                    rule.record(result.measure, value, canary=result.canary)
                    verdict = rule.verdict
                    if verdict is not None and not (verdict == "undecided" and held):
                        # Whatever comes after this result had no part in the verdict: nothing more is read.
                        await self._decide(trial, config, verdict, rule.figures())
                        return
                waiting = asyncio.create_task(results.wait())
                await asyncio.wait({waiting, changed}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=changed.done())
        finally:
            changed.cancel()
            await asyncio.gather(changed, return_exceptions=True)
            await results.close()

    async def _changed(self, version: int) -> None:
        """Returns when the routes are newer than this version."""
        known = {ROUTES_RESOURCE: version}
        while True:
            found = await self._store.wait_resources(self._run_id, known, WAIT_S)
            known |= {one.name: one.version for one in found}
            if known[ROUTES_RESOURCE] > version:
                return

    async def _decide(self, trial: CanaryTrial, config: CanaryConfig, verdict: Verdict, figures: JSON) -> None:
        routes, decision = trial.routes, config.undecided if verdict == "undecided" else verdict
        reason = {
            "decided_ns": time.time_ns(),
            "decision": decision,
            "stable": f"{self._model}@{routes.stable}",
            "canary": f"{self._model}@{routes.canary}",
            "verdict": verdict,
            "figures": figures,
        }
        assert routes.canary is not None
        following = {
            # With an alias to be moved the decision alone at first, so that whoever is killed here is gone on from.
            "promote": RoutesConfig(stable=routes.canary) if self._alias is None else routes,
            "roll_back": RoutesConfig(stable=routes.stable),
            "hold": routes,
        }[decision].model_copy(update={"reason": reason})
        try:
            stored = await put_routes(self._store, self._run_id, following, after=trial.version)
        except ConflictError:
            return  # a person, or another controller, was faster
        if _is_promoted(following):
            await self._promote(replace(trial, routes=following, version=stored.version))
        self._on_decision(reason)

    async def _promote(self, trial: CanaryTrial) -> None:
        """Do what was decided, or the rest of it: the alias moves, then new sessions get the canary."""
        routes = trial.routes
        assert routes.canary is not None
        stable = routes.canary
        try:
            if self._alias is not None:
                await self._store.set_alias(self._model, self._alias, routes.canary, routes.reason)
        except (ConflictError, NotFoundError) as cause:  # its weights were deleted, which a lease prevents
            log.error("%s@%s was not promoted: %s", self._model, routes.canary, cause)
            stable = routes.stable
        with contextlib.suppress(
            ConflictError
        ):  # another controller did it, or the run that serves, which follows the alias
            await put_routes(
                self._store, self._run_id, RoutesConfig(stable=stable, reason=routes.reason), after=trial.version
            )


async def read_trial(store: LightningStore, run_id: str) -> CanaryTrial:
    """The newest routes of a serving run, and since when its two versions are together. NotFoundError where it serves
    nothing, ConfigError where they are no routes."""
    history = await store.resources(run_id, ROUTES_RESOURCE, latest=False)
    if not history:
        raise NotFoundError(f"{run_id}: serves no model; start one with: agl serve --policy NAME@ALIAS")
    newest = parse_settings(RoutesConfig, dict(history[-1].value), f"routes of {run_id}", ".")
    started_ns = history[-1].created_ns
    for each in reversed(history):
        same = (each.value.get("stable"), each.value.get("canary")) == (newest.stable, newest.canary)
        if not same or not (each.value.get("weight") or each.value.get("header")):
            break
        started_ns = each.created_ns
    return CanaryTrial(routes=newest, version=history[-1].version, started_ns=started_ns)


async def read_figures(store: LightningStore, run_id: str, trial: CanaryTrial) -> JSON:
    """The numbers of a trial so far, and the verdict of its rule, or those of shadow calls; empty where there is no
    canary."""
    if trial.routes.canary is None:
        return {}
    if trial.routes.shadow:
        return {"shadow": await read_shadow_figures(store, run_id, trial.routes, trial.started_ns)}
    config = trial.routes.rule or CanaryConfig()
    rule = CanaryRule(config)
    for result in await SessionResults(store, run_id, trial.routes, config, trial.started_ns).read():
        value = rule.scaled_reward(result.value) if result.measure == "reward" else result.value
        rule.record(result.measure, value, canary=result.canary)
    return {"figures": rule.figures(), "verdict": rule.verdict}


async def put_routes(store: LightningStore, run_id: str, routes: RoutesConfig, *, after: int | None = None) -> Resource:
    """Store new routes, which gateways follow at once. Audited, with what they say.

    `after`: the version of the routes that they follow from; ConflictError where there are newer ones.
    """
    value = routes.model_dump(mode="json")
    resource = Resource(run_id=run_id, name=ROUTES_RESOURCE, kind="routes", value=value)
    [stored] = await store.put_resources([resource], None if after is None else {ROUTES_RESOURCE: after})
    return stored


def _is_promoted(routes: RoutesConfig) -> bool:
    """True where it was decided that the canary becomes the stable version, and it is not yet."""
    return routes.canary is not None and routes.reason.get("decision") == "promote"
