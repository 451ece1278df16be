"""The demo on verl with two workers, as a person runs it without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from verl_house import OPTIONS, PYTHON


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_demo_learns_on_verl(verl_environment: None, tmp_path: Path) -> None:
    options = ["--engine-python", str(PYTHON), "--engine-options", str(OPTIONS)]
    command = [sys.executable, "-m", "agentlightning", "demo", "--task", "lookup", "--engine", "verl", "-n", "2"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["before_greedy"] <= 0.40
    assert figures["after_greedy"] >= 0.85
    assert figures["forked_calls"] == 0
