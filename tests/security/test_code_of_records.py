"""A trainer's token writes a run whose record names code: nobody who reads the run imports it, until told to trust it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from stored_runs import Earned, add_rollouts, record

import agentlightning
import build
from agentlightning.analysis.mcp_server import StoreTools
from agentlightning.analysis.reward_debugger import RewardChange, explain_rollout, what_if
from agentlightning.config.run import Config, parse_config, run_record
from agentlightning.console.app import draw
from agentlightning.console.reader import Reader
from agentlightning.console.render import Templates
from agentlightning.errors import AgentLightningError
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
from agentlightning.trainer.checkpoint import RunFolder, take_fingerprint

PLANTED = """
from pathlib import Path
from agentlightning import LightningRL
Path(__file__).with_name("ran").touch()

class Planted(LightningRL):
    pass

def planted(*_, **__):
    return [[]]
"""
SETTINGS: dict[str, Any] = {
    "type": "{file}:Planted",
    "credit": "{file}:planted",
    "advantage": "{file}:planted",
    "loss": "{file}:planted",
    "aggregation": "{file}:planted",
    "agents": ["{file}:planted"],
    "key": {"credit": {"type": "gigpo", "key": "{file}:planted"}},
    "schedule": {"schedule": [{"from_step": 2, "credit": "{file}:planted"}]},
    "module": {"credit": "planted_module:planted"},
}
"""Places of an algorithm's table in which a record can name code; a dictionary is the table itself."""


def placed(value: Any, file: Path) -> Any:
    if isinstance(value, dict):
        return {name: placed(one, file) for name, one in value.items()}
    if isinstance(value, list):
        return [placed(one, file) for one in value]
    return value.replace("{file}", str(file)) if isinstance(value, str) else value


@pytest.fixture(params=SETTINGS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> JSON:
    """The record of a run with code at one place of its algorithm; both a file and a module of the working directory."""
    (tmp_path / "planted.py").write_text(PLANTED)
    if request.param == "module":
        (tmp_path / "planted_module.py").write_text(PLANTED)
    value = placed(SETTINGS[request.param], tmp_path / "planted.py")
    return record(algorithm={"group_size": 2, **(value if isinstance(value, dict) else {request.param: value})})


async def planted_run(store: LightningStore, config: JSON) -> str:
    """Two runs, one of them planted; a rollout of it."""
    for run, given in (("run", config), ("other", record(algorithm={"group_size": 2}))):
        await store.create_run(run, given, run)
        first, _ = await add_rollouts(store, run, 2, [Earned(group="a", replica=n, reward=float(n)) for n in range(2)])
        if run == "run":
            planted = first
    return planted


async def read_by_all(store: LightningStore, rollout: str) -> list[str]:
    """What those say that read a store and refuse something."""
    said = []
    tools, reader, templates = StoreTools(store), Reader(store), Templates()
    for reading in (
        tools.explain_reward(rollout),
        tools.compare_runs(["run", "other"]),
        tools.reward_distribution("run", 2),
        tools.find_reward_hacks("run"),
        tools.get_run("run"),
        what_if(store, "run", 2, RewardChange(credit="last")),
        what_if(store, "run", 2, RewardChange(weights={"reward": 2.0})),
        draw(reader, templates, "/rewards", {"run": ["run"], "view": ["explain"], "rollout": [rollout]}),
        draw(reader, templates, "/rewards", {"run": ["run"], "view": ["what-if"], "step": ["2"]}),
        draw(reader, templates, "/compare", {"run": ["run", "other"]}),
        draw(reader, templates, "/run", {"run": ["run"], "with": ["other"]}),
    ):
        try:
            said.append(str(await reading))
        except AgentLightningError as error:
            said.append(str(error))
    reader.close()
    return [one for one in said if "--trust-run" in one]


async def test_no_reader_imports_the_code_that_a_record_names(config: JSON, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        async with InMemoryLightningStore() as store:
            rollout = await planted_run(store, config)
            assert len(await read_by_all(store, rollout)) == 5  # of MCP, two pages of the console, and both what-ifs
            assert not (tmp_path / "ran").exists()
            with contextlib.suppress(AgentLightningError):  # a stand-in for a rule is none
                await explain_rollout(store, rollout, trust_run=True)
            assert (tmp_path / "ran").exists()


def test_no_command_imports_it_until_told_to_trust_the_run(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/agl.db", tmp_path / "planted.py"
    file.write_text(PLANTED)

    async def plant() -> str:
        async with SqlLightningStore(url) as store:
            return await planted_run(store, record(algorithm={"group_size": 2, "credit": f"{file}:planted"}))

    rollout = asyncio.run(plant())
    run = agentlightning.load_run("run", url)
    run.metrics(), run.rollouts(), run.calls(), run.rewards(), str(run.show(rollout))
    explain = ("rewards", "explain", rollout)
    refused = {}
    for words in (
        explain,
        ("rewards", "what-if", "run", "--step", "2", "--credit", "last"),
        ("runs", "compare", "run", "other"),
        ("runs", "show", "run"),
        ("train", "--rerun", "run", "--runs", str(tmp_path / "runs")),
    ):
        done = build.agl(*words, "--store", url)
        refused[words[1]] = "add --trust-run" in str(done.exception)
    assert refused == {"explain": True, "what-if": True, "compare": False, "show": False, "--rerun": True}
    assert not (tmp_path / "ran").exists()
    build.agl(*explain, "--store", url, "--trust-run")
    assert (tmp_path / "ran").exists()


async def test_what_a_user_names_is_loaded_though_what_the_record_names_is_not(tmp_path: Path) -> None:
    rule = tmp_path / "mine.py"
    rule.write_text("def mine(trajectory, group):\n    return [2.0] * len(trajectory.transitions)\n")
    async with InMemoryLightningStore() as store:
        await planted_run(store, record(algorithm={"group_size": 2}))
        found = await what_if(store, "run", 2, RewardChange(credit=f"{rule}:mine"))
        assert {one.credit_after for one in found.calls} == {2.0}


def made(tmp_path: Path, url: str) -> Config:
    """A training run as its own host made it: in its folder and in the store. Its agent and its tasks are code."""
    for name in ("agent", "tasks"):
        (tmp_path / f"{name}.py").write_text("def solve(task, llm): return 0.0\ndef rows(): return [{'a': 1}]\n")
    table = {
        "model": {"path": str(tmp_path / "nowhere")},
        "agent": {"run": f"{tmp_path}/agent.py:solve"},
        "data": {"train": f"{tmp_path}/tasks.py:rows"},
        "store": {"url": url},
    }
    config = parse_config(table)
    folder = RunFolder(tmp_path / "runs", "r")
    folder.create(config)
    folder.keep_fingerprint(take_fingerprint(config, [{"a": 1}]))
    return config


def rerun(tmp_path: Path, url: str, record: JSON, *words: str) -> str:
    """What starting the run again says, whose record somebody wrote."""

    async def write() -> None:
        async with SqlLightningStore(url) as store:
            await store.create_run("first", record, "r")
            fingerprint = take_fingerprint(parse_config({**record, "store": {"url": url}}), [{"a": 1}])
            await store.update_run("r", state="finished", summary=fingerprint.summary())

    asyncio.run(write())
    return str(build.agl("train", "--rerun", "r", "--store", url, "--runs", str(tmp_path / "runs"), *words).exception)


def test_a_run_started_again_is_that_of_its_folder_whatever_its_record_says(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    config = made(tmp_path, url)
    (tmp_path / "planted.py").write_text(PLANTED)
    planted = run_record(config) | {"data": {"train": f"{tmp_path}/planted.py:planted"}}
    assert "nowhere" in rerun(tmp_path, url, planted)  # what its own configuration lacks
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["agent", "tasks"])
def test_code_that_changed_is_refused_before_it_is_imported(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    config = made(tmp_path, url)
    (tmp_path / f"{name}.py").write_text(PLANTED)
    assert "code changed since the run was last started" in rerun(tmp_path, url, run_record(config))
    assert not (tmp_path / "ran").exists()
