"""What a claim about learning is, and the commands that claims measure with. `learning.py` runs them; knows no claim."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.records import JSON
from agentlightning.trainer.checkpoint import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
AGL = (sys.executable, "-m", "agentlightning")
HELD_OUT, HELD_OUT_SEED = 200, 12345
TAIL = 3000
"""Characters of a failed command's output that are shown."""
Points = list[tuple[float, float]]
"""(cost so far, held-out success): one for each evaluation; the cost is steps, rollouts or compute."""


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    points: Points
    figures: dict[str, float] = field(default_factory=dict)
    """Further numbers; `after` replaces the success of the last point."""


@dataclass(frozen=True)
class Cell:
    """One arm and one seed to measure; `folder` is shared by all arms of the seed and kept."""

    claim: str
    arm: str
    seed: int
    folder: Path
    quick: bool = False

    @property
    def model(self) -> Path:
        """The model that every arm of this seed starts from."""
        return self.folder / "model"

    @property
    def place(self) -> Path:
        """The arm's own folder."""
        found = self.folder / self.arm
        found.mkdir(parents=True, exist_ok=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Arms to compare."""

    arms: tuple[str, ...]
    """The first is the baseline."""
    measure: Callable[[Cell], Outcome]
    prepare: Callable[[Cell], object] = lambda _: None
    """Makes what the arms of a seed share."""
    goal: float | None = None
    """A success: the cost to reach it is compared with the baseline's."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """By arm, another baseline than the first."""
    cost: str = "training step"
    seeds: int = 3


def execute(cell: Cell, name: str, *command: str | Path) -> str:
    """Returns the output of a command, which is not run again once it has succeeded. Ends the program where it fails."""
    kept, log = cell.folder / f"{name}.out", cell.folder / f"{name}.log"
    if not kept.exists():
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("AGL_") or key == "AGL_DATA"
        }
        words = [str(word) for word in command]
        with log.open("w") as output:
            done = subprocess.run(words, stdout=output, stderr=output, cwd=REPOSITORY, env=environment, check=False)
        if done.returncode:
            sys.exit(f"{log.read_text()[-TAIL:]}\n{' '.join(words)} failed; see {log}")
        log.replace(kept)  # whole or not at all
    return kept.read_text()


def last_json(output: str) -> JSON:
    """The last line that is a JSON object."""
    return dict(json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{"))))


def options(settings: JSON) -> list[str]:
    """`--set` for each setting."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={as_toml(value)}")]


def as_toml(value: Any) -> str:
    """A setting's value as TOML.

    >>> as_toml({"a": [1, "b"]})
    '{a = [1, "b"]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(as_toml, value))}]" if isinstance(value, list) else json.dumps(value, default=str)


def train(cell: Cell, config: Path, settings: JSON, store: str = "") -> tuple[RunFolder, list[JSON]]:
    """Trains the arm with `agl train`; a run that was stopped is resumed. Returns its folder and its metrics.

    store: by default a new one, the arm's own `agl.db`.
    """
    runs, store = cell.place / "runs", store or f"sqlite:///{cell.place}/agl.db"
    found = [RunFolder(runs, path.name) for path in runs.glob("*")]
    if started := next((run for run in found if run.has_checkpoint()), None):
        words = ["--resume", started.run_id]
    else:
        for path in (runs, *cell.place.glob("agl.db*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        words = [str(config), *options(settings)]
    execute(cell, f"{cell.arm}/train", *AGL, "train", *words, "--store", store, "--runs", runs)
    (path,) = runs.iterdir()
    run = RunFolder(runs, path.name)
    return run, run.metrics()


def curve(rows: list[JSON]) -> Points:
    """Greedy held-out success by step."""
    return sorted((row["step"], row["eval/greedy/reward_mean"]) for row in rows if "eval/greedy/reward_mean" in row)


def warm_start(cell: Cell, task: str) -> None:
    """The demo's warm-started model of a task."""
    module = ("-m", "agentlightning.demo.warm_start", "--task", task, "--seed", str(cell.seed))
    execute(cell, "warm_start", sys.executable, *module, "--to", cell.model)


def write_rows(path: Path, rows: list[JSON]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
