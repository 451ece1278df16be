"""What is the local engine's own; what every engine does is in test_engine_contract.py."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest

from agentlightning.engines.base import Endpoints
from agentlightning.engines.folders import damage
from agentlightning.engines.local.engine import LocalEngine
from agentlightning.engines.local.parts import (
    LearnerProcess,
    PublishedWeights,
    SamplerProcess,
    WeightsForm,
    Workplace,
    weights_folders,
    weights_place,
)
from agentlightning.errors import EngineError, ModelError
from build import engine_setup


async def test_children_that_are_killed_early_are_started_again_but_not_for_ever(llama: Path, tmp_path: Path) -> None:
    engine = LocalEngine(engine_setup(llama, tmp_path))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # it starts both, then it waits for them
    first = set(engine.pids().values())
    assert len(first) == 2
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    assert len(await starting) == 1
    assert engine.pids().keys() == {"sampler", "learner"}
    assert not first & set(engine.pids().values())
    watch = asyncio.create_task(engine.watch())
    while not watch.done():
        with suppress(ProcessLookupError):  # it ended, and its successor is not there yet
            os.kill(engine.pids()["sampler"], signal.SIGKILL)
        await asyncio.wait({watch}, timeout=0.05)
    with pytest.raises(EngineError, match="the sampler ended 6 times within a minute; its log"):
        watch.result()
    await engine.close()


async def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}.*config.json"):
        await LocalEngine(engine_setup(tmp_path, tmp_path / "work")).start()


class WaitingSampler(SamplerProcess):
    """Says so while it is waited for."""

    waits = False

    async def ready(self) -> None:
        self.waits = True
        try:
            await super().ready()
        finally:
            self.waits = False


class NoLearner(LearnerProcess):
    async def ready(self) -> None:
        raise EngineError("no learner")


class WithoutLearner(LocalEngine):
    """Its learner cannot start."""

    def _make_learner(self, place: Workplace) -> LearnerProcess:
        return NoLearner(place)

    def _make_sampler(self, place: Workplace) -> WaitingSampler:
        self.sampler = WaitingSampler(place)
        return self.sampler


async def test_an_engine_whose_learner_cannot_start_waits_for_no_sampler(llama: Path, tmp_path: Path) -> None:
    engine = WithoutLearner(engine_setup(llama, tmp_path))
    with pytest.raises(EngineError, match="no learner"):
        await engine.start()
    assert not engine.sampler.waits, "it would take the sampler's end for a mishap and start another"


async def test_a_model_that_does_not_load_is_refused_with_the_child_s_sentence(llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((llama / "config.json").read_bytes())
    (model / "model.safetensors").write_bytes(b"broken")
    engine = LocalEngine(engine_setup(model, tmp_path / "work"))
    with pytest.raises(ModelError, match=f"model {model}: its weights do not load"):
        await engine.start()
    assert engine.pids() == {}


async def test_published_weights_lie_in_a_folder_that_nobody_can_prepare(llama: Path, tmp_path: Path) -> None:
    shared, prefix = weights_place(tmp_path)
    left = Path(mkdtemp(prefix=prefix, dir=shared))  # by an engine that was killed
    target = tmp_path / "of somebody else"
    target.mkdir()
    link = left.with_name(left.name + "x")
    link.symlink_to(target)
    engine = LocalEngine(engine_setup(llama, tmp_path))
    try:
        await engine.start()
        (folder,) = weights_folders(tmp_path)
        assert folder != left
        assert folder.stat().st_mode & 0o777 == 0o700
        assert link.is_symlink()
        await engine.publish(3)
        assert (folder / "v3" / "config.json").is_file()
    finally:
        await engine.close()
        link.unlink()
    assert weights_folders(tmp_path) == []
    assert target.is_dir()


class NotedSampler:
    """A sampler part without a process, which notes what it is given."""

    images = False

    def __init__(self, form: WeightsForm) -> None:
        self.form = form
        self.endpoints = Endpoints(urls=["http://sampler"])
        self.published: list[tuple[int, list[str]]] = []

    def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def publish(self, weights: PublishedWeights) -> None:
        assert damage(weights.folder) is None
        self.published.append((weights.version, sorted(path.name for path in weights.folder.iterdir())))

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def pids(self) -> dict[str, int]:
        return {}

    async def close(self) -> None: ...


@pytest.mark.parametrize(("form", "more"), [("weights", []), ("sealed", ["manifest.json"])])
async def test_an_engine_that_does_not_learn_samples_with_the_saved_weights_that_it_is_given(
    llama: Path, tmp_path: Path, form: WeightsForm, more: list[str]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("config.json", "model.safetensors", "learner.pt", "manifest.json"):
        (saved / name).write_text('{"files": {}}')
    sampler = NotedSampler(form)

    class Noted(LocalEngine):
        def _make_sampler(self, place: Workplace) -> NotedSampler:
            return sampler

    engine = Noted(engine_setup(llama, tmp_path / "work", learns=False))
    await engine.start()
    await engine.publish(1)  # nothing was loaded: what it was made with, by the number that calls then carry
    await engine.load(saved)
    await engine.publish(2)
    await engine.restart_learner()
    with pytest.raises(EngineError, match="optim_step: this engine samples and does not learn"):
        await engine.optim_step(0.1, 1.0)
    await engine.load(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="nowhere cannot be published"):
        await engine.publish(3)
    await engine.close()
    made_of = {*os.listdir(llama), *more}
    assert sampler.published == [(1, sorted(made_of)), (2, sorted(["config.json", "model.safetensors", *more]))]
