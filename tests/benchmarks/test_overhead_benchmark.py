"""The benchmark of where the demo's CPU time goes accounts for all of it; the lookup demo, which it runs, learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROLES = ("agent", "gateway", "store", "sampling", "training", "warm_start", "trainer")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_shares_of_all_parts_add_up() -> None:
    command = [sys.executable, "benchmarks/overhead.py", "--task", "lookup"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, demo, figures = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert demo["after_greedy"] - demo["before_greedy"] > 0.5
    assert demo["forked_calls"] == 0
    shares = [figures[f"{role}_share"] for role in ROLES]
    assert all(share > 0 for share in shares)
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert figures["calls"] > 0
    assert figures["gateway_store_ms_per_call"] > 0
