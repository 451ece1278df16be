"""The contract of every engine, through the Engine protocol and its endpoint alone; and what is the local engine's own.

Engines are started once; every test begins at the checkpoint of the fresh model.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from engine_sequences import sequence
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentlightning.engines.base import Engine
from agentlightning.engines.local.engine import LocalEngine, weights_folders, weights_place
from agentlightning.engines.local.options import LearnerOptions
from agentlightning.engines.support import check_loss, check_preference_loss
from agentlightning.errors import EngineError, LearnerLostError, ModelError
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence
from agentlightning.watchdog import HangLimits, Watchdog

pytestmark = pytest.mark.asyncio(loop_scope="module")

SFT = Loss(name="sft")
FSDP = pytest.param("fsdp", marks=pytest.mark.slow)


class Endpoint:
    """What a gateway does with an engine's URL."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def sample(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"request_id": "", "model": "default", "token_ids": prompt, "sampling_params": {"seed": 1, **sampling}}
        async with self._http.post(f"{self.url}/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            choice: dict[str, Any] = (await answer.json())["choices"][0]
            return choice


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["local", "local-tree", FSDP])
async def started(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, Endpoint, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    packing = "prefix_tree" if request.param == "local-tree" else "padded"
    options = LearnerOptions(
        processes=2 if request.param == "fsdp" else 1,
        reference=True,
        packing=packing,  # type: ignore[arg-type]
        critic_learning_rate_ratio=10.0,
    )
    # A rank that a test stops is to be missed soon.
    watchdog = Watchdog(HangLimits(hang_timeout_s=15)) if request.param == "fsdp" else None
    engine = LocalEngine(llama, work_dir=folder, learner=options, watchdog=watchdog)
    (url,) = await engine.start()
    await engine.save(folder / "fresh")
    async with aiohttp.ClientSession() as http:
        yield engine, Endpoint(url, http), folder / "fresh"
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: tuple[Engine, Endpoint, Path]) -> Engine:
    await started[0].load(started[2])
    await started[0].publish(0)
    return started[0]


@pytest.fixture
def endpoint(started: tuple[Engine, Endpoint, Path]) -> Endpoint:
    return started[1]


@pytest.fixture
def local(engine: Engine) -> LocalEngine:
    if not isinstance(engine, LocalEngine):
        pytest.skip("the local engine's own")
    return engine


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if state(path)[1] == str(pid)]


def runs(pid: int) -> bool:
    return state(Path(f"/proc/{pid}/stat"))[0] not in "ZX"


def state(stat: Path) -> tuple[str, str]:
    """State and parent of a process; X where it is gone."""
    try:
        return tuple(stat.read_text().rpartition(")")[2].split()[:2])  # type: ignore[return-value]
    except OSError:
        return "X", ""


def conversation() -> tuple[TrainingSequence, list[TrainingSequence]]:
    """Three turns as one merged sequence, and as one row a call."""
    tokens = [3, 4, 5, 6, 20, 21, 1, 7, 8, 22, 23, 24, 1, 9, 25, 1]
    calls = [(4, 7), (9, 13), (14, 16)]
    return sequence(tokens, calls), [sequence(tokens[:end], [(start, end)]) for start, end in calls]


async def test_the_gradient_s_norm_is_that_of_a_plain_torch_loop(engine: Engine, llama: Path) -> None:
    merged, _ = conversation()
    metrics = await engine.forward_backward([merged], Loss())
    norm = (await engine.optim_step(0.0, 1.0))["grad_norm"]

    model = AutoModelForCausalLM.from_pretrained(llama)
    distributions = torch.log_softmax(model(input_ids=torch.tensor([merged.tokens])).logits[0], -1)
    total = torch.zeros(())
    for at in (i for i, sampled in enumerate(merged.mask) if sampled):
        ratio = (distributions[at - 1, merged.tokens[at]] - merged.logprobs[at]).exp()
        advantage = merged.advantages[at]
        total = total - merged.weights[at] * torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-4)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["tokens"] == sum(merged.mask)


async def test_three_updates_have_the_gradient_norms_of_a_plain_torch_loop(engine: Engine, llama: Path) -> None:
    rows = conversation()[1]
    model = AutoModelForCausalLM.from_pretrained(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        await engine.forward_backward(rows, SFT)
        norm = (await engine.optim_step(1e-3, 1.0))["grad_norm"]
        for row in rows:
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([row.tokens])).logits[0], -1)
            trained = [at for at, sampled in enumerate(row.mask) if sampled]
            (-sum(logprobs[at - 1, row.tokens[at]] for at in trained)).backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


async def test_merged_rows_give_the_gradient_of_a_row_a_call(engine: Engine) -> None:
    merged, rows = conversation()
    one = await engine.forward_backward([merged], SFT)
    norm = (await engine.optim_step(0.0, 1.0))["grad_norm"]
    many = await engine.forward_backward(rows, SFT)
    assert (await engine.optim_step(0.0, 1.0))["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert one == pytest.approx(many, rel=1e-4)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce", "sft"])
async def test_every_loss_that_the_engine_declares_is_exact_under_merging(engine: Engine, name: Any) -> None:
    if name not in engine.support.losses:
        pytest.skip("not declared")
    check_loss(engine.support, Loss(name=name))
    merged, rows = conversation()
    one = await engine.forward_backward([merged], Loss(name=name))
    norm = (await engine.optim_step(0.0, 1.0))["grad_norm"]
    many = await engine.forward_backward(rows, Loss(name=name))
    assert norm > 0
    assert (await engine.optim_step(0.0, 1.0))["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert one == pytest.approx(many, rel=1e-4)


async def test_the_reference_stays_while_the_policy_learns(engine: Engine) -> None:
    if not engine.support.reference:
        pytest.skip("not declared")
    merged, _ = conversation()
    (before,) = await engine.logprobs([merged])
    await engine.forward_backward([merged], SFT)
    await engine.optim_step(1e-2, 1.0)
    assert (await engine.reference_logprobs([merged]))[0] == pytest.approx(before, abs=1e-4)
    assert (await engine.logprobs([merged]))[0] != pytest.approx(before, abs=1e-2)


async def test_a_critic_learns_returns_beside_the_policy_and_is_resumed_with_it(engine: Engine, tmp_path: Path) -> None:
    if not engine.support.values:
        pytest.skip("not declared")
    merged, unmerged = conversation()
    loss = Loss(name="reinforce", value=0.1)
    check_loss(engine.support, loss)
    taught = replace(merged, returns=[1.0] * len(merged.tokens))

    async def update() -> float:
        metrics = await engine.forward_backward([taught], loss)
        await engine.optim_step(1e-3, 1.0)
        return metrics["value_loss"]

    assert await update() == pytest.approx(0.5 * sum(merged.mask))  # a new critic says 0 of everything
    await engine.save(tmp_path / "one")
    losses = [await update() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    values = (await engine.values([merged]))[0]
    for row, (start, end) in zip(unmerged, merged.segments, strict=True):
        assert (await engine.values([row]))[0][start:end] == pytest.approx(values[start:end], abs=1e-4)
    await engine.load(tmp_path / "one")
    assert [await update() for _ in range(5)] == losses
    assert await engine.values([merged]) == [values]


@pytest.mark.parametrize("name", ["dpo", "kto"])
async def test_preferences_move_the_policy_towards_the_chosen_answer(engine: Engine, name: Any) -> None:
    if name not in engine.support.preferences:
        pytest.skip("not declared")
    loss = PreferenceLoss(name=name)
    check_preference_loss(engine.support, loss)
    rows = [sequence([3, 4, 5, 6, last, 1], [(4, 6)]) for last in (20, 30)]
    ref = await engine.reference_logprobs(rows)
    chosen, rejected = (replace(row, ref_logprobs=values) for row, values in zip(rows, ref, strict=True))
    examples = [Preference(chosen=[chosen], rejected=[rejected])]
    if name == "kto":
        examples = [Preference(chosen=[chosen]), Preference(rejected=[rejected])]
    losses = []
    for _ in range(3):
        losses.append((await engine.forward_backward_preferences(examples, loss))["loss"])
        await engine.optim_step(3e-3, 1.0)
    assert losses[0] > losses[1] > losses[2]


async def test_resuming_is_exact(engine: Engine, tmp_path: Path) -> None:
    async def update() -> None:
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-2, 1.0)

    await update()
    await engine.save(tmp_path / "one")
    await update()
    await engine.save(tmp_path / "two")
    await update()
    await engine.load(tmp_path / "one")
    await update()
    await engine.save(tmp_path / "again")
    two, again = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "again"))
    assert all(torch.equal(two[name], again[name]) for name in two)


async def test_publishing_changes_what_is_sampled_and_stamps_the_version(engine: Engine, endpoint: Endpoint) -> None:
    wanted = [4, 5, 6, 40, 41, 42, 1]
    before = await endpoint.sample([4, 5, 6], temperature=0, max_tokens=4)
    for _ in range(30):
        await engine.forward_backward([sequence(wanted, [(3, 7)])], SFT)
        await engine.optim_step(1e-2, 1.0)
    assert (await endpoint.sample([4, 5, 6], temperature=0, max_tokens=4)) == before
    await engine.publish(7)
    after = await endpoint.sample([4, 5, 6], temperature=0, max_tokens=4)
    assert after["token_ids"] == wanted[3:]
    assert after["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]


async def test_the_sampler_s_logprobs_are_the_learner_s(engine: Engine, endpoint: Endpoint) -> None:
    await engine.forward_backward([conversation()[0]], SFT)
    await engine.optim_step(1e-2, 1.0)
    await engine.publish(1)
    for temperature in (1.0, 0.6, 0.0):
        answer = await endpoint.sample([4, 5, 6, 7], temperature=temperature, max_tokens=20)
        ids = [4, 5, 6, 7, *answer["token_ids"]]
        (learned,) = await engine.logprobs([sequence(ids, [(4, len(ids))], temperature=temperature)])
        assert learned[0] == 0.0
        assert learned[4:] == pytest.approx([e["logprob"] for e in answer["logprobs"]["content"]], abs=1e-4)


async def test_an_answer_does_not_depend_on_what_is_sampled_beside_it(engine: Engine, endpoint: Endpoint) -> None:
    prompts = [[2 + (7 * i + j) % 62 for j in range(3 + 5 * i)] for i in range(12)]
    alone = [await endpoint.sample(p, seed=i, max_tokens=20) for i, p in enumerate(prompts)]
    await engine.publish(0)  # forgets cached prefixes
    crowd = await asyncio.gather(*(endpoint.sample(p, seed=i, max_tokens=20) for i, p in enumerate(prompts)))
    assert [a["token_ids"] for a in alone] == [a["token_ids"] for a in crowd]
    assert len({tuple(a["token_ids"]) for a in alone}) > 6


async def test_greedy_answers_are_those_of_transformers_generate(
    engine: Engine, endpoint: Endpoint, llama: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    for prompt in ([4, 5, 6], [30, 2, 17, 9, 9, 12]):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        answer = await endpoint.sample(prompt, temperature=0, max_tokens=16)
        assert answer["token_ids"] == expected[0, len(prompt) :].tolist()


async def test_a_policy_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(EngineError, match="'writer'"):
        await engine.optim_step(1e-3, 1.0, policy="writer")


async def test_bad_sequences_are_an_error_of_the_verb_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(EngineError, match="vocabulary"):
        await engine.forward_backward([sequence([4, 999], [(1, 2)])], SFT)
    assert (await engine.forward_backward([sequence([4, 9], [(1, 2)])], SFT))["tokens"] == 1
    await engine.optim_step(0.0, 1.0)


async def test_a_killed_sampler_comes_back_on_its_port_with_the_published_weights(
    local: LocalEngine, endpoint: Endpoint
) -> None:
    await local.publish(5)
    before = await endpoint.sample([4, 5, 6], max_tokens=8)
    assert local.sampler_pid is not None
    os.kill(local.sampler_pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await endpoint.sample([4, 5, 6], max_tokens=8) == before
                break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def test_children_that_are_killed_early_are_started_again_but_not_for_ever(llama: Path, tmp_path: Path) -> None:
    engine = LocalEngine(llama, work_dir=tmp_path)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # it starts both, then it waits for them
    first = {pid for pid in (engine.sampler_pid, engine.learner_pid) if pid is not None}
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    assert len(await starting) == 1
    assert engine.sampler_pid is not None
    assert engine.sampler_pid not in first
    assert engine.learner_pid not in first
    watch = asyncio.create_task(engine.watch())
    while not watch.done():
        with suppress(ProcessLookupError):  # it ended, and its successor is not there yet
            os.kill(engine.sampler_pid, signal.SIGKILL)
        await asyncio.wait({watch}, timeout=0.05)
    with pytest.raises(EngineError, match="the sampler ended 6 times within a minute; its log"):
        watch.result()
    await engine.close()


async def test_a_killed_learner_is_an_error_that_says_what_to_do_and_can_be_replaced(
    local: LocalEngine, tmp_path: Path
) -> None:
    await local.save(tmp_path / "checkpoint")
    assert local.learner_pid is not None
    ranks = children(local.learner_pid)
    os.kill(local.learner_pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the learner ended .* resume from the last checkpoint"):
            await local.optim_step(1e-3, 1.0)
    async with asyncio.timeout(60):
        while True:  # no rank outlives the first
            if not any(runs(rank) for rank in ranks):
                break
            await asyncio.sleep(0.05)
    await local.restart_learner()
    await local.load(tmp_path / "checkpoint")
    assert (await local.forward_backward([conversation()[0]], SFT))["tokens"] == 9
    await local.optim_step(0.0, 1.0)


async def test_a_killed_rank_takes_the_learner_with_it_and_all_are_replaced(local: LocalEngine, tmp_path: Path) -> None:
    await local.save(tmp_path / "checkpoint")
    for kill in (signal.SIGKILL, signal.SIGSTOP):  # a hung one is killed, and then the others
        assert local.learner_pid is not None
        ranks = children(local.learner_pid)
        if not ranks:
            pytest.skip("a learner of one process")
        os.kill(ranks[0], kill)
        with pytest.raises(LearnerLostError, match="the learner ended during forward_backward; resume"):
            await local.forward_backward([conversation()[0]], SFT)
        assert not any(runs(rank) for rank in ranks)
        await local.restart_learner()
    await local.load(tmp_path / "checkpoint")
    assert (await local.forward_backward([conversation()[0]], SFT))["tokens"] == 9
    await local.optim_step(0.0, 1.0)


async def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}.*config.json"):
        await LocalEngine(tmp_path, work_dir=tmp_path / "work").start()


class WithoutLearner(LocalEngine):
    """Its learner cannot start; `waits` while it waits for the sampler."""

    waits = False

    async def _learner_ready(self) -> None:
        raise EngineError("no learner")

    async def _sampler_ready(self) -> None:
        self.waits = True
        try:
            await super()._sampler_ready()
        finally:
            self.waits = False


async def test_an_engine_whose_learner_cannot_start_waits_for_no_sampler(llama: Path, tmp_path: Path) -> None:
    engine = WithoutLearner(llama, work_dir=tmp_path)
    with pytest.raises(EngineError, match="no learner"):
        await engine.start()
    assert not engine.waits, "it would take the sampler's end for a mishap and start another"


async def test_a_model_that_does_not_load_is_refused_with_the_child_s_sentence(llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((llama / "config.json").read_bytes())
    (model / "model.safetensors").write_bytes(b"broken")
    engine = LocalEngine(model, work_dir=tmp_path / "work")
    with pytest.raises(ModelError, match=f"model {model}: its weights do not load"):
        await engine.start()
    assert engine.sampler_pid is None


async def test_published_weights_lie_in_a_folder_that_nobody_can_prepare(llama: Path, tmp_path: Path) -> None:
    shared, prefix = weights_place(tmp_path)
    left = Path(mkdtemp(prefix=prefix, dir=shared))  # by an engine that was killed
    target = tmp_path / "of somebody else"
    target.mkdir()
    link = left.with_name(left.name + "x")
    link.symlink_to(target)
    engine = LocalEngine(llama, work_dir=tmp_path)
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
