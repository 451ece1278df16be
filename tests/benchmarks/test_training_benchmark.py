"""The benchmark of training runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

FIGURES = {
    "ours_over_trl_train",
    "ours_over_trl_step",
    "merged_over_transition",
    "tree_over_merged",
    "of_peak_flops",
    "prepare_64_over_4",
}
OF_TRL = {"ours_over_trl_train", "ours_over_trl_step"}


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/training.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= FIGURES
    trl = (REPOSITORY / ".venv-trl" / ".installed").exists()
    assert {name for name in FIGURES if figures[name] is None} == (set() if trl else OF_TRL)
    # What merging and trees save is arithmetic: a short run on a busy machine shows it, too.
    assert figures["merged_over_transition"] > 1.5
    assert figures["tree_over_merged"] > 1.5
    assert 0 < figures["of_peak_flops"] < 1.2
    assert figures["prepare_64_over_4"] <= 1.5
