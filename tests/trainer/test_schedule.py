"""algorithm.schedule: what holds from which step on, checked whole at start, and the same whenever a step is executed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import record_doubles
from loop_doubles import GROUP, STEPS, TASKS, Countdown, Crash, Crashing, RememberingEngine, agents, loop
from record_doubles import ComparingEngine

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.losses import PpoClip
from agentlightning.algorithms.offline import SFT
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.loop import RLLoop
from agentlightning.trainer.policies import ScheduledAlgorithm
from agentlightning.trainer.schedules import needs_of, schedules_of
from agentlightning.training_types import Loss, TrainingSequence

BASE: dict[str, Any] = {"group_size": GROUP, "minibatches": 1}


def scheduled(
    *entries: dict[str, Any], data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **base: Any
) -> list[ScheduledAlgorithm]:
    table = {
        "model": {"path": "m"},
        "agent": {"run": "a.py:f"},
        "data": {"train": "t"} | (data or {}),
        "trainer": {"steps": STEPS, "tasks_per_step": TASKS, "learning_rate": 0.01} | (trainer or {}),
        "algorithm": ({} if "type" in base else BASE) | base | ({"schedule": list(entries)} if entries else {}),
    }
    return schedules_of(parse_config(table))["default"]


def with_schedule(made: RLLoop, schedule: list[ScheduledAlgorithm]) -> RLLoop:
    policies = {alias: replace(one, schedule=schedule) for alias, one in made.policies.items()}
    made.policies = policies
    made.planner = replace(made.planner, policies=policies)
    return made


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


def rows(folder: Path, run: str, kind: str = "step") -> list[dict[str, float]]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


SWITCH = {"from_step": 2, "advantage": "reinforce", "learning_rate": 0.02}


async def trained(store: LightningStore, folder: Path, run: str, schedule: list[ScheduledAlgorithm]) -> list[str]:
    await store.create_run("test", {}, run)
    engine = RememberingEngine()
    async with agents(store, run=run):
        await with_schedule(loop(store, engine, folder, run), schedule).run(resume=False)
    return engine.updates


async def test_steps_are_trained_by_the_part_of_the_schedule_that_holds(store: LightningStore, tmp_path: Path) -> None:
    """Steps 1 and 2 with rewards that differ; the last parts of the updates are learning rates, over 3 steps of decay."""
    plain = await trained(store, tmp_path, "plain", scheduled())
    switched = await trained(store, tmp_path, "switched", scheduled(SWITCH))
    found = rows(tmp_path, "switched")
    assert [row["train/schedule_entry"] for row in found] == [0.0, 1.0, 1.0]
    assert [row["train/learning_rate"] for row in found] == pytest.approx([0.01, 0.014, 0.008])
    assert [row["train/learning_rate"] for row in rows(tmp_path, "plain")] == pytest.approx([0.01, 0.007, 0.004])
    assert switched[0] == plain[0]
    assert [one.split()[0] for one in switched[1:]] != [one.split()[0] for one in plain[1:]]


@pytest.mark.parametrize("ticks", [15, 35, 55])
async def test_a_run_killed_in_the_middle_of_its_schedule_ends_as_one_that_was_not(
    store: LightningStore, tmp_path: Path, ticks: int
) -> None:
    schedule = scheduled(SWITCH, {"from_step": 3, "credit": "discounted"})
    expected = await trained(store, tmp_path / "whole", "whole", schedule)
    await store.create_run("test", {}, "again")
    async with agents(store, run="again"):
        countdown = Countdown(ticks)
        broken = Crashing(store, countdown), Crashing(RememberingEngine(), countdown)
        with suppress(Crash):
            await with_schedule(loop(*broken, tmp_path, "again"), schedule).run(resume=False)
        engine = RememberingEngine()
        await with_schedule(loop(store, engine, tmp_path, "again"), schedule).run(resume=True)
    assert engine.updates == expected


class EitherEngine(ComparingEngine):
    """Takes demonstrations and samples, and remembers which it took."""

    async def forward_backward(self, sequences: Any, loss: Loss, policy: str = "default") -> dict[str, float]:
        self.learned.append(loss.name)
        kept: list[TrainingSequence] = list(sequences)
        return await RememberingEngine.forward_backward(self, kept, loss, policy)


def sft_first(store: Any, engine: Any, folder: Path, run: str) -> RLLoop:
    schedule = scheduled({"from_step": 3, "type": "lightning_rl", **BASE}, data={"from_run": "source"}, type="sft")
    made = with_schedule(loop(store, engine, folder, run), schedule)
    offline = record_doubles.loop(store, engine, folder / "offline", SFT(held_out=0.2))
    offline.val, offline.metric_logger = [], made.metric_logger
    made.offline = {0: offline}
    return made


@pytest.mark.parametrize("ticks", [None, 12, 30, 46])
async def test_demonstrations_first_then_reinforcement_learning_in_one_run(
    store: LightningStore, tmp_path: Path, ticks: int | None
) -> None:
    """Steps 1 and 2 imitate the recorded run and consume nothing; step 3 learns from rollouts. Killed anywhere, the same."""
    await record_doubles.record(store)
    await store.create_run("test", {}, "run")
    engine = EitherEngine()
    async with agents(store):
        if ticks is not None:
            countdown = Countdown(ticks)
            with suppress(Crash):
                broken = Crashing(store, countdown), Crashing(EitherEngine(), countdown)
                await sft_first(*broken, tmp_path, "run").run(resume=False)
        assert await sft_first(store, engine, tmp_path, "run").run(resume=ticks is not None) == STEPS
    names = [one for one in engine.learned if one in ("sft", "ppo_clip")]
    assert names == ["sft", "sft", "ppo_clip"]
    steps = await store.steps("run")
    assert [len(step.consumed) for step in steps] == [0, 0, TASKS * GROUP]
    assert [step.state for step in steps] == ["closed"] * STEPS
    assert len(await store.rollouts(RolloutQuery(run_id="run", mode="train"))) == TASKS * GROUP
    assert rows(tmp_path, "run", "eval/loss")


@pytest.mark.parametrize(
    ("entries", "settings", "sentence"),
    [
        (
            [{"advantage": "rloo"}],
            {},
            r"algorithm\.schedule\[1\]\.from_step: expected a whole number above 1, got None",
        ),
        (
            [{"from_step": 2, "type": "apo"}],
            {},
            "'apo' searches for prompts and trains nothing: run it with agl optimize",
        ),
        ([{"from_step": 9, "advantage": "rloo"}], {}, "from_step: 9 is never reached: the run has 3 steps"),
        ([], {"schedule": []}, r"algorithm\.schedule: expected at least one entry; leave it out"),
        (
            [{"from_step": 2, "type": "sft"}],
            {"data": {"from_run": "r"}, "trainer": {"max_staleness": 1}},
            r"trainer\.max_staleness: expected 0, since a part",
        ),
        ([{"from_step": 2, "advantge": "rloo"}], {}, r"algorithm\.schedule\[1\]: algorithm\.advantge: no such setting"),
        ([{"from_step": 2, "group_size": 4}], {}, "groups have one size throughout a run, expected 2, got 4"),
        (
            [{"from_step": 2, "learning_rate": -1}],
            {},
            r"schedule\[1\]\.learning_rate: expected a number greater than 0",
        ),
        (
            [{"from_step": 2, "loss": {"dual_clip": 1.1}}],
            {},
            r"schedule\[1\]: algorithm.loss: dual_clip: expected a number",
        ),
        ([{"from_step": 2, "type": "sft"}], {}, "learns from recorded rollouts: name their run with data.from_run"),
        (
            [{"from_step": 2, "kl": 0.1}],
            {"data": {"from_run": "r"}},
            r"data\.from_run: has no effect beside data\.train",
        ),
        (
            [{"from_step": 2, "advantage": {"type": "gae", "learning_rate": 0.1}}],
            {"advantage": "gae"},
            "the parts with a critic share it",
        ),
    ],
)
def test_a_schedule_is_checked_whole_at_start(
    entries: list[dict[str, Any]], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        scheduled(*entries, **settings)


def test_the_engine_keeps_what_any_part_of_the_schedule_needs() -> None:
    needs = needs_of(scheduled({"from_step": 2, "kl": 0.1}, {"from_step": 3, "advantage": "gae"}))
    assert needs.reference
    assert needs.critic_learning_rate is not None
    assert not needs_of(scheduled()).reference


def test_a_part_that_an_entry_names_takes_the_place_of_the_former_with_its_settings() -> None:
    _, second = scheduled(
        {"from_step": 2, "loss": "ppo_clip"}, loss={"clip_low": 0.1}, credit={"type": "discounted", "gamma": 0.5}
    )
    assert isinstance(second.algorithm, LightningRL)
    assert second.algorithm.loss == PpoClip()
    assert second.algorithm.rule_settings == {"gamma": 0.5}


def test_a_policy_leaves_the_schedule_of_the_run_by_an_empty_one() -> None:
    def schedules(**algorithm: Any) -> dict[str, int]:
        table = {
            "agent": {"run": "a.py:f"},
            "data": {"train": "t"},
            "trainer": {"steps": STEPS},
            "algorithm": BASE | algorithm,
            "policies": {"white": {"model": "w"}, "black": {"model": "b", "algorithm": {"schedule": []}}},
        }
        return {alias: len(one) for alias, one in schedules_of(parse_config(table)).items()}

    assert schedules(schedule=[{"from_step": 2, "kl": 0.1}]) == {"white": 2, "black": 1}


def test_an_entry_without_settings_returns_to_the_algorithm_and_one_of_another_name_has_none_of_it() -> None:
    first, second, third = scheduled({"from_step": 2, "kl": 0.1}, {"from_step": 3}, entropy=0.1)
    assert third.algorithm == first.algorithm != second.algorithm
    first, second = scheduled({"from_step": 3, "type": "sft"}, data={"from_run": "r"}, advantage="rloo")
    assert first.config.algorithm["advantage"] == "rloo"
    assert second.config.algorithm == {"type": "sft"}
