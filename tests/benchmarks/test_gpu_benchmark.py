"""The benchmark of a GPU runs where there is none, at tiny size, and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_at_tiny_size_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--size", "tiny", "--device", "cpu", "--rounds", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= {f"local_{name}" for name in ("sampled_tokens_per_s", "learner_tokens_per_s", "publish_s")}
    assert 0 < figures["local_mfu"] < 1.5
    assert figures["local_step_s"] > figures["local_publish_s"] > 0
    assert figures["ours_over_trl_step"] is None
