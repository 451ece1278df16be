"""The benchmark of tracing runs from end to end and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FIGURES = {
    "added_ms",
    "agentops_added_ms",
    "ours_over_agentops",
    "noise_ms",
    "added_wall_ms",
    "agentops_added_wall_ms",
    "noise_wall_ms",
    "openinference_added_ms",
}


@pytest.mark.slow
def test_a_quick_run_prints_every_figure_and_finds_what_tracing_leaves() -> None:
    command = [sys.executable, "benchmarks/tracing.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures.keys() == FIGURES
    there = (REPOSITORY / ".venv-agentops" / ".installed").exists()
    assert {name for name in FIGURES if "agentops" in name and figures[name] is None} == (
        set() if there else {"agentops_added_ms", "ours_over_agentops", "agentops_added_wall_ms"}
    ) or figures["agentops_added_ms"] <= 0, "a ratio to nothing is none"
    contestants = {"ours", "off", "openinference"} | ({"agentops"} if there else set())
    assert contestants <= {line.split()[0] for line in table if line}
