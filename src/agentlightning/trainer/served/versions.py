"""ServedVersions: versions of a model side by side, each sampled by an engine of its own and leased as long as it is.

Driven by serving_run.py, which decides which versions there are to be. A version's engine is a policy of the serving run:
gateways find it by its resource, which says where it is and, once it was released, that it is no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from agentlightning.config import Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.setup import EngineNeeds, make_engine
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.gateway.sessions.routes import version_alias
from agentlightning.store.base import LightningStore
from agentlightning.store.model_versions import ModelVersion
from agentlightning.store.scan import find_run
from agentlightning.trainer.model_files import version_folder
from agentlightning.trainer.policies import policy_configs
from agentlightning.trainer.processes import engine_setup, policy_value, put_tokenizer
from agentlightning.trainer.run_config import recorded_config
from agentlightning.trainer.served.settings import ServeFile, served_config
from agentlightning.types import Resource
from agentlightning.watchdog import HangLimits, Watchdog

LEASE_S = 120.0
RENEWAL_S = 30.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    engine: Engine
    watch: asyncio.Task[None]


class ServedVersions:
    """The versions of one serving run."""

    def __init__(self, store: LightningStore, run_id: str, name: str, file: ServeFile, runs: Path) -> None:
        self._store = store
        self._run_id = run_id
        self._name = name
        self._file = file
        self._runs = runs
        self._served: dict[int, _Served] = {}

    @property
    def numbers(self) -> set[int]:
        """The versions that are served."""
        return set(self._served)

    async def config(self, number: int) -> Config:
        """The configuration by which a version is sampled. NotFoundError where there is none, or its weights are gone."""
        version = await self._version(number)
        run = await find_run(self._store, version.run_id)
        trained = policy_configs(recorded_config(run))
        own = trained.get(version.policy) or next(iter(trained.values()))
        folder = await version_folder(self._store, version, self._runs)
        return served_config(own, self._file, folder, version.reference)

    async def load(self, number: int) -> None:
        """Serve a version beside the others; does nothing where it is. ConfigError, EngineError or ModelError where it
        cannot be."""
        if number in self._served:
            return
        await self.renew([number])  # from here on nobody deletes it
        config = await self.config(number)
        limits = HangLimits(
            hang_timeout_s=config.trainer.hang_timeout_s,
            stall_timeout_s=config.trainer.stall_timeout_s,
            start_timeout_s=config.trainer.start_timeout_s,
        )
        alias = version_alias(self._name, number)
        setup = engine_setup(
            config,
            EngineNeeds(),
            work_dir=self._runs / self._run_id / alias,
            watchdog=Watchdog(limits),
            learns=False,
        )
        engine = make_engine(setup)
        if not engine.support.serves:
            raise ConfigError(
                f"engine.name: {config.engine.name!r} samples only while it trains; name another engine in [engine] of the "
                "serve file, such as local"
            )
        endpoints = (await engine.start())[DEFAULT_POLICY]
        try:
            tokenizer = await put_tokenizer(self._store, self._run_id, Path(config.model.path))
            value = policy_value(config, self._name, tokenizer, endpoints, engine.support, config.trainer.seed)
            named = Resource(run_id=self._run_id, name=alias, kind="policy", value=value, step=number)
            await self._store.put_resources([named])
        except BaseException:
            await engine.close()
            raise
        self._served[number] = _Served(engine, asyncio.create_task(engine.watch()))
        log.info("serving %s@%d", self._name, number)

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
        await self._store.release_model(self._name, number, self._run_id)
        log.info("released %s@%d", self._name, number)

    async def renew(self, numbers: list[int] | None = None) -> None:
        """Keep the weights of what is served, or of these."""
        for number in sorted(self._served) if numbers is None else numbers:
            await self._store.lease_model(self._name, number, self._run_id, LEASE_S)

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
        """Stop all engines. Their leases run out: a server that starts again serves the same versions."""
        await asyncio.gather(*(_close(served) for served in self._served.values()))
        self._served.clear()

    async def _version(self, number: int) -> ModelVersion:
        for version in await self._store.models(self._name):
            if version.number == number:
                return version
        raise NotFoundError(f"{self._name}@{number}: no such version; see: agl models list")


async def _close(served: _Served) -> None:
    served.watch.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):  # what it raised was told by `watch`
        await served.watch
    await served.engine.close()
