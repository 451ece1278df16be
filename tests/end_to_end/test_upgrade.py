"""A store and a run folder that an earlier version left behind: the upgrade brings both along, and the run is resumed.

stored/before_field_words.tar.xz was written by the last commit before settings, metrics and columns got the field's words:
a training over SQLite (schema 4) that SIGTERM ended after two of six steps.
"""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import orjson
import pytest
from command_line import Folder

from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.sql.tables import SCHEMA_VERSION
from agentlightning.trainer.checkpoint import RunFolder

STORED = Path(__file__).parent / "stored" / "before_field_words.tar.xz"


@pytest.fixture
def left_behind(folder: Folder) -> RunFolder:
    """The folder of the run, unpacked beside its store, its paths those of this folder."""
    with tarfile.open(STORED) as archive:
        archive.extractall(folder.path, filter="data")
    [config] = folder.path.glob("runs/*/config.json")
    made_in = str(Path(orjson.loads(config.read_bytes())["model"]["path"]).parent)
    config.write_text(config.read_text().replace(made_in, str(folder.path)))
    with sqlite3.connect(folder.path / "agl.db") as database:
        for table, column in (("runs", "config"), ("checkpoints", "path")):
            database.execute(f"UPDATE {table} SET {column} = replace({column}, '{made_in}', '{folder.path}')")
    database.close()
    return RunFolder(folder.path / "runs", config.parent.name)


def upgrade(folder: Folder) -> str:
    done = folder.run("store", "upgrade", f"sqlite:///{folder.path}/agl.db", "--runs", str(folder.path / "runs"))
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_an_upgrade_gives_stored_settings_metrics_and_outcomes_their_names(
    folder: Folder, left_behind: RunFolder
) -> None:
    with pytest.raises(ConfigError, match=r"agl store upgrade --runs"):
        left_behind.config()
    said = upgrade(folder)
    assert f"upgraded from version 4 to {SCHEMA_VERSION}" in said
    assert f"{left_behind.run_id}: upgraded" in said.replace("\n", "")
    async with open_store(f"sqlite:///{folder.path}/agl.db") as store:
        [run] = await store.runs()
        _check_config(run.config)
        _check_config(orjson.loads((left_behind.path / "config.json").read_bytes()))
        assert set(run.summary) >= {"step", "train/reward_mean", "eval/greedy/reward_mean"}
        names = {metric.name for metric in await store.metrics(run.id)}
        assert names > {"train/reward_mean", "policy/entropy", "time/collect_s", "rollout/overprovisioned"}
        assert [name for name in names if "/" not in name] == []
        rollouts = await store.rollouts(RolloutQuery(run_id=run.id))
        assert {rollout.outcome for rollout in rollouts} == {None, "trained", "zero_variance", "overprovisioned"}
        assert all(call.completion["role"] == "assistant" for call in await store.calls([rollouts[0].id]))
        assert {resource.kind for resource in await store.resources(run.id)} == {"policy", "external"}
    assert [row["kind"] for row in left_behind.metrics()] == ["eval/greedy", "step", "eval/greedy", "step"]
    assert "train/reward_mean" in left_behind.metrics()[-1]
    files = {path: path.read_bytes() for path in left_behind.path.glob("*.json*")}
    assert "nothing to do" in upgrade(folder)
    assert {path: path.read_bytes() for path in files} == files


def _check_config(config: JSON) -> None:
    agent, trainer, engine = config["agent"], config["trainer"], config["engine"]
    assert (agent["unsupported_params"], agent["allow_posted_rewards"]) == ("drop", False)
    assert (trainer["overprovision"], trainer["batch_order"], trainer["health_checks"]) == (0.5, "fifo", True)
    assert (engine["packing"], engine["max_num_seqs"], engine["max_tokens_per_microbatch"]) == ("prefix_tree", 16, 2048)
    assert config["air"]["rules"]["tool_error"]["cap"] == 0.5
    assert config["algorithm"]["ratio"] == "rollout"
    assert config["external"]["judge"]["models"] == ["judge"]


def test_an_upgrade_that_was_killed_before_its_last_file_is_completed(folder: Folder, left_behind: RunFolder) -> None:
    before = (left_behind.path / "config.json").read_bytes()
    upgrade(folder)
    once = (left_behind.path / "metrics.jsonl").read_bytes()
    (left_behind.path / "config.json").write_bytes(before)  # as after kill -9 between the two
    upgrade(folder)
    assert (left_behind.path / "metrics.jsonl").read_bytes() == once
    assert left_behind.config().trainer.overprovision == 0.5


@pytest.mark.slow
async def test_a_run_of_before_the_upgrade_is_resumed_and_finished(folder: Folder, left_behind: RunFolder) -> None:
    upgrade(folder)
    done = folder.run("train", "--resume", left_behind.run_id, "--runs", str(folder.path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    async with open_store(f"sqlite:///{folder.path}/agl.db") as store:
        [run] = await store.runs()
        assert run.state == "finished"
        assert [(step.step, step.state) for step in await store.steps(run.id)] == [(n, "closed") for n in range(1, 7)]
    assert [row["step"] for row in left_behind.metrics() if row["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
