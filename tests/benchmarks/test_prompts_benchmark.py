"""The benchmark of prompt searches and weights: its figures, and every arm in its quick form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks" / "prompts"))

import instructed  # noqa: E402

from agentlightning.demo import lookup  # noqa: E402

FIGURES = ["before", "apo", "gepa", "random_search", "weights_only", "prompts_only"]
ARMS = ("apo", "gepa", "random_search", "weights_only")


def benchmark(*options: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/prompts.py", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)


def finished_seed(folder: Path, reward: float) -> None:
    """What a seed leaves whose arms are finished."""
    folder.mkdir(parents=True)
    (folder / "warm_start.json").write_text("{}")
    for arm in ARMS:
        found = {"prompt": arm, "rollouts": 100, "policy": "nowhere"}
        (folder / f"{arm}.result.json").write_text(json.dumps(found))
    for name, arms in (
        ("prompts-apo-gepa-random_search", ("before", "apo", "gepa", "random_search")),
        ("weights_only", ("weights_only",)),
    ):
        scores = {arm: {"greedy": reward, "sampled": reward / 2} for arm in arms}
        (folder / f"eval-{name}.result.json").write_text(json.dumps(scores))


def test_figures_are_means_over_seeds_and_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    for number, reward in enumerate((0.2, 0.4)):
        finished_seed(tmp_path / f"seed-{number}", reward)
    done = benchmark("--seeds", "2", "--work", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures)[:7] == [*FIGURES, "rollouts"]
    assert {figures[name] for name in FIGURES} == {0.3}
    assert figures["sampled"]["gepa"] == 0.15
    assert figures["standard_error"]["gepa"] == 0.1
    assert figures["rollouts_used"] == dict.fromkeys(ARMS, 100)
    assert "| weights_only | 0.200 | 0.400 | 0.300 ± 0.100 | 0.150 ± 0.050 | 100 |" in done.stdout


def test_an_arm_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    done = benchmark("--arms", "gepa,sft")
    assert done.returncode == 2
    assert "--arms: expected some of apo, gepa, random_search, weights_only, got 'sft'" in done.stderr


def demonstrated(prompt: str) -> float:
    """The mean reward of the demonstrator under a prompt."""
    rng, total = Random(1), 0.0
    for _ in range(1000):
        task = lookup.sample(rng, "train")
        said = [one["content"] for one in instructed.demonstrate(task, prompt, rng) if one["role"] == "assistant"]
        total += instructed.judge(task, [one[6:-7] for one in said[:-1]], said[-1])["score"]
    return total / 1000


def test_each_good_edit_helps_the_demonstrator_and_idle_ones_do_not() -> None:
    good = f"{instructed.OPENING} {instructed.LOOK_UP} {instructed.GO_ON} {instructed.BARE}"
    best = demonstrated(good)
    assert demonstrated(instructed.SEED_PROMPT) < 0.1
    for sentence in (instructed.LOOK_UP, instructed.GO_ON, instructed.BARE):
        assert demonstrated(good.replace(sentence, "")) < best - 0.08
    for sentence in (instructed.FROM_MEMORY, instructed.SENTENCE):
        assert demonstrated(f"{good} {sentence}") < best - 0.03
    assert demonstrated(f"{good} {' '.join(instructed.DISTRACTORS)}") == best
    assert best < 0.65, "the rest is for weights to learn"


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run_of_every_arm_prints_every_figure_within_its_rollouts(tmp_path: Path) -> None:
    done = benchmark("--quick", "--seeds", "1", "--work", str(tmp_path), timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert all(0 <= figures[name] <= 1 for name in FIGURES)
    assert set(figures["rollouts_used"]) == set(ARMS)
    assert all(0 < used <= figures["rollouts"] for used in figures["rollouts_used"].values())
