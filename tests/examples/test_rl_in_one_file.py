"""The one-file tutorial does what its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_in_one_file.py"


@pytest.mark.slow
def test_the_one_file_example_learns():
    done = subprocess.run([sys.executable, str(EXAMPLE), "0"], capture_output=True, text=True, check=True)

    greedy = [float(value) for value in re.findall(r"held-out success ([0-9.]+) greedy", done.stdout)]
    assert greedy[0] < 0.4
    assert greedy[-1] > 0.85


def test_the_one_file_example_stands_alone():
    assert "agentlightning" not in EXAMPLE.read_text()
