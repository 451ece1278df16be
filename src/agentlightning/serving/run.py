"""ServingRun: ``agl serve --policy``: a run without a trainer, whose users are served a registered model.

Versions of the model are served side by side, each by an engine of its own, which gateways find as a policy of the run.
Everything is derived from the store, again and again: which version the alias names, what the split is, which sessions are
open, whether a canary is worse. So a killed server that is started again continues the same run with the same keys and
sessions. Knows no session's content and no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from agentlightning.config.run import LIMITS_RESOURCE, Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine, EngineNeeds, EngineSetup, make_engine, together
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, NotFoundError
from agentlightning.records import Resource
from agentlightning.runtime.watchdog import STALL_TIMES, HangLimits, Watchdog
from agentlightning.serving.settings import ServeFile, serve_record, served_config
from agentlightning.serving.split import SPLIT_RESOURCE, Split, put_split, read_evidence, read_trial, version_alias
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.models import ModelReference, ModelVersion, parse_reference
from agentlightning.store.scan import find_model_version, find_run, read_rollouts
from agentlightning.trainer.checkpoint import recorded_config
from agentlightning.trainer.model_weights import version_folder
from agentlightning.trainer.policies import policy_configs
from agentlightning.trainer.processes import engine_setup, policy_value, put_tokenizer, record_run_status

POLL_S = 30.0
LOOK_S = 5.0
"""Seconds between looks at whether the last session of a version has ended."""
PAUSE_S = 1.0
JUDGE_S = 1.0
JUDGE_PAUSES = 10
"""A canary is judged at most a tenth of the time, and at most once a second."""
RETENTION_S = 3600.0
MAX_DROPPED = 500
"""Sessions whose records are deleted at a time."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    engine: Engine
    watch: asyncio.Task[None]


class ServedVersions:
    """The versions of one serving run."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str,
        name: str,
        file: ServeFile,
        runs: Path,
        make: Callable[[EngineSetup], Engine] = make_engine,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._name = name
        self._file = file
        self._runs = runs
        self._make = make
        self._served: dict[int, _Served] = {}

    @property
    def numbers(self) -> set[int]:
        """The versions that are served."""
        return set(self._served)

    async def config(self, number: int) -> Config:
        """The configuration by which a version is sampled. NotFoundError where there is none, or its weights are gone."""
        return await self._config(await self._version(number))

    async def _config(self, version: ModelVersion) -> Config:
        run = await find_run(self._store, version.run_id)
        trained = policy_configs(recorded_config(run))
        own = trained.get(version.policy) or next(iter(trained.values()))
        folder = await version_folder(version, self._runs)
        return served_config(own, self._file, folder, version.reference)

    async def load(self, number: int) -> None:
        """Serve a version beside the others; does nothing where it is. ConfigError, EngineError or ModelError where it
        cannot be."""
        if number in self._served:
            return
        self._served[number] = await self._start(await self._version(number))
        log.info("serving %s@%d", self._name, number)

    async def _start(self, version: ModelVersion) -> _Served:
        """Start a version's engine, and tell the gateways where it is."""
        config = await self._config(version)
        limits = HangLimits(
            hang_timeout_s=config.trainer.hang_timeout_s,
            stall_timeout_s=STALL_TIMES * config.trainer.hang_timeout_s,
            start_timeout_s=config.trainer.start_timeout_s,
        )
        alias = version_alias(self._name, version.number)
        setup = engine_setup(
            config,
            EngineNeeds(),
            work_dir=self._runs / self._run_id / alias,
            watchdog=Watchdog(limits),
            learns=False,
        )
        engine = self._make(setup)
        if not engine.support.serves:
            raise ConfigError(
                f"engine.name: {config.engine.name!r} samples only while it trains; name another engine in [engine] of the "
                "serve file, such as local"
            )
        endpoints = (await engine.start())[DEFAULT_POLICY]
        try:
            tokenizer = await put_tokenizer(self._store, self._run_id, Path(config.model.path))
            value = policy_value(config, self._name, tokenizer, endpoints, engine.support, config.trainer.seed)
            value["prompts"] = await self._put_prompts(version)
            named = Resource(run_id=self._run_id, name=alias, kind="policy", value=value, step=version.number)
            await self._store.put_resources([named])
        except BaseException:
            await engine.close()
            raise
        return _Served(engine, asyncio.create_task(engine.watch()))

    async def release(self, number: int) -> None:
        """Serve a version no longer. The gateways know it first."""
        served = self._served.pop(number)
        released = Resource(
            run_id=self._run_id,
            name=version_alias(self._name, number),
            kind="policy",
            value={"released": True},
            step=number,
        )
        await self._store.put_resources([released])
        await _close(served)
        log.info("released %s@%d", self._name, number)

    async def watch(self) -> None:
        """Never returns; EngineError where a version can be served no longer."""
        while True:
            watches = [served.watch for served in self._served.values()]
            done, _ = await asyncio.wait(watches, timeout=1.0) if watches else (set(), set())
            for watch in done:
                if any(served.watch is watch for served in self._served.values()):
                    watch.result()
            if not watches:
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Stop all engines."""
        await asyncio.gather(*(_close(served) for served in self._served.values()))
        self._served.clear()

    async def _put_prompts(self, version: ModelVersion) -> dict[str, int]:
        """Copy the prompt templates that the version goes with to the serving run; their versions there, by name."""
        pins: dict[str, int] = {}
        for newest in await self._store.resources(version.run_id):
            if newest.kind != "prompt_template":
                continue
            named = version.prompts.get(newest.name, newest.version)
            [template] = await self._store.resources(version.run_id, newest.name, version=named)
            mine = await self._store.resources(self._run_id, newest.name, latest=False)
            known = next((one for one in mine if one.value == template.value), None)
            if known is None:
                copy = Resource(run_id=self._run_id, name=newest.name, kind="prompt_template", value=template.value)
                [known] = await self._store.put_resources([copy])
            pins[newest.name] = known.version
        return pins

    async def _version(self, number: int) -> ModelVersion:
        return await find_model_version(self._store, f"{self._name}@{number}")


async def _close(served: _Served) -> None:
    served.watch.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):  # what it raised was told by `watch`
        await served.watch
    await served.engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A registered model that a server serves beside what it always does."""

    reference: ModelReference
    file: ServeFile
    runs: Path
    run_id: str

    @classmethod
    def of(cls, policy: str, file: ServeFile, runs: Path, run_id: str | None) -> ServedModel:
        """By a reference such as ``support@production``; without an id the run has one made of it, always the same."""
        reference = parse_reference(policy, "--policy")
        return cls(reference=reference, file=file, runs=runs, run_id=run_id or f"serve-{policy.replace('@', '-')}")

    async def run(self, address: str, key: str, tell: Callable[[str], None]) -> None:
        """Serve through the server at this address until cancelled."""
        async with LightningStoreClient(address, key) as store:
            await ServingRun(store, self, tell).run()


class ServingRun:
    """One run that serves a model. `tell` gets sentences for whoever started it."""

    def __init__(self, store: LightningStore, serving: ServedModel, tell: Callable[[str], None]) -> None:
        self._store = store
        self._reference = serving.reference
        self._file = serving.file
        self._tell = tell
        self.run_id = serving.run_id
        self.versions = ServedVersions(store, self.run_id, self._reference.name, self._file, serving.runs)
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; raises what ends it: ConfigError, NotFoundError, EngineError."""
        try:
            number = await self._wanted(None)
            await self._begin(number)
            async with record_run_status(self._store, self.run_id, cancelled="finished"):  # it ends as its user says
                await self._serve(number)
        finally:
            await self.versions.close()

    async def _serve(self, number: int) -> None:
        await self._reconcile()
        key = f"agl tokens create --role client --run {self.run_id}"
        self._tell(f"serving {self._reference.name}@{number} as run {self.run_id}; a key for it is made by: {key}")
        loops = [self._reconciling(), self._watch_aliases(), self._watch_split(), self._judging(), self._dropping()]
        await together([*loops, self.versions.watch()])

    async def _begin(self, number: int) -> None:
        """Make the run, or go on with the one that has ended."""
        name = self._reference.name
        config = serve_record(await self.versions.config(number), self._file, name)
        found = await self._store.runs([self.run_id])
        if not found:
            await self._store.create_run(f"serve {name}", config, self.run_id)
        else:
            known = found[0].config.get("serve")
            if known != config["serve"]:
                raise ConfigError(
                    f"serve: run {self.run_id} began with other settings, which hold for its users: {known}; give the new "
                    "settings a run of their own with --run ID"
                )
            await self._store.update_run(self.run_id, state="running")
        limits = self._file.limits.model_dump(mode="json")
        known_limits = await self._store.resources(self.run_id, LIMITS_RESOURCE)
        if not known_limits or known_limits[0].value != limits:
            await self._store.put_resources(
                [Resource(run_id=self.run_id, name=LIMITS_RESOURCE, kind="limits", value=limits)]
            )

    async def _wanted(self, split: Split | None) -> int:
        """The version that new sessions get; where the alias was removed, the one that they get now."""
        name, number, alias = self._reference
        if number is not None:
            return number
        for one in await self._store.aliases(name):
            if one.alias == alias and one.number is not None:
                return one.number
        if split is not None:
            return split.stable
        raise NotFoundError(f"{name}@{alias}: no such alias; see: agl models list")

    async def _reconcile(self) -> None:
        """Make what is served what is to be served."""
        split, version = await self._split()
        wanted = await self._wanted(split)
        await self.versions.load(wanted)
        if split is None or split.stable != wanted:
            split = with_stable(split, wanted)
            try:
                await put_split(self._store, self.run_id, split, after=version)
            except ConflictError:  # such as a roll-back: what was read is old
                self._changed.set()
                return
        open_on = await self._open_versions()
        named = {one for one in (split.stable, split.canary) if one is not None}
        for number in sorted((named | open_on) - self.versions.numbers):
            try:
                await self.versions.load(number)
            except (ConfigError, NotFoundError) as why:  # a canary gets nobody, and its open sessions end
                log.warning("%s@%s is not served: %s", self._reference.name, number, why)
        for number in sorted(self.versions.numbers - named - open_on):
            await self.versions.release(number)

    async def _split(self) -> tuple[Split | None, int]:
        """The newest split, and its version."""
        found = await self._store.resources(self.run_id, SPLIT_RESOURCE)
        return (Split(**found[0].value), found[0].version) if found else (None, 0)

    async def _open_versions(self) -> set[int]:
        query = RolloutQuery(run_id=self.run_id, states=["running"])
        return {rollout.step async for portion in read_rollouts(self._store, query) for rollout in portion}

    # --- what makes it look again -----------------------------------------------------------------------------------

    async def _reconciling(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                split, _ = await self._patiently(self._split) or (None, 0)
                if split is not None and self.versions.numbers <= {split.stable, split.canary}:
                    continue  # nothing to be released
            self._changed.clear()
            await self._patiently(self._reconcile)

    async def _watch_aliases(self) -> None:
        name, number, _ = self._reference
        known: dict[str, int] = {}
        while number is None:
            found = await self._patiently(partial(self._store.wait_aliases, name, known, POLL_S))
            now = {one.alias: one.number for one in found or () if one.number is not None}
            if now != known and found is not None:
                known = now
                self._changed.set()

    async def _watch_split(self) -> None:
        known: dict[str, int] = {}
        while True:
            found = await self._patiently(partial(self._store.wait_resources, self.run_id, known, POLL_S)) or []
            known |= {one.name: one.version for one in found}
            if any(one.kind == "routes" for one in found):
                self._changed.set()

    async def _judging(self) -> None:
        """Takes a canary that is worse out of the split."""
        while True:
            took_s = await self._patiently(self._judge)
            await asyncio.sleep(LOOK_S if took_s is None else max(JUDGE_S, JUDGE_PAUSES * took_s))

    async def _judge(self) -> float | None:
        """Seconds that the judgement took; None where there is no canary."""
        trial = await read_trial(self._store, self.run_id)
        split = trial.split
        if split.canary is None or not split.weight:
            return None
        asked_s = time.monotonic()
        evidence = await read_evidence(self._store, self.run_id, trial, self._file.serve)
        if evidence.worse is not None:
            reason = {
                "decision": "rollback",
                "canary": f"{self._reference.name}@{split.canary}",
                "worse": evidence.worse,
                "figures": evidence.figures,
            }
            with contextlib.suppress(ConflictError):  # a person was faster
                await put_split(
                    self._store, self.run_id, Split(stable=split.stable, reason=reason), after=trial.version
                )
                log.warning("%s is rolled back: its %s is worse", reason["canary"], evidence.worse)
        return time.monotonic() - asked_s

    async def _dropping(self) -> None:
        """Delete calls and words of sessions that ended long ago."""
        days = self._file.serve.keep_days
        while days is not None:
            await self._patiently(lambda: self._drop_old(time.time_ns() - int(days * 86_400e9)))
            await asyncio.sleep(RETENTION_S)

    async def _drop_old(self, before_ns: int) -> None:
        async for portion in read_rollouts(self._store, RolloutQuery(run_id=self.run_id)):
            old = [one.id for one in portion if one.finished_ns is not None and one.finished_ns < before_ns]
            for start in range(0, len(old), MAX_DROPPED):
                await self._store.drop_records(old[start : start + MAX_DROPPED])

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Its result; None, after a pause, where the store is away or what was asked for cannot be done now."""
        try:
            return await work()
        except AgentLightningError as cause:
            log.warning("serving goes on as it is: %s", cause)
            await asyncio.sleep(PAUSE_S)
            return None


def with_stable(split: Split | None, number: int) -> Split:
    """The split once the alias names this version: a canary that became the stable version is none any more."""
    if split is None or split.canary is None or split.canary == number:
        return Split(stable=number)
    return split.model_copy(update={"stable": number})
