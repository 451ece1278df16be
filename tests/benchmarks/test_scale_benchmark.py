"""The benchmark of fleets runs from end to end, loses nothing and says what it promises."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
POSTGRES = shutil.which("postgres") or next(iter(Path("/usr/lib/postgresql").glob("*/bin/postgres")), None)
FIGURES = {"agents", "calls_per_s", "added_p50_ms", "added_p99_ms", "rss_mb_per_agent", "rollouts_per_s", "lost"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(POSTGRES is None, reason="PostgreSQL is not installed")
def test_a_quick_run_loses_nothing_and_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/scale.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= {*FIGURES, "added_p99_growth", "cpu_ms"}
    few, many = figures["measured"]
    assert (few["agents"], many["agents"], figures["agents"]) == (4, 16, 16)
    assert figures["lost"] == 0
    # An agent makes a call per 0.7 s at most, and a rollout is four of them.
    assert 0 < many["calls_per_s"] < 16 / 0.6
    assert many["rollouts_per_s"] == pytest.approx(many["calls_per_s"] / 4, rel=0.05)
    assert 0 < many["added_p50_ms"] <= many["added_p99_ms"]
    assert figures["added_p99_growth"] == pytest.approx(many["added_p99_ms"] / few["added_p99_ms"], abs=0.01)
