"""The Python front door over real processes: fit, resume, evaluate, check and export, with several reward functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.trainer.progress import Silent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = [{"question": word} for word in ("one", "two", "three", "four")]


async def answer(task: dict[str, str], llm: agl.LLM) -> None:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages: Any = [{"role": "user", "content": task["question"]}]
    await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)


async def talks(task: dict[str, str], result: agl.RolloutResult) -> float:
    return float(result.calls[-1].usage["completion_tokens"] if result.calls[-1].usage else 1.0)


def constant(task: dict[str, str], result: agl.RolloutResult) -> float:
    return 0.5


class Steps(Silent):
    """A progress that remembers the steps and the notes."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.seen.append(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentlightning.demo import tiny_model  # its torch is not for the workers, which import this file

    folder = tmp_path_factory.mktemp("door")
    tiny_model.build(folder / "model", [task["question"] for task in TASKS], hidden=32, layers=1, context=64)
    return folder


def trainer(folder: Path, **options: Any) -> agl.Trainer:
    return agl.Trainer(
        str(folder / "model"),
        algorithm=agl.LightningRL(group_size=4, minibatches=1),
        workers=1,
        epochs=2,
        tasks_per_step=4,
        store=f"sqlite:///{folder}/agl.db",
        runs=folder / "runs",
        settings={"engine": agl.EngineConfig(device="cpu"), "eval": {"sampled": False}},
        **options,
    )


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[agl.Trainer, agl.TrainResult]:
    """Trained for a step, interrupted, and resumed with a trainer that was made anew."""
    first = trainer(folder)

    class Interrupts(Steps):
        def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
            first.stop()

    first._progress = told = Interrupts()
    given: dict[str, Any] = {"reward_funcs": [talks, constant], "reward_weights": [1.0, 0.0]}
    begun = first.fit(answer, TASKS, TASKS[:2], **given)
    assert (begun.step, begun.finished) == (1, False)
    assert told.notes[0].startswith("chosen: trainer.learning_rate = 1e-05 (lightning_rl of all weights, ")
    assert told.notes[1].startswith("chosen: engine.optimizer.betas = [0.9, 0.95] (a tiny model, ")
    progress = Steps()
    again = trainer(folder, progress=progress)
    result = again.fit(answer, TASKS, TASKS[:2], **given, resume=begun.run_id)
    assert (result.run_id, progress.seen) == (begun.run_id, [2])
    assert not any(note.startswith("chosen: ") for note in progress.notes)
    return again, result


def test_epochs_are_steps_over_the_tasks(trained: tuple[agl.Trainer, agl.TrainResult]) -> None:
    assert (trained[1].step, trained[1].finished) == (2, True)


def test_each_reward_function_is_a_metric_of_its_own(trained: tuple[agl.Trainer, agl.TrainResult]) -> None:
    rows = [row for row in trained[1].metrics if "rewards/talks/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["rewards/constant/mean"] == 0.5
        assert row["train/reward_mean"] == pytest.approx(row["rewards/talks/mean"])  # weighted by 1 and 0


def test_the_rewards_that_are_stored_and_evaluated_are_weighted_as_those_that_are_learned_from(
    trained: tuple[agl.Trainer, agl.TrainResult], folder: Path
) -> None:
    stored = agl.load_run(trained[1].run_id, f"sqlite:///{folder}/agl.db")
    of_rollout: dict[str, dict[str, float]] = {}
    for one in stored.rewards().to_pylist():
        of_rollout.setdefault(one["rollout_id"], {})[one["name"]] = one["value"]
    assert of_rollout
    for rewards in of_rollout.values():
        assert (rewards["reward"], rewards["constant"]) == (rewards["talks"], 0.5)
    evaluated = stored.rollouts(mode="eval", step=2).to_pylist()
    [last] = [row for row in trained[1].metrics if row["step"] == 2 and row["kind"] == "eval/greedy"]
    talked = [of_rollout[one["id"]]["talks"] for one in evaluated]
    assert last["eval/greedy/reward_mean"] == pytest.approx(sum(talked) / len(talked))


def test_the_trained_model_is_evaluated_and_exported(
    trained: tuple[agl.Trainer, agl.TrainResult], folder: Path
) -> None:
    door, result = trained
    assert set(door.evaluate(answer, TASKS[:2], [talks])) == {"greedy", "sampled"}
    [evaluated] = [
        config
        for path in (folder / "runs").glob("*/config.json")
        if (config := json.loads(path.read_bytes()))["model"]["path"] == str(result.policy)
    ]
    assert [one["name"] for one in evaluated["agent"]["reward"]] == ["talks"]
    exported = door.export(folder / "exported")
    assert (exported / "model.safetensors").is_file()


def test_an_agent_is_checked_before_it_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = trainer(folder).check(answer, TASKS, constant, tasks=2)
    assert (checked.success, len(checked.calls)) == (0.5, 1)
    assert capsys.readouterr().err == ""
