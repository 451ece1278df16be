"""The benchmark of images runs, and every call of it is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_two_steps_of_the_picture_game_are_exact_call_by_call() -> None:
    command = [sys.executable, "benchmarks/images.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["before"] <= 0.3
    assert figures["exact_share"] == 1.0
