"""What is given to Trainer and to a configuration reaches what it configures, or is refused before anything starts."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import DPO
from agentlightning.config.agent import RewardConfig
from agentlightning.config.run import Config, TrainerConfig, parse_config
from agentlightning.errors import AgentLightningError, ConfigError, ModelError, NotFoundError
from agentlightning.store.open import store_url
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.trainer import Trainer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a model from outside; the agent lies in the folder of the test."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (tmp_path / "a.py").write_text("def f(task, llm):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return folder


def config(model: str, **agent: object) -> Config:
    return parse_config({"model": {"path": model}, "agent": {"run": "a.py:f"} | agent, "data": {"train": "t"}})


def test_a_data_function_gets_the_seed_of_the_run(tmp_path: Path) -> None:
    def rows(seed: int) -> list[dict[str, int]]:
        return [{"n": seed}]

    with pytest.raises(ModelError):
        Trainer(str(tmp_path / "nowhere"), seed=7, runs=tmp_path / "runs").fit("a.py:f", train_dataset=rows)
    [file] = tmp_path.glob("runs/*/train.jsonl")
    assert orjson.loads(file.read_bytes()) == {"n": 7}


def test_a_store_beside_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="give store or server, not both"):
        Trainer("org/model", store="memory://", server="http://127.0.0.1:8088")


def test_an_empty_variable_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE", "")
    assert store_url(None) == "sqlite:///runs/agl.db"


def test_no_workers_here_and_a_key_that_nobody_knows_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(model.parent / "runs", "run")
    monkeypatch.delenv("AGL_SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match="set AGL_SERVER_KEY"):
        Processes(config(str(model), workers=0), folder)
    monkeypatch.setenv("AGL_SERVER_KEY", "secret")
    Processes(config(str(model), workers=0), folder)


def test_an_instrumentation_that_is_not_installed_is_refused_before_anything_starts(model: Path) -> None:
    asked = config(str(model), trace=("nothing_of_the_kind",))
    with pytest.raises(ConfigError, match="pip install openinference-instrumentation-nothing-of-the-kind"):
        Processes(asked, RunFolder(model.parent / "runs", "run"))


async def test_a_model_that_is_not_found_takes_down_what_was_started(tmp_path: Path, model: Path) -> None:
    processes = Processes(config(str(model)), RunFolder(tmp_path / "runs", "run"))
    (model / "config.json").unlink()
    with pytest.raises(AgentLightningError, match=r"config\.json"):
        async with processes:
            pass
    assert processes.pids() == {}


TASKS = {"agent": "a.py:f", "train_dataset": [{"n": 1}]}


@pytest.mark.parametrize(
    ("given", "fit", "sentence"),
    [
        ({}, {"from_run": "RUN"}, "'lightning_rl' does not learn from recorded rollouts"),
        ({"algorithm": DPO()}, TASKS, r"name their run with data\.from_run"),
        ({"steps": 3, "settings": {"trainer": TrainerConfig(epochs=1.0)}}, TASKS, "epochs: conflicts with steps; give"),
        ({"settings": {"engine": TrainerConfig(grad_clip=0.5)}}, TASKS, r"engine\.grad_clip: no such setting"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, given: dict[str, Any], fit: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trainer("org/model", runs=tmp_path, **given).fit(**fit)


def test_fit_from_a_run_needs_neither_agent_nor_tasks(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "nowhere"), algorithm=DPO(beta=0.25), runs=tmp_path / "runs")
    with pytest.raises(ModelError, match="nowhere"):
        trainer.fit(from_run="RUN")


@pytest.mark.parametrize(
    ("functions", "weights", "sentence"),
    [
        (["a.py:f", "a.py:g"], [1.0], "reward_weights: expected one for each of 2 reward_funcs, got 1"),
        ("a.py:f", [1.0], "reward_weights: expected a list of reward_funcs beside it"),
        ([RewardConfig(run="a.py:f", weight=2.0)], [1.0], "reward_weights: expected none, since a RewardConfig"),
        (["a.py:f", "b.py:f"], None, "two rewards are called 'f'; give each a name of its own"),
        (
            ["a.py:reward", "b.py:f"],
            None,
            "'reward' is the name of the sum of several rewards; give each a name of its own",
        ),
    ],
)
def test_reward_functions_that_do_not_fit_together_are_refused(
    tmp_path: Path, functions: list[str | RewardConfig] | str, weights: list[float] | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trainer("org/model", runs=tmp_path).fit(
            "a.py:f", train_dataset=[{"n": 1}], reward_funcs=functions, reward_weights=weights
        )


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder of runs with the run "run", which was started with one task and a learning rate of its own."""
    folder = RunFolder(tmp_path / "runs", "run")
    folder.make()
    tasks = folder.write_tasks("train.jsonl", [{"n": 1}])
    trainer = {"learning_rate": 0.5, "steps": 4, "tasks_per_step": 1}
    table = {"model": {"path": str(tmp_path / "nowhere")}, "agent": {"run": "a.py:f"}, "trainer": trainer}
    folder.create(parse_config(table | {"data": {"train": tasks}, "store": {"url": "memory://"}}))
    return tmp_path / "runs"


def test_a_resumed_run_goes_on_with_its_own_settings(begun: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):  # of the run: nothing was given here
        Trainer(runs=begun).fit(resume="run")
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate is 0\.5 there, and 0\.25 here"):
        Trainer(learning_rate=0.25, runs=begun).fit(resume="run")
    with pytest.raises(ConfigError, match=r"trainer\.steps is 4 there, and 2 here"):
        Trainer(epochs=2, runs=begun).fit(resume="run")


def test_a_resumed_run_takes_no_other_algorithm_than_the_one_that_it_had_by_default(begun: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Trainer(algorithm=LightningRL(), runs=begun).fit(resume="run")
    with pytest.raises(ConfigError, match=r"algorithm\.group_size is 8 there, and 4 here"):
        Trainer(algorithm=LightningRL(group_size=4), runs=begun).fit(resume="run")


def test_a_resumed_run_takes_the_same_tasks_and_other_code(begun: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Trainer(epochs=4, runs=begun).fit("other.py:g", train_dataset=[{"n": 1}], resume="run")
    with pytest.raises(ConfigError, match="train_dataset has other tasks than run run was started with"):
        Trainer(runs=begun).fit("a.py:f", train_dataset=[{"n": 2}], resume="run")


def test_what_is_not_there_is_neither_resumed_nor_exported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing: no such run"):
        Trainer(runs=tmp_path).fit(resume="nothing")
    with pytest.raises(ConfigError, match="call fit first"):
        Trainer("org/model", runs=tmp_path).export(tmp_path / "model")


def test_a_home_folder_is_looked_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    Processes(config("~/model"), RunFolder(model.parent / "runs", "run"))
