"""From a recorded run to a better model, as a person does it: `agl record`, then `agl train --from-run`.

The agent is the lookup demo's, whose warm-started model solves a quarter of the tasks when it is sampled and fewer greedily.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import Folder, until
from teacher import teacher

from agentlightning.algorithms.offline import SFT
from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.trainer.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]

DEADLINE_S = 600.0
CONFIG = """
[model]
path = "{model}"
[agent]
run = "agent.py:{agent}"
workers = 1
[data]
train = "train.jsonl"
val = "val.jsonl"
[eval]
sampled = false
[engine]
"""
TEACHER = """
[external.teacher]
url = "{url}"
models = ["teacher"]
"""
AGENT = """
from types import SimpleNamespace

from agentlightning.demo.lookup import solve


async def taught(task, llm):
    named = SimpleNamespace(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client, model="teacher")
    return await solve(task, named)
"""


@dataclass
class House:
    """A folder with a store and a recorded run in it."""

    folder: Folder
    run_id: str = ""

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder.path}/agl.db"

    def agl(self, *arguments: str) -> str:
        """What the command prints, once it has ended well."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, out + err
        return out

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.folder.start(*arguments, "--store", self.store)

    def record(self, config: str, **options: int) -> dict[str, Any]:
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        last: dict[str, Any] = json.loads(self.agl("record", config, *words).splitlines()[-1])
        self.run_id = last["run_id"]
        return last

    def rows(self, run: Path, name: str) -> list[float]:
        """A metric over the steps of a run."""
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row[name] for row in lines if name in row]

    def train(self, algorithm: str, *settings: str) -> Path:
        """The folder of a run that learned from the record."""
        known = set((self.folder.path / "runs").iterdir())
        self.agl(*self.words(algorithm, *settings))
        (new,) = set((self.folder.path / "runs").iterdir()) - known
        return new

    def words(self, algorithm: str, *settings: str) -> list[str]:
        sets = [word for setting in settings for word in ("--set", setting)]
        return ["train", "--algorithm", algorithm, "--from-run", self.run_id, *sets]


def furnished(path: Path, model: Path, tasks: int) -> House:
    folder = Folder(path)
    folder.write("agent.py", AGENT)
    folder.write("record.toml", CONFIG.format(model=model, agent="solve"))
    for name, split, count in (("train.jsonl", "train", tasks), ("val.jsonl", "test", 40)):
        found = rows(lookup, split, count, 0)  # type: ignore[arg-type]  # a module is a DemoTask
        folder.write(name, "".join(orjson.dumps(row).decode() + "\n" for row in found))
    return House(folder)


@pytest.fixture(scope="module")
def house(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Eight rollouts of each of 120 tasks, recorded once for all tests."""
    made = furnished(tmp_path_factory.mktemp("house"), model, tasks=120)
    recorded = made.record("record.toml", rollouts=8)
    assert (recorded["rollouts"], recorded["succeeded"]) == (960, 960)
    assert 0.1 < recorded["reward"] < 0.4
    yield made
    made.folder.close()


PACE = ("trainer.tasks_per_step=64", "trainer.checkpoint_every=100")


@pytest.mark.parametrize(
    ("algorithm", "steps", "rate", "settings", "least"),
    [
        pytest.param("rft", 30, "1e-3", (), 0.4, marks=pytest.mark.long),
        pytest.param("sft", 30, "1e-3", ("algorithm.threshold=1.0",), 0.4, marks=pytest.mark.long),
        ("dpo", 30, "3e-4", (), 0.25),
        pytest.param("kto", 30, "3e-4", (), 0.25, marks=pytest.mark.long),
    ],
)
def test_held_out_success_rises_from_the_record(
    house: House, algorithm: str, steps: int, rate: str, settings: tuple[str, ...], least: float
) -> None:
    run = house.train(algorithm, *PACE, f"trainer.steps={steps}", f"trainer.learning_rate={rate}", *settings)
    before, after = house.rows(run, "eval/greedy/reward_mean")
    assert after - before > least
    first, last = house.rows(run, "eval/loss")
    assert last < first
    assert (run / "curve.png").stat().st_size > 0
    assert (run / "checkpoints" / f"step-{steps:06d}" / "model.safetensors").exists()


@pytest.mark.long
def test_distillation_from_a_model_whose_text_alone_is_known(model: Path, tmp_path: Path) -> None:
    house = furnished(tmp_path, model, tasks=150)
    with teacher() as url:
        table = CONFIG.format(model=model, agent="taught") + TEACHER.format(url=f"{url}/v1")
        house.folder.write("teach.toml", table)
        recorded = house.record("teach.toml", rollouts=1)
    assert recorded["reward"] == 1.0
    # The student is evaluated as itself: the recorded agent would ask the teacher.
    run = house.train(
        "distill",
        *PACE,
        "trainer.steps=30",
        "trainer.learning_rate=1e-3",
        "agent.run=agent.py:solve",
    )
    before, after = house.rows(run, "eval/greedy/reward_mean")
    assert after - before > 0.4
    house.folder.close()


@pytest.mark.long
def test_text_from_a_file_teaches_as_the_record_does(house: House, model: Path, tmp_path: Path) -> None:
    """What the agent did leaves as conversations with rewards, comes back as traces of anybody's, and is learned from."""
    file = tmp_path / "rows.jsonl"
    house.agl("runs", "export", house.run_id, "--as", "messages", "--to", str(file))
    recorded = json.loads(house.agl("record", "--traces", str(file)).splitlines()[-1])
    assert (recorded["rollouts"], recorded["rewarded"]) == (960, 960)
    settings = ("trainer.steps=30", "trainer.learning_rate=1e-3", f"model.path={model}", "agent.run=agent.py:solve")
    imported = House(house.folder, recorded["run_id"])
    run = imported.train("rft", *PACE, *settings, "data.val=val.jsonl", "eval.sampled=false")
    before, after = house.rows(run, "eval/greedy/reward_mean")
    assert after - before > 0.4


def test_the_same_from_python(house: House, model: Path) -> None:
    trainer = Trainer(
        str(model),
        algorithm=SFT(threshold=1.0),
        store=house.store,
        steps=3,
        learning_rate=1e-3,
        runs=house.folder.path / "runs",
        settings={"engine": {"device": "cpu"}},
    )
    result = trainer.fit(from_run=house.run_id)
    assert result.finished
    assert (result.policy / "model.safetensors").exists()
    first, last = (row["eval/loss"] for row in result.metrics if "eval/loss" in row)
    assert last < first


@pytest.mark.long
async def test_a_run_that_is_killed_twice_ends_with_the_weights_of_one_that_was_not(house: House) -> None:
    settings = ("trainer.steps=12", "trainer.checkpoint_every=4", "trainer.learning_rate=1e-3", "eval.tasks=5")
    whole = house.train("kto", *settings)
    known = set((house.folder.path / "runs").iterdir())
    first = house.start(*house.words("kto", *settings))
    until(lambda: set((house.folder.path / "runs").iterdir()) - known, "the run began")
    (run,) = set((house.folder.path / "runs").iterdir()) - known
    killed_after(first, run, step=3)
    second = house.start("train", "--resume", run.name)
    killed_after(second, run, step=7)
    house.agl("train", "--resume", run.name)

    last = Path("checkpoints") / "step-000012" / "model.safetensors"
    assert (run / last).read_bytes() == (whole / last).read_bytes()
    async with open_store(house.store) as store:
        (found,) = await store.runs(ids=[run.name])
        assert found.state == "finished"
        assert await store.rollouts(RolloutQuery(run_id=run.name, mode="train")) == []
        metrics = await store.metrics(run.name, "train/loss")
    assert [metric.step for metric in metrics if not metric.abandoned] == list(range(1, 13))


def killed_after(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """kill -9 once this step is complete."""
    file = run / "metrics.jsonl"

    def reached() -> bool:
        assert process.poll() is None, "the run ended before it was killed"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return any(row["kind"] == "step" and row["step"] >= step for row in map(orjson.loads, lines))

    until(reached, f"step {step} was complete", DEADLINE_S)
    process.kill()
    process.communicate()


@pytest.mark.long
def test_a_run_without_an_agent_has_a_held_out_loss(house: House, model: Path) -> None:
    house.folder.write(
        "plain.toml",
        f'[model]\npath = "{model}"\n[data]\nfrom_run = "{house.run_id}"\n[algorithm]\ntype = "dpo"\n'
        "[trainer]\nsteps = 4\nlearning_rate = 1e-4\n[eval]\nevery = 2\n",
    )
    known = set((house.folder.path / "runs").iterdir())
    house.agl("train", "plain.toml")
    (run,) = set((house.folder.path / "runs").iterdir()) - known
    losses = house.rows(run, "eval/loss")
    assert len(losses) == 3
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
    assert house.rows(run, "eval/greedy/reward_mean") == []
