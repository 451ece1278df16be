"""The benchmark of the examples reads the right figures, does nothing twice, and runs the examples' own commands."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

from agentlightning.engines.saved_folders import LEARNER_STATE  # noqa: E402
from agentlightning.records import Finish, NewRollout, Reward, WorkerStatus  # noqa: E402
from agentlightning.store.open import open_store  # noqa: E402
from experiments import EXAMPLES, parts, plan_of  # noqa: E402

FIGURES = ["example", "framework", "slice", "before", "after", "more_sft_control", "rollouts", "wall_s", "cpu_s"]
MIN_TURNS = {"calculator": 1.5, "rag": 1.5, "text_to_sql": 1.2}
"""Of a rollout, after few epochs: the calculator is called, paragraphs are searched, and what fails is rewritten."""


def benchmark(*options: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/experiments.py", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)


def finished_seed(work: Path, seed: int, heldout: list[tuple[int, float]], control: float) -> None:
    """What a finished seed of the calculator leaves."""
    folder = work / f"seed-{seed}"
    run = folder / "runs" / "a-run"
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "kind": "step", "rollout/count": 384, "train/reward_mean": 0.3} for step in range(1, 121)
    ]
    rows += [{"step": step, "kind": "eval/greedy", "eval/greedy/reward_mean": value} for step, value in heldout]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = {
        "warm_start": {"labelled": 335, "held_out": 435},
        "train": {"run": "a-run"},
        "control": {"labelled": 335},
        "control_eval": {"greedy": control, "sampled": 0.9},
    }
    for name, value in kept.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
        (folder / f"{name}.wall").write_text("10.0\n")
        (folder / f"{name}.cpu").write_text("15.0\n")


@pytest.mark.slow
def test_figures_are_means_over_seeds_of_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    finished_seed(tmp_path, 0, [(0, 0.30), (40, 0.90), (120, 0.40)], control=0.32)
    finished_seed(tmp_path, 1, [(0, 0.20), (40, 0.10), (120, 0.44)], control=0.28)
    curve = tmp_path / "curve.png"
    done = benchmark("--example", "calculator", "--seeds", "2", "--work", str(tmp_path), "--curve", str(curve))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == FIGURES
    assert figures == {
        "example": "calculator",
        "framework": "AutoGen",
        "slice": "ASDiv-A and MAWPS, questions of unseen templates: 435 held out, 335 labelled",
        "before": 0.25,
        "after": 0.42,
        "more_sft_control": 0.30,
        "rollouts": 384 * 120,
        "wall_s": 80.0,
        "cpu_s": 120.0,
    }
    assert "| gain | +0.100 | +0.240 | +0.170 ± 0.099 |" in done.stdout
    assert curve.read_bytes().startswith(b"\x89PNG")


async def test_parts_are_the_data_sets_and_named_rewards_of_a_greedy_evaluation(tmp_path: Path) -> None:
    database = tmp_path / "agl.db"
    evaluated = [
        ("eval:0:greedy:0", "mawps", 1.0),
        ("eval:0:greedy:1", "mawps", 0.0),
        ("eval:0:greedy:2", "svamp", 1.0),
    ]
    others = [("eval:0:sampled:0", "mawps", 1.0), ("a task of training", "mawps", 1.0)]
    async with open_store(f"sqlite:///{database}") as store:
        await store.create_run("run", {}, "run")
        await store.enqueue(
            [
                NewRollout(
                    run_id="run",
                    task={"set": source, "right": right},
                    group_id=group,
                    step=0,
                    mode="eval" if group.startswith("eval") else "train",
                )
                for group, source, right in evaluated + others
            ]
        )
        worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
        for claim in await store.claim(worker, limit=5):
            place = {"run_id": "run", "rollout_id": claim.rollout.id, "attempt": 1, "source": "return"}
            values = {"repaired": 0.5, "reward": claim.rollout.task["right"]}  # the last is the rollout's
            rewards = [
                Reward(id=f"{claim.rollout.id} {name}", name=name, value=value, **place)
                for name, value in values.items()
            ]
            await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=tuple(rewards))])
    assert await parts(database, 0) == {"mawps (2)": 0.5, "repaired": 0.5, "svamp (1)": 1.0}
    assert await parts(database, 1) == {}


def test_a_slice_that_an_example_lacks_is_refused_with_those_it_has() -> None:
    done = benchmark("--example", "text_to_sql", "--slice", "templates")
    assert done.returncode == 2
    assert "--slice: expected one of spider, joins, generated for text_to_sql" in done.stderr


@pytest.mark.slow
def test_a_command_that_fails_ends_the_benchmark_and_is_shown(tmp_path: Path) -> None:
    finished_seed(tmp_path, 0, [(0, 0.3), (120, 0.4)], control=0.3)
    (tmp_path / "seed-0" / "control_eval.json").unlink()  # and the control's model is not there
    done = benchmark("--example", "calculator", "--seeds", "1", "--work", str(tmp_path))
    assert done.returncode == 1
    assert "agentlightning eval" in done.stderr
    assert str(tmp_path / "seed-0" / "control") in done.stderr
    assert not (tmp_path / "seed-0" / "control_eval.json").exists()


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    finished_seed(tmp_path, 0, [(0, 0.3)], control=0.3)
    folder = tmp_path / "seed-0"
    (folder / "train.json").unlink()
    checkpoint = folder / "runs" / "a-run" / "checkpoints" / "step-000110"
    checkpoint.mkdir(parents=True)
    (checkpoint / LEARNER_STATE).touch()
    done = benchmark("--example", "calculator", "--seeds", "1", "--work", str(tmp_path))
    assert done.returncode == 1  # there is too little of it to go on from
    assert f"--runs {folder}/runs --resume a-run failed" in done.stderr
    assert "there is no store yet" in done.stderr
    assert float((folder / "train.wall").read_text()) > 10, "its earlier time counts"


@pytest.mark.parametrize(
    ("example", "part"), [(name, part) for name, example in EXAMPLES.items() for part in example.slices]
)
def test_every_example_has_the_files_that_the_benchmark_runs(example: str, part: str) -> None:
    plan = plan_of(example, EXAMPLES[example].slices[part], quick=False)
    assert plan.config.is_file()
    assert plan.steps >= 1
    assert {file.name for file in plan.folder.iterdir()} >= {
        *("agent.py", "data.py", "warm_start.py", "train_gpu.toml", "README.md", "curve.png")
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_agent_and_what_it_imports_know_nothing_of_training(example: str) -> None:
    seen, pending = set(), ["agent"]
    while pending:
        source = (REPOSITORY / "examples" / example / f"{pending.pop()}.py").read_text()
        assert "agentlightning" not in source
        found = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)) - seen
        seen |= found
        pending += [name for name in found if (REPOSITORY / "examples" / example / f"{name}.py").exists()]
    assert len(seen) > 3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif("AGL_DATA" not in os.environ, reason="AGL_DATA names no data")
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_quick_run_of_each_example_trains_without_a_fork_and_prints_every_figure(
    example: str, tmp_path: Path
) -> None:
    options = ["--example", example, "--seeds", "1", "--quick", "--work", str(tmp_path)]
    done = benchmark(*options, timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == FIGURES
    assert all(0 <= figures[name] <= 1 for name in ("before", "after", "more_sft_control"))
    (metrics,) = (tmp_path / "seed-0" / "runs").glob("*/metrics.jsonl")
    steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/forked_calls"] == 0 and row["rollout/failed"] == 0 for row in steps)
    assert statistics.fmean(row["rollout/turns"] for row in steps) > MIN_TURNS[example], (
        "the agent did more than answer"
    )
    assert figures["rollouts"] == sum(row["rollout/count"] for row in steps)
    again = benchmark(*options)
    assert json.loads(again.stdout.splitlines()[-1]) == figures, "nothing is done twice"
