"""benchmarks/chaos.py over verl: a worker and the driver are killed, at moments that the seed decides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from verl_house import PYTHON

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1300)
def test_a_run_whose_verl_is_killed_loses_nothing_and_trains_nothing_twice(
    verl_environment: None, tmp_path: Path
) -> None:
    options = ["--engine", "verl", "--engine-python", str(PYTHON), "--kills", "2", "--quick", "--seed", "58"]
    done = subprocess.run([sys.executable, CHAOS, *options, "--keep", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    wanted = {"kills": 2, "killed_driver": 1, "killed_learner": 1, "lost": 0, "trained_twice": 0, "resampled": 0}
    wanted |= {"completed": True, "failed": 0, "weights_differ_by": 0.0}
    assert {name: figures[name] for name in wanted} == wanted, done.stdout
