"""What is given to Trainer and to a configuration reaches what it configures, or is refused before anything starts."""

from pathlib import Path

import orjson
import pytest

from agentlightning.algorithms.preference import DPO
from agentlightning.config import Config, parse_config
from agentlightning.errors import AgentLightningError, ConfigError, DataError, ModelError
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.trainer import Trainer, default_store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model from outside."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def config(model: str, **agent: object) -> Config:
    return parse_config({"model": {"path": model}, "agent": {"run": "a.py:f"} | agent, "data": {"train": "t"}})


def test_settings_of_the_data_are_kept_beside_the_tasks_given_to_fit(tmp_path: Path) -> None:
    trainer = Trainer("org/model", settings={"data": {"fields": ["question"]}}, runs=tmp_path)
    with pytest.raises(DataError, match="unknown field 'q'"):
        trainer.fit("a.py:f", train=[{"question": "1+1", "q": "2"}])


def test_a_data_function_gets_the_seed_of_the_run(tmp_path: Path) -> None:
    def rows(seed: int) -> list[dict[str, int]]:
        return [{"n": seed}]

    with pytest.raises(ModelError):
        Trainer(str(tmp_path / "nowhere"), seed=7, runs=tmp_path / "runs").fit("a.py:f", train=rows)
    [file] = tmp_path.glob("runs/*/train.jsonl")
    assert orjson.loads(file.read_bytes()) == {"n": 7}


def test_a_store_beside_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="give store or server, not both"):
        Trainer("org/model", store="memory://", server="http://127.0.0.1:8088")


def test_an_empty_variable_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE", "")
    assert default_store() == "sqlite:///runs/agl.db"


def test_a_folder_that_is_no_model_is_refused_before_a_run_folder_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Processes(config(str(tmp_path / "nowhere")), RunFolder(tmp_path / "runs", "run"))
    assert not (tmp_path / "runs").exists()


def test_a_home_folder_is_looked_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    Processes(config("~/model"), RunFolder(model.parent / "runs", "run"))


def test_no_workers_here_and_a_key_that_nobody_knows_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(model.parent / "runs", "run")
    monkeypatch.delenv("AGL_SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match="set AGL_SERVER_KEY"):
        Processes(config(str(model), workers=0), folder)
    monkeypatch.setenv("AGL_SERVER_KEY", "secret")
    Processes(config(str(model), workers=0), folder)


def test_an_instrumentation_that_is_not_installed_is_refused_before_anything_starts(model: Path) -> None:
    asked = config(str(model), instrument=("nothing_of_the_kind",))
    with pytest.raises(ConfigError, match="pip install openinference-instrumentation-nothing-of-the-kind"):
        Processes(asked, RunFolder(model.parent / "runs", "run"))


async def test_a_model_that_is_not_found_takes_down_what_was_started(tmp_path: Path, model: Path) -> None:
    processes = Processes(config(str(model)), RunFolder(tmp_path / "runs", "run"))
    (model / "config.json").unlink()
    with pytest.raises(AgentLightningError, match=r"config\.json"):
        async with processes:
            pass
    assert processes.pids() == {}


def test_an_algorithm_of_the_record_and_a_recorded_run_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'lightning_rl' does not learn from recorded rollouts"):
        Trainer("org/model", runs=tmp_path).fit(from_run="RUN")
    with pytest.raises(ConfigError, match=r"name their run with data\.from_run"):
        Trainer("org/model", algorithm=DPO(), runs=tmp_path).fit("a.py:f", train=[{"n": 1}])


def test_fit_from_a_run_needs_neither_agent_nor_tasks(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path / "nowhere"), algorithm=DPO(beta=0.25), runs=tmp_path / "runs")
    with pytest.raises(ModelError, match="nowhere"):
        trainer.fit(from_run="RUN")
