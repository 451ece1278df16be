"""ServedVersions: versions of a model side by side, each sampled by an engine of its own.

Driven by run.py, which decides which versions there are to be. A version's engine is a policy of the serving run:
gateways find it by its resource, which says where it is and, once it was released, that it is no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentlightning.config.run import Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.setup import EngineNeeds, EngineSetup, make_engine
from agentlightning.errors import ConfigError
from agentlightning.records import Resource
from agentlightning.runtime.watchdog import STALL_TIMES, HangLimits, Watchdog
from agentlightning.serving.settings import ServeFile, served_config
from agentlightning.serving.split import version_alias
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.store.scan import find_model_version, find_run
from agentlightning.trainer.checkpoint import recorded_config
from agentlightning.trainer.model_weights import version_folder
from agentlightning.trainer.policies import policy_configs
from agentlightning.trainer.processes import engine_setup, policy_value, put_tokenizer

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
