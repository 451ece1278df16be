"""LocalEngine: a sampler part and a learner on this machine, each in processes of its own.

It moves weights from the one that learns to the one that samples, as a folder in shared memory that is written whole; it
imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from agentlightning.config.engine import EngineConfig, FsdpLearner, LocalSampler, VllmServerSampler
from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, EngineSetup, ForwardingEngine, Support, together
from agentlightning.engines.folders import copy_weights, find_model, seal
from agentlightning.engines.local.parts import (
    LearnerProcess,
    PublishedWeights,
    SamplerProcess,
    WeightsForm,
    Workplace,
    make_weights_folder,
)
from agentlightning.engines.sampler_address import SamplerAddress
from agentlightning.engines.vllm.servers import VllmServers, check_settings
from agentlightning.errors import EngineError, MissingExtraError
from agentlightning.runtime.disk import make_private_folder


class LocalEngine(ForwardingEngine):
    """One policy, sampled and trained on this machine. `start` must be called on a thread that lives as long as the engine:
    on Linux children end with the thread that started them."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = replace(setup, work_dir=Path(setup.work_dir).resolve())
        self._address = SamplerAddress.of(setup.config)
        self._place: Workplace | None = None
        self._sampler: SamplerProcess | VllmServers | None = None
        self._learner: LearnerProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._published: Path | None = None
        self._loaded: Path | None = None
        self._publishing = asyncio.Lock()

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Self:
        """The engine of `engine.name = "local"`. ConfigError, or MissingExtraError if a child would lack a package."""
        config = setup.config
        setup.expect_only(*EngineConfig.model_fields.keys() - {"options"})
        for package, extra, needed in (
            ("torch", "train", True),
            ("peft", "lora", config.lora_rank is not None),
        ):
            if needed and importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, extra)
        if not isinstance(config.sampler, LocalSampler):
            check_settings(config.sampler)
        return cls(setup)

    @property
    def device(self) -> str:
        if self._learner is not None:
            return self._learner.device
        return self._sampler.device if isinstance(self._sampler, SamplerProcess) else ""

    @property
    def support(self) -> Support:
        """Of the model, once started: whether it reads images is in its folder."""
        config, needs = self._setup.config, self._setup.needs
        images = isinstance(config.sampler, LocalSampler) and not isinstance(config.learner, FsdpLearner)
        return Support(
            engine="local",
            losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
            preferences=frozenset() if config.dropout else frozenset({"dpo", "kto"}),
            terms=True,
            reference=needs.reference or config.lora_rank is not None,
            token_numbers=True,
            masks=True,
            images=images and (self._watch is None or self._sampler is None or self._sampler.images),
            values=needs.critic_learning_rate is not None,
            serves=True,
        )

    def pids(self) -> dict[str, int]:
        parts = (self._sampler, self._learner)
        return {name: pid for part in parts if part is not None for name, pid in part.pids().items()}

    async def start(self) -> dict[str, Endpoints]:
        work_dir, sampler = self._setup.work_dir, self._setup.config.sampler
        model = find_model(self._setup.model).resolve()
        make_private_folder(work_dir)
        (work_dir / "logs").mkdir(exist_ok=True)
        # Servers that others run may be elsewhere: they read the run's folder, which they share, not this machine's memory.
        shared = isinstance(sampler, VllmServerSampler) and sampler.weights == "reload"
        weights_folder = make_weights_folder(work_dir, in_work_dir=shared)
        self._place = Workplace(setup=self._setup, model=model, weights_folder=weights_folder, address=self._address)
        self._sampler = self._make_sampler(self._place)
        parts: list[SamplerProcess | VllmServers | LearnerProcess] = [self._sampler]
        if self._setup.learns:
            self._learner = self._make_learner(self._place)
            parts.append(self._learner)
        else:
            self._loaded = model
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
            with contextlib.suppress(asyncio.CancelledError, EngineError):  # `watch` has raised it
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
            if self._setup.learns:
                await self._operate(policy, "export", str(folder), sampler.form)
            elif self._loaded is not None:
                await asyncio.to_thread(_copy, self._loaded, folder, sampler.form)
            old, self._published = self._published, folder
            await sampler.publish(PublishedWeights(folder, version))
            if old is not None and old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _make_sampler(self, place: Workplace) -> SamplerProcess | VllmServers:
        return SamplerProcess(place) if isinstance(self._setup.config.sampler, LocalSampler) else VllmServers(place)

    def _make_learner(self, place: Workplace) -> LearnerProcess:
        return LearnerProcess(place)

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        if policy != DEFAULT_POLICY:
            raise EngineError(f"the local engine has one policy, {DEFAULT_POLICY!r}; {policy!r} is not known")
        if not self._setup.learns and operation == "load":
            self._loaded = Path(arguments[0])
            return None
        if self._learner is None:
            why = f"{operation}: this engine samples and does not learn"
            raise EngineError("the engine is not started" if self._setup.learns else why)
        return await self._learner.operate(operation, *arguments)


def _copy(saved: Path, folder: Path, form: WeightsForm) -> None:
    """The saved weights in the form that the sampler takes."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_weights(saved, folder)
        if form == "sealed":
            seal(folder)
    except OSError as cause:
        raise EngineError(f"the weights of {saved} cannot be published: {cause.strerror or cause}") from cause
