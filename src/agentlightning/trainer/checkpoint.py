"""Run folders: where a run keeps its configuration, logs, metrics, curve and checkpoints, and how it finds them again.

``runs/<id>/``: config.json, metrics.jsonl, curve.png, logs/, agent.pkl (where the agent travels by pickle),
checkpoints/step-000010/ (a transformers folder with the learner's state beside it).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from agentlightning.config import Config, config_text, parse_config
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import JSON, Checkpoint

LEARNER_STATE = "learner.pt"


class RunFolder:
    """The folder of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.run_id = run_id

    def create(self, config: Config) -> None:
        """Make the folder and write the configuration. StoreError where the disk does not allow it."""
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
            (self.path / "config.json").write_text(config_text(config) + "\n", encoding="utf-8")
        except OSError as cause:
            raise StoreError(
                f"{self.path}: cannot be written: {cause.strerror}; choose another --runs folder"
            ) from cause

    def config(self) -> Config:
        """The configuration that the run was started with."""
        file = self.path / "config.json"
        try:
            return parse_config(orjson.loads(file.read_bytes()), str(file))
        except FileNotFoundError as cause:
            raise NotFoundError(f"{self.run_id}: no such run in {self.path.parent}; see: agl runs list") from cause
        except orjson.JSONDecodeError as cause:
            raise ConfigError(f"{file}: not valid JSON: {cause}") from cause

    def append_metrics(self, row: JSON) -> None:
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")

    def metrics(self) -> list[JSON]:
        """Rows of metrics.jsonl, the last one of each step: steps that a crash undid are left out."""
        rows: dict[tuple[int, str], JSON] = {}
        file = self.path / "metrics.jsonl"
        for line in file.read_bytes().splitlines() if file.exists() else ():
            row = orjson.loads(line)
            rows[row["step"], row["kind"]] = row
        return sorted(rows.values(), key=lambda row: (row["step"], row["kind"]))


async def save_checkpoint(
    store: LightningStore, engine: Engine, folder: RunFolder, step: int, version: int, keep: int
) -> Checkpoint:
    """Save weights and learner state, then record them: a checkpoint in the store is always whole. Keeps the last `keep`."""
    path = (folder.path / "checkpoints" / f"step-{step:06d}").resolve()
    await engine.save(path, DEFAULT_POLICY)
    checkpoint = Checkpoint(run_id=folder.run_id, step=step, path=str(path), version=version)
    await store.put_checkpoint(checkpoint)
    recorded = await store.checkpoints(folder.run_id)
    for old in recorded[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
    return checkpoint


async def last_checkpoint(store: LightningStore, run_id: str) -> Checkpoint | None:
    """The newest checkpoint whose folder is still there; None before the first. NotFoundError where all folders are gone."""
    recorded = await store.checkpoints(run_id)
    for checkpoint in reversed(recorded):
        if (Path(checkpoint.path) / LEARNER_STATE).exists():
            return checkpoint
    if recorded:
        raise NotFoundError(f"{run_id}: the folder of its checkpoint {recorded[-1].path} is gone; start the run again")
    return None


def export(checkpoint: Path, to: Path) -> None:
    """Copy a checkpoint as a plain transformers folder, without the learner's state. ConfigError where `to` exists."""
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to}: exists and is not empty; give a new folder")
    to.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.iterdir()):
        if file.name != LEARNER_STATE:
            shutil.copy2(file, to / file.name)
