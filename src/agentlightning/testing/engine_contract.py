"""The contract of every engine, through the Engine protocol and its endpoints alone.

A test file runs it on an engine by importing everything and saying which engine is meant:

    from agentlightning.testing.engine_contract import *

    @pytest.fixture(scope="module")
    def engine_settings():
        return {"name": "mypackage.module:Engine"}

`engine_settings` is the table [engine]; with params, the suite runs once for each. The engine is started once; every test
begins at the checkpoint of the fresh model. A test of what `support` does not declare is skipped. Needs pytest,
pytest-asyncio, torch and transformers; a conftest.py that calls ``pytest.register_assert_rewrite`` with this module's name
makes failures speak. The suite computes in float32 on a CPU.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentlightning.adapters.sequences import until_last_signal
from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import (
    DEFAULT_POLICY,
    SKIPPED,
    Endpoints,
    Engine,
    EngineNeeds,
    EngineSetup,
    check_loss,
    check_preference_loss,
    make_engine,
)
from agentlightning.engines.folders import LEARNER_STATE, MANIFEST, damage
from agentlightning.errors import ConfigError, EngineError, LearnerLostError
from agentlightning.gateway.policy.engine_client import GENERATE, SampledTokens, read_answer
from agentlightning.testing.contract_model import write_contract_model
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.weight_probe import WeightProbe
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence

pytestmark = pytest.mark.asyncio(loop_scope="module")

SFT = Loss(name="sft")
BACK_S = 600.0
"""Seconds that a part that was killed may take until it serves again."""


@dataclass(frozen=True)
class LiveEndpoints:
    """Samples an engine's endpoints as gateways do."""

    served: Endpoints
    http: aiohttp.ClientSession

    async def sample(self, prompt: list[int], **sampling: Any) -> SampledTokens:
        params = {"logprobs": 1, "seed": 1, **sampling}
        if not self.served.seeded:
            del params["seed"]
        request = {"request_id": "", "token_ids": prompt, "sampling_params": params, "stream": False}
        data = {**request, "model": self.served.served_model or DEFAULT_POLICY}
        async with self.http.post(f"{self.served.urls[0]}{GENERATE}", json=data) as response:
            response.raise_for_status()
            sampled = SampledTokens()
            sampled.add(read_answer(await response.read()), -1)
            return sampled


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contract_model(tmp_path_factory.mktemp("contract") / "model")


def contract_setup(settings: dict[str, Any], model: Path, work_dir: Path) -> EngineSetup:
    """The setup of an engine under test: float32 on a CPU, with a reference and a critic where the engine keeps any."""
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", **settings})
    needs = EngineNeeds(reference=True, critic_learning_rate=3e-3)
    return EngineSetup(model=model, work_dir=work_dir, config=config, learning_rate=1e-3, needs=needs)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(
    engine_settings: dict[str, Any], contract_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, LiveEndpoints, Path]]:
    folder = tmp_path_factory.mktemp("engine")
    engine = make_engine(contract_setup(engine_settings, contract_model, folder))
    served = (await engine.start())[DEFAULT_POLICY]
    await engine.save(folder / "fresh")
    async with aiohttp.ClientSession() as http:
        yield engine, LiveEndpoints(served, http), folder / "fresh"
    await engine.close()
    assert engine.pids() == {}


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: tuple[Engine, LiveEndpoints, Path]) -> Engine:
    """Back at the fresh model, whatever the test before did."""
    await started[0].load(started[2])
    await started[0].publish(0)
    return started[0]


@pytest.fixture
def sampler(started: tuple[Engine, LiveEndpoints, Path]) -> LiveEndpoints:
    return started[1]


def sequence(tokens: list[int], sampled: list[tuple[int, int]], **changes: Any) -> TrainingSequence:
    """A training sequence whose sampled tokens are the given [start, end) ranges."""
    mask = [any(start <= place < end for start, end in sampled) for place in range(len(tokens))]
    settings: dict[str, Any] = {
        "rollout_id": "r",
        "tokens": tokens,
        "mask": mask,
        "logprobs": [-1.0 if trained else 0.0 for trained in mask],
        "advantages": [1.0 if trained else 0.0 for trained in mask],
        "weights": [1.0 if trained else 0.0 for trained in mask],
        "segments": sampled,
    }
    return TrainingSequence(**{**settings, **changes})


def conversation() -> tuple[TrainingSequence, list[TrainingSequence]]:
    """Three turns as one merged sequence, and as one row per call."""
    tokens = [3, 4, 5, 6, 20, 21, 1, 7, 8, 22, 23, 24, 1, 9, 25, 1]
    calls = [(4, 7), (9, 13), (14, 16)]
    return sequence(tokens, calls), [sequence(tokens[:end], [(start, end)]) for start, end in calls]


def plain_loss(model: Any, rows: list[TrainingSequence]) -> torch.Tensor:
    """The clipped loss of PPO, summed over tokens with their weights (Schulman et al. 2017, equation 7)."""
    total = torch.zeros(())
    for row in rows:
        distributions = torch.log_softmax(model(input_ids=torch.tensor([row.tokens])).logits[0], -1)
        for at in (place for place, trained in enumerate(row.mask) if trained):
            ratio = (distributions[at - 1, row.tokens[at]] - row.logprobs[at]).exp()
            advantage = row.advantages[at]
            total = total - row.weights[at] * torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return total


async def test_three_updates_are_those_of_plain_torch(engine: Engine, contract_model: Path) -> None:
    merged, _ = conversation()
    other = sequence([30, 31, 2, 17, 40, 41, 1], [(3, 7)], advantages=[0, 0, 0, -0.5, -0.5, -0.5, -0.5])
    model = AutoModelForCausalLM.from_pretrained(contract_model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        metrics = await engine.forward_backward([merged], Loss())
        more = await engine.forward_backward([other], Loss())  # accumulates
        norm = (await engine.optim_step(1e-3, 1.0))["grad_norm"]

        optimizer.zero_grad()
        losses = [plain_loss(model, [row]) for row in (merged, other)]
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert [metrics["loss"], more["loss"]] == pytest.approx([float(one.detach()) for one in losses], rel=1e-5)
        assert [metrics["tokens"], more["tokens"]] == [sum(merged.mask), sum(other.mask)]


async def test_the_numbers_of_an_update_are_those_of_its_tokens(engine: Engine) -> None:
    if not engine.support.token_numbers:
        pytest.skip("not declared")
    merged, rows = conversation()
    (logprobs,) = await engine.logprobs([merged])
    metrics = await engine.forward_backward([sequence([3, 4, 5], []), merged], Loss())
    nothing, found = await engine.token_numbers()
    assert (nothing.ratios, nothing.entropies) == ([1.0] * 3, [0.0] * 3)
    to_sampler = found.ratios
    assert [one > 0 for one in found.entropies] == merged.mask
    assert sum(found.entropies) / sum(merged.mask) == pytest.approx(metrics["entropy"], rel=1e-3)
    expected = [math.exp(now + 1.0) if trained else 1.0 for now, trained in zip(logprobs, merged.mask, strict=True)]
    assert to_sampler == pytest.approx(expected, rel=1e-3)
    await engine.forward_backward([replace(merged, old_logprobs=logprobs)], Loss())
    assert (await engine.token_numbers())[0].ratios == pytest.approx([1.0] * len(merged.tokens), rel=1e-3)
    await engine.forward_backward(rows, Loss())
    for row, numbers, (start, end) in zip(rows, await engine.token_numbers(), merged.segments, strict=True):
        assert len(numbers.ratios) == len(numbers.entropies) == len(row.tokens)
        assert numbers.ratios[start:end] == pytest.approx(to_sampler[start:end], rel=1e-3)
        assert numbers.entropies[start:end] == pytest.approx(found.entropies[start:end], rel=1e-3)


async def test_merged_rows_give_the_gradient_of_a_row_per_call(engine: Engine) -> None:
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


async def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_nothing_behind(engine: Engine) -> None:
    merged, _ = conversation()
    (before,) = await engine.logprobs([merged])
    await engine.forward_backward([replace(merged, weights=[float("inf")] * len(merged.tokens))], SFT)
    assert (await engine.optim_step(1e-2, 1.0)).items() >= SKIPPED.items()
    assert (await engine.logprobs([merged]))[0] == pytest.approx(before, abs=1e-6)
    await engine.forward_backward([merged], SFT)
    assert 0 < (await engine.optim_step(0.0, 1.0))["grad_norm"] < float("inf")


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "reinforce"])
async def test_calls_after_the_last_that_has_an_advantage_change_no_gradient(engine: Engine, name: Any) -> None:
    if name not in engine.support.losses:
        pytest.skip("not declared")
    whole, rows = conversation()
    end = len(rows[1].tokens)
    whole.advantages[end:] = [0.0] * (len(whole.tokens) - end)
    losses = [Loss(name=name)]
    if engine.support.terms:
        (logprobs,) = await engine.logprobs([whole])
        whole = replace(whole, old_logprobs=logprobs)
        losses.append(Loss(name=name, importance="call", ratio_mask="call", ratio_mask_low=0.0, ratio_mask_high=1e9))
    for loss in losses:
        norms = []
        for row in (whole, until_last_signal(whole)):
            assert row is not None
            await engine.forward_backward([row], loss)
            norms.append((await engine.optim_step(0.0, 1.0))["grad_norm"])
        assert norms[0] > 0
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)


async def test_the_reference_stays_while_the_policy_learns_and_is_loaded(engine: Engine, tmp_path: Path) -> None:
    if not engine.support.reference:
        pytest.skip("not declared")
    merged, _ = conversation()
    (before,) = await engine.logprobs([merged])
    await engine.forward_backward([merged], SFT)
    await engine.optim_step(1e-2, 1.0)
    await engine.save(tmp_path / "moved")
    await engine.load(tmp_path / "moved")
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


async def test_a_checkpoint_is_a_sealed_transformers_folder(engine: Engine, tmp_path: Path) -> None:
    merged, _ = conversation()
    await engine.forward_backward([merged], SFT)
    await engine.optim_step(1e-2, 1.0)
    await engine.save(tmp_path / "saved")
    assert (tmp_path / "saved" / LEARNER_STATE).stat().st_size
    assert (tmp_path / "saved" / MANIFEST).is_file()
    assert damage(tmp_path / "saved") is None
    (learned,) = await engine.logprobs([merged])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        distributions = torch.log_softmax(model(input_ids=torch.tensor([merged.tokens])).logits[0], -1)
    found = distributions[:-1].gather(1, torch.tensor(merged.tokens[1:])[:, None])[:, 0].tolist()
    assert learned == pytest.approx([0.0, *found], abs=1e-4)


async def test_publishing_changes_what_is_sampled_and_stamps_the_version(
    engine: Engine, sampler: LiveEndpoints
) -> None:
    wanted = [4, 5, 6, 40, 41, 42, 1]
    before = await sampler.sample([4, 5, 6], temperature=0, max_tokens=4)
    for _ in range(30):
        await engine.forward_backward([sequence(wanted, [(3, 7)])], SFT)
        await engine.optim_step(1e-2, 1.0)
    assert (await sampler.sample([4, 5, 6], temperature=0, max_tokens=4)).ids == before.ids
    await engine.publish(7)
    after = await sampler.sample([4, 5, 6], temperature=0, max_tokens=4)
    assert after.ids == wanted[3:]
    assert [(span.version, span.start, span.end) for span in after.versions] == [(7, 0, 4)]


@pytest.mark.parametrize("rate", [1e-4, 1e-2])
async def test_a_probe_passes_samplers_that_have_the_learner_s_weights_and_stops_for_those_that_do_not(
    engine: Engine, sampler: LiveEndpoints, rate: float
) -> None:
    served = sampler.served
    value = {"endpoints": list(served.urls), "served_model": served.served_model, "key_env": served.key_env}
    probe = WeightProbe(engine=engine, values={DEFAULT_POLICY: value}, exact=True, progress=Silent())
    for version in (1, 2):
        before = await probe.before({DEFAULT_POLICY: [[conversation()[0]]]})
        if not before[DEFAULT_POLICY].samplers:
            pytest.skip("its sampler scores no prompts")
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(rate, 1.0)
        with pytest.raises(EngineError, match=f"does not have the weights published as version {version}"):
            await probe.after(before, version)
        await engine.publish(version)
        assert (await probe.after(before, version))["policy/weight_gap"] < 1e-4


async def test_cached_prefixes_end_with_the_weights_that_made_them(engine: Engine, sampler: LiveEndpoints) -> None:
    prompt = [2 + 7 * place % 60 for place in range(300)]
    await sampler.sample(prompt, temperature=0, max_tokens=8)
    for _ in range(3):
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-2, 1.0)
    await engine.publish(1)
    sampled = await sampler.sample(prompt, temperature=0, max_tokens=8)
    ids = [*prompt, *sampled.ids]
    (learned,) = await engine.logprobs([sequence(ids, [(len(prompt), len(ids))])])
    assert learned[len(prompt) :] == pytest.approx(sampled.logprobs, abs=1e-4)


async def test_the_sampler_s_logprobs_are_the_learner_s(engine: Engine, sampler: LiveEndpoints) -> None:
    await engine.forward_backward([conversation()[0]], SFT)
    await engine.optim_step(1e-2, 1.0)
    await engine.publish(1)
    for temperature in (1.0, 0.6, 0.0) if sampler.served.logprobs == "processed" else (1.0, 0.0):
        sampled = await sampler.sample([4, 5, 6, 7], temperature=temperature, max_tokens=20)
        ids = [4, 5, 6, 7, *sampled.ids]
        (learned,) = await engine.logprobs([sequence(ids, [(4, len(ids))], temperature=temperature)])
        assert learned[0] == 0.0
        assert learned[4:] == pytest.approx(sampled.logprobs, abs=1e-4)


async def test_a_seeded_answer_does_not_depend_on_what_is_sampled_beside_it(
    engine: Engine, sampler: LiveEndpoints
) -> None:
    if not sampler.served.seeded:
        pytest.skip("not declared")
    prompts = [[2 + (7 * i + j) % 62 for j in range(3 + 5 * i)] for i in range(12)]
    alone = [(await sampler.sample(p, seed=i, max_tokens=20)).ids for i, p in enumerate(prompts)]
    await engine.publish(0)  # forgets cached prefixes
    crowd = await asyncio.gather(*(sampler.sample(p, seed=i, max_tokens=20) for i, p in enumerate(prompts)))
    assert [one.ids for one in crowd] == alone
    assert len({tuple(one) for one in alone}) > 6


async def test_greedy_answers_are_those_of_transformers_generate(
    engine: Engine, sampler: LiveEndpoints, contract_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(contract_model)
    for prompt in ([4, 5, 6], [30, 2, 17, 9, 9, 12]):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        answer = await sampler.sample(prompt, temperature=0, max_tokens=16)
        assert answer.ids == expected[0, len(prompt) :].tolist()


async def test_weights_change_under_load_and_no_call_is_refused(engine: Engine, sampler: LiveEndpoints) -> None:
    async def long_call(first: int) -> SampledTokens:
        return await sampler.sample([first, 5, 6], max_tokens=200, ignore_eos=True, seed=first)

    calls = [asyncio.ensure_future(long_call(first)) for first in range(4, 12)]
    for version in (1, 2, 3):
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-3, 1.0)
        await engine.publish(version)
    for sampled in await asyncio.gather(*calls):
        assert len(sampled.ids) == 200
        spans = [(span.version, span.start, span.end) for span in sampled.versions]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert spans[-1][2] == 200
        assert [version for version, _, _ in spans] == sorted({version for version, _, _ in spans})
        assert spans[-1][0] <= 3
    assert (await sampler.sample([4, 5], max_tokens=2, ignore_eos=True)).versions[0].version == 3


async def test_a_policy_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(EngineError, match="'writer'"):
        await engine.optim_step(1e-3, 1.0, policy="writer")


async def test_bad_sequences_are_an_error_of_the_operation_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(EngineError, match="vocabulary"):
        await engine.forward_backward([sequence([4, 999], [(1, 2)])], SFT)
    assert (await engine.forward_backward([sequence([4, 9], [(1, 2)])], SFT))["tokens"] == 1
    await engine.optim_step(0.0, 1.0)


async def test_a_killed_sampler_comes_back_at_its_url_with_the_published_weights(
    engine: Engine, sampler: LiveEndpoints
) -> None:
    own = [pid for name, pid in engine.pids().items() if name.startswith("sampler")]
    if not own:
        pytest.skip("no sampler runs on this machine")
    for _ in range(5):
        await engine.forward_backward([conversation()[0]], SFT)
        await engine.optim_step(1e-2, 1.0)
    await engine.publish(5)
    before = await sampler.sample([4, 5, 6], temperature=0, max_tokens=8)
    watch = asyncio.ensure_future(engine.watch())
    for pid in own:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        while True:
            with suppress(aiohttp.ClientError):
                after = await sampler.sample([4, 5, 6], temperature=0, max_tokens=8)
                break
            await asyncio.sleep(0.05)
    watch.cancel()
    assert after.ids == before.ids
    assert {span.version for span in after.versions} == {5}


async def test_a_killed_learner_is_an_error_that_says_what_to_do_and_can_be_replaced(
    engine: Engine, tmp_path: Path
) -> None:
    own = [pid for name, pid in engine.pids().items() if name.startswith("learner")]
    if not own:
        pytest.skip("no learner runs on this machine")
    await engine.save(tmp_path / "checkpoint")
    os.kill(own[-1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(LearnerLostError, match="resume from the last checkpoint"):
            await engine.forward_backward([conversation()[0]], SFT)
    await engine.restart_learner()
    await engine.load(tmp_path / "checkpoint")
    assert (await engine.forward_backward([conversation()[0]], SFT))["tokens"] == 9
    await engine.optim_step(0.0, 1.0)


async def test_an_option_that_the_engine_does_not_know_is_named(
    engine_settings: dict[str, Any], contract_model: Path, tmp_path: Path
) -> None:
    options = {**engine_settings.get("options", {}), "no_such_option": 1}
    with pytest.raises(ConfigError, match=r"engine\.options"):
        make_engine(contract_setup({**engine_settings, "options": options}, contract_model, tmp_path))
