"""The benchmark of credit rules runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_a_rule_that_finds_the_call_that_decides_needs_half_the_steps() -> None:
    command = [sys.executable, "benchmarks/credit.py", "--rules", "uniform,learned"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"].keys() == {"learned"}
    assert figures["uniform_steps"] <= 200
    assert figures["best_over_uniform"] <= 0.5
