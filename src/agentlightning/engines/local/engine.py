"""LocalEngine: a sampler part and a learner part on this machine, each in processes of its own.

The trainer drives it through the Engine protocol. It starts the parts and moves weights from the one that learns to the one
that samples, as a folder in shared memory that is written whole; it imports no torch and computes nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, ForwardingEngine, together
from agentlightning.engines.local.learner_part import LearnerProcess
from agentlightning.engines.local.models import reads_images
from agentlightning.engines.local.options import (
    SETTINGS,
    LearnerOptions,
    WeightsForm,
    learner_options,
    sampler_options,
    support,
)
from agentlightning.engines.local.parts import LearnerPart, PublishedWeights, SamplerChoice, SamplerPart, Workplace
from agentlightning.engines.local.sampler_part import SamplerProcess
from agentlightning.engines.local.weights_folder import make_weights_folder
from agentlightning.engines.models import find_model
from agentlightning.engines.sampler_address import SamplerAddress
from agentlightning.engines.saved_folders import copy_weights, seal
from agentlightning.engines.setup import EngineSetup
from agentlightning.engines.support import Support
from agentlightning.engines.vllm.arguments import check_settings
from agentlightning.engines.vllm.servers import VllmServers
from agentlightning.errors import EngineError, MissingExtraError
from agentlightning.runtime.disk import make_private_folder
from agentlightning.runtime.watchdog import Watchdog


class LocalEngine(ForwardingEngine):
    """One policy, sampled and trained on this machine.

    model is a transformers folder or hub name; logs go to work_dir/logs. `start` must be called on a thread that lives as
    long as the engine: on Linux children end with the thread that started them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        work_dir: str | Path,
        sampler: SamplerChoice = SamplerChoice(SamplerProcess),
        learner: LearnerOptions | None = None,
        learns: bool = True,
        watchdog: Watchdog | None = None,
        withhold: Iterable[str] = (),
        address: SamplerAddress = SamplerAddress(),
    ) -> None:
        """learns: False where the model is sampled alone: as it is, or with saved weights that it is given by `load` and
        `publish`; withhold: variables of the environment that no process inherits."""
        self._learns = learns
        self._withhold = frozenset(withhold)
        self._address = address
        self._model = model
        self._watchdog = watchdog or Watchdog()
        self._work_dir = Path(work_dir).resolve()
        self._choice = sampler
        self._learner_options = learner or LearnerOptions()
        self._place: Workplace | None = None
        self._sampler: SamplerPart | None = None
        self._learner: LearnerPart | None = None
        self._watch: asyncio.Task[None] | None = None
        self._published: Path | None = None
        self._loaded: Path | None = None
        self._publishing = asyncio.Lock()

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Self:
        """The engine of `engine.name = "local"`. ConfigError, or MissingExtraError where a child would lack a package."""
        setup.expect_only(*SETTINGS)
        engine = setup.config
        for package, extra, needed in (
            ("torch", "train", True),
            ("peft", "lora", engine.lora is not None),
            ("bitsandbytes", "adamw8bit", engine.optimizer == "adamw_8bit"),
        ):
            if needed and importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, extra)
        return cls(
            setup.model,
            work_dir=setup.work_dir,
            sampler=_sampler(setup),
            learner=learner_options(setup),
            learns=setup.learns,
            watchdog=setup.watchdog,
            withhold=setup.withhold,
            address=SamplerAddress.of(engine),
        )

    @property
    def device(self) -> str:
        return self._learner.device if self._learner is not None else ""

    @property
    def support(self) -> Support:
        """Of the model, once started: whether it has sight is in its folder."""
        found = support(self._learner_options)
        images = found.images and self._choice.images
        return replace(found, images=images and (self._place is None or reads_images(self._place.model)))

    def pids(self) -> dict[str, int]:
        parts = (self._sampler, self._learner)
        return {name: pid for part in parts if part is not None for name, pid in part.pids().items()}

    async def start(self) -> dict[str, Endpoints]:
        model = find_model(self._model).resolve()
        make_private_folder(self._work_dir)
        (self._work_dir / "logs").mkdir(exist_ok=True)
        self._place = Workplace(
            model=model,
            work_dir=self._work_dir,
            weights_folder=make_weights_folder(self._work_dir, in_work_dir=self._choice.reads_work_dir),
            watchdog=self._watchdog,
            withhold=self._withhold,
            address=self._address,
        )
        self._sampler = self._choice.make(self._place)
        parts: list[SamplerPart | LearnerPart] = [self._sampler]
        if self._learns:
            self._learner = self._make_learner(self._place)
            parts.append(self._learner)
        try:
            for part in parts:
                part.start()
            # Together: one that goes on waiting takes the end of its child for a mishap and starts another.
            await together([part.ready() for part in parts])
        except BaseException:
            await self.close()
            raise
        self._watch = asyncio.create_task(self._sampler.watch())
        return {DEFAULT_POLICY: self._sampler.endpoints}

    async def watch(self) -> None:
        assert self._watch is not None
        await asyncio.shield(self._watch)  # a watch that is no longer needed is cancelled, the next one watches on

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):  # whoever watched was told
                await self._watch
            self._watch = None
        await asyncio.gather(*(part.close() for part in (self._sampler, self._learner) if part is not None))
        if self._place is not None:
            shutil.rmtree(self._place.weights_folder, ignore_errors=True)
        self._sampler = self._learner = self._place = None

    async def restart_learner(self) -> None:
        if self._learner is not None:
            await self._learner.restart()

    async def publish(self, version: int, policy: str = DEFAULT_POLICY) -> None:
        async with self._publishing:
            sampler, place = self._sampler, self._place
            if sampler is None or place is None:
                raise EngineError("the engine is not started")
            folder = place.weights_folder / f"v{version}"
            if self._learns:
                await self._operate(policy, "export", str(folder), sampler.form)
            elif self._loaded is None:
                return  # it samples what it was made with
            else:
                await asyncio.to_thread(_copy, self._loaded, folder, sampler.form)
            old, self._published = self._published, folder
            await sampler.publish(PublishedWeights(folder, version))
            if old is not None and old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _make_learner(self, place: Workplace) -> LearnerPart:
        return LearnerProcess(place, self._learner_options)

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        if policy != DEFAULT_POLICY:
            raise EngineError(f"the local engine has one policy, {DEFAULT_POLICY!r}; {policy!r} is not known")
        if not self._learns and operation == "load":
            self._loaded = Path(arguments[0])
            return None
        if self._learner is None:
            raise EngineError(
                "the engine is not started" if self._learns else f"{operation}: this engine samples and does not learn"
            )
        return await self._learner.operate(operation, *arguments)


def _sampler(setup: EngineSetup) -> SamplerChoice:
    config = setup.config
    if config.vllm is None:
        return SamplerChoice(partial(SamplerProcess, options=sampler_options(setup)))
    check_settings(config)
    elsewhere = bool(config.vllm.urls) and config.vllm.weights != "transfer"
    return SamplerChoice(partial(VllmServers, config=config), images=False, reads_work_dir=elsewhere)


def _copy(saved: Path, folder: Path, form: WeightsForm) -> None:
    """The saved weights of a policy in the form that the sampler takes; EngineError where they cannot be copied."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_weights(saved, folder)
        if form == "sealed":
            seal(folder)
    except OSError as cause:
        raise EngineError(f"the weights of {saved} cannot be published: {cause.strerror or cause}") from cause
