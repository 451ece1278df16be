"""``agl train --list-algorithms`` as a process: what is built in, and what a file names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "examples" / "own_algorithm" / "own_algorithm.py"


def test_agl_algorithms_lists_every_part_with_its_source_and_settings(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        f'[model]\npath = "m"\n[agent]\nrun = "a.py:f"\n[data]\ntrain = "t"\n[algorithm]\nloss = "{FILE}:sapo"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "train", str(config), "--list-algorithms"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "250"},
    )
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["gspo", "built-in"] and "arXiv 2507.18071" in line for line in lines)
    assert any(line.split()[:2] == ["decisive", "built-in"] and "key = None" in line for line in lines)
    assert any(f"{FILE}:sapo" in line and " file " in line for line in lines)
    assert "negative = 1.05" in done.stdout
