"""The loop of a run that learns from the record, against a store in memory and an engine that remembers its updates."""

import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loop_doubles import EVERY, Countdown, Crash, Crashing, agents, killed_and_resumed
from record_doubles import STEPS, ComparingEngine, loop, record

from agentlightning.algorithms.offline import DPO, KTO, RFT, SFT, OfflineAlgorithm
from agentlightning.engines.base import SKIPPED
from agentlightning.errors import DataError, LearnerLostError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.training_types import PreferenceLoss

ALGORITHMS = [SFT(held_out=0.2), RFT(held_out=0.2), DPO(held_out=0.2), KTO(held_out=0.2)]


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        await opened.create_run("test", {}, "run")
        await record(opened)
        yield opened


async def finished(store: LightningStore, folder: Path, algorithm: OfflineAlgorithm) -> ComparingEngine:
    engine = ComparingEngine()
    assert await loop(store, engine, folder, algorithm).run(resume=False) == STEPS
    return engine


def rows(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
async def test_each_step_is_one_update_and_the_held_out_loss_comes_before_between_and_after(
    store: LightningStore, tmp_path: Path, algorithm: OfflineAlgorithm
) -> None:
    engine = await finished(store, tmp_path, algorithm)
    assert len(engine.updates) == STEPS
    assert [row["step"] for row in rows(tmp_path, "step")] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(tmp_path, "eval/loss")] == [0, 2, 4, 5]
    assert [each.step for each in await store.checkpoints("run")] == [0, 2, 4, 5]
    assert engine.served == []  # nobody asks it


@pytest.mark.parametrize("algorithm", [SFT(), RFT()])
async def test_the_weights_of_a_batch_sum_to_1_and_only_what_the_model_wrote_is_trained(
    store: LightningStore, tmp_path: Path, algorithm: OfflineAlgorithm
) -> None:
    engine = await finished(store, tmp_path, algorithm)
    for batch in engine.rows:
        assert len(batch) == 4
        assert sum(sum(row.weights) for row in batch) == pytest.approx(1.0)
        assert all(row.mask == [False, False, True, True] for row in batch)


async def test_pairs_are_compared_with_the_reference_and_weigh_the_same(store: LightningStore, tmp_path: Path) -> None:
    engine = await finished(store, tmp_path, DPO(beta=0.3))
    for examples, loss, mismatched in engine.batches:
        assert (loss, mismatched) == (PreferenceLoss(name="dpo", beta=0.3), [])
        assert [example.weight for example in examples] == [0.25] * 4
        rows = [row for example in examples for row in (*example.chosen, *example.rejected)]
        assert len(rows) == 8
        assert all(row.ref_logprobs == [-0.5] * 4 for row in rows)


async def test_kto_has_a_baseline_from_answers_beside_other_questions(store: LightningStore, tmp_path: Path) -> None:
    engine = await finished(store, tmp_path, KTO())
    for examples, loss, mismatched in engine.batches:
        assert loss.name == "kto"
        own = {row.rollout_id: row for example in examples for row in (*example.chosen, *example.rejected)}
        assert mismatched
        for (row,) in mismatched:
            assert row.ref_logprobs == [-0.5] * 4
            assert row.tokens[2:] == own[row.rollout_id].tokens[2:]
            assert row.tokens[:2] != own[row.rollout_id].tokens[:2]


@pytest.mark.parametrize(
    ("algorithm", "losses"),
    [
        (SFT(held_out=0.2), [0.5, 0.48, 0.46, 0.45]),  # the mean over tokens
        (KTO(held_out=0.2), [0.5] * 4),  # all answers are as much more likely as the mismatched ones, the baseline
    ],
    ids=["sft", "kto"],
)
async def test_the_held_out_loss_begins_where_policy_and_reference_are_one(
    store: LightningStore, tmp_path: Path, algorithm: OfflineAlgorithm, losses: list[float]
) -> None:
    await finished(store, tmp_path, algorithm)
    found = rows(tmp_path, "eval/loss")
    assert [row["eval/loss"] for row in found] == pytest.approx(losses)
    assert found[0].get("eval/margin", 0.0) == 0.0


async def test_every_example_is_learned_from_once_an_epoch_and_what_is_held_out_or_was_an_evaluation_never(
    store: LightningStore, tmp_path: Path
) -> None:
    evaluated = set(await record(store, mode="eval", tasks=4))
    ids = {one.id for one in await store.rollouts(RolloutQuery(run_id="source"))} - evaluated
    before = await store.rollouts(RolloutQuery(run_id="source"))
    engine = ComparingEngine()
    whole = loop(store, engine, tmp_path, SFT(held_out=0.3))
    await whole.prepare()
    trainer = whole.config.trainer.model_copy(update={"steps": math.ceil(len(whole.train) / 4)})
    whole.config = whole.config.model_copy(update={"trainer": trainer})
    await whole.run(resume=False)
    held = {example.wanted for example in whole.held_out}
    assert held
    assert set(engine.learned) == ids - held
    assert max(Counter(engine.learned).values()) <= 2  # the last batch begins the next epoch
    assert await store.rollouts(RolloutQuery(run_id="source")) == before
    assert await store.rollouts(RolloutQuery(run_id="run")) == []


@EVERY
@pytest.mark.parametrize("algorithm", [SFT(held_out=0.2), KTO(held_out=0.2)], ids=lambda each: each.name)
async def test_a_run_killed_at_any_verb_resumes_to_the_state_of_one_that_was_not(
    store: LightningStore, tmp_path: Path, algorithm: OfflineAlgorithm, every: int
) -> None:
    expected = (await finished(store, tmp_path, algorithm)).updates
    runs = killed_and_resumed(
        store, every, lambda *made: loop(*made[:2], tmp_path, algorithm, made[2]), engine=ComparingEngine
    )
    async for run, engine in runs:
        assert engine.updates == expected, run


async def test_rollouts_that_are_recorded_later_do_not_change_a_run_that_has_begun(
    store: LightningStore, tmp_path: Path
) -> None:
    expected = (await finished(store, tmp_path, SFT())).updates
    await store.create_run("test", {}, "late")
    countdown = Countdown(20)
    with pytest.raises(Crash):
        await loop(store, Crashing(ComparingEngine(), countdown), tmp_path, SFT(), "late").run(resume=False)
    await record(store, tasks=30)
    engine = ComparingEngine()
    await loop(store, engine, tmp_path, SFT(), "late").run(resume=True)
    assert engine.updates == expected


@pytest.mark.parametrize("ticks", [10, 30])
async def test_a_lost_learner_is_replaced_and_the_run_ends_as_one_that_never_lost_it(
    store: LightningStore, tmp_path: Path, ticks: int
) -> None:
    expected = (await finished(store, tmp_path, DPO())).updates
    await store.create_run("test", {}, "lossy")
    engine = ComparingEngine()
    lossy = Crashing(engine, Countdown(ticks, LearnerLostError))
    assert await loop(store, lossy, tmp_path, DPO(), "lossy").run(resume=False) == STEPS
    assert engine.updates == expected


async def test_an_agent_is_evaluated_before_between_and_after(store: LightningStore, tmp_path: Path) -> None:
    engine = ComparingEngine()
    async with agents(store):
        assert await loop(store, engine, tmp_path, RFT(), val=[{"n": 100}]).run(resume=False) == STEPS
    assert [row["step"] for row in rows(tmp_path, "eval/greedy")] == [0, 2, 4, 5]
    assert [row["step"] for row in rows(tmp_path, "eval/sampled")] == [0, 5]
    evaluated = await store.rollouts(RolloutQuery(run_id="run"))
    assert {rollout.mode for rollout in evaluated} == {"eval"}
    assert engine.served == sorted(set(engine.served))


async def test_metrics_of_steps_that_a_crash_undid_are_marked(store: LightningStore, tmp_path: Path) -> None:
    class Broken(ComparingEngine):
        async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
            if len(self.updates) == 3:
                raise Crash
            return await super().optim_step(learning_rate, grad_clip)

    with pytest.raises(Crash):
        await loop(store, Broken(), tmp_path, SFT()).run(resume=False)
    await loop(store, ComparingEngine(), tmp_path, SFT()).run(resume=True)
    found = await store.metrics("run", "train/loss")
    assert {metric.step for metric in found if metric.abandoned} == {3}
    assert [metric.step for metric in found if not metric.abandoned] == [1, 2, 3, 4, 5]


async def test_an_update_that_the_engine_skips_is_counted_warned_of_and_not_the_end(
    store: LightningStore, tmp_path: Path
) -> None:
    class Overflowing(ComparingEngine):
        async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
            made = await super().optim_step(learning_rate, grad_clip)
            return {**SKIPPED} if len(self.updates) == 2 else made

    whole = loop(store, Overflowing(), tmp_path, SFT())
    assert await whole.run(resume=False) == STEPS
    steps = rows(tmp_path, "step")
    assert [row["step"] for row in steps if row.get("train/skipped_updates") == 1.0] == [2]
    assert "train/loss" not in steps[1]


async def test_a_stop_ends_after_the_step_with_a_checkpoint(store: LightningStore, tmp_path: Path) -> None:
    stopped = loop(store, ComparingEngine(), tmp_path, SFT())
    stopped.stopping = True
    assert await stopped.run(resume=False) == 0
    assert [each.step for each in await store.checkpoints("run")] == [0]
    assert await loop(store, ComparingEngine(), tmp_path, SFT()).run(resume=True) == STEPS


async def test_a_record_that_is_wholly_held_out_is_an_error(store: LightningStore, tmp_path: Path) -> None:
    class Everything(SFT):
        def is_held_out(self, task: str) -> bool:
            return True

    with pytest.raises(DataError, match=r"all 48 examples are held out; lower algorithm\.held_out"):
        await loop(store, ComparingEngine(), tmp_path, Everything()).run(resume=False)
