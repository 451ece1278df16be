"""The benchmark of training runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_quick_run_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/training.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    # What merging and trees save is arithmetic: a short run on a busy machine shows it, too.
    assert figures["merged_over_transition"] > 1.5
    assert figures["tree_over_merged"] > 1.5
    assert figures["tree_cost_spread"] > 0
