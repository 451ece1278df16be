"""The benchmark of the stores runs from end to end and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OVER_V03 = {
    "http_spans_over_v03",
    "http_lists_over_v03",
    "sqlite_spans_over_v03_memory",
    "sqlite_lists_over_v03_memory",
}
OVER_SERVERS = {"postgres_spans_per_s", "redis_spans_per_s"}


@pytest.mark.slow
def test_a_quick_run_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/store.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures.keys() == {*OVER_V03, *OVER_SERVERS, "claim_1m_over_1k", "bytes_over_whole_prompts"}
    v03 = (REPOSITORY / ".venv-agentlightning-v03" / "bin" / "python").exists()
    assert {name for name in OVER_V03 if figures[name] is None} == (set() if v03 else OVER_V03)
    rates = {line.split(" ")[1]: line for line in table if " spans/s " in line and line.startswith("ours")}
    assert rates.keys() >= {"http", "sqlite"}
    assert {name for name in OVER_SERVERS if figures[name] is not None} == {
        f"{name}_spans_per_s" for name in ("postgres", "redis") if name in rates
    }
    assert 0.2 < figures["claim_1m_over_1k"] < 20  # short rounds say no more than that it was measured
    assert 0.1 < figures["bytes_over_whole_prompts"] < 0.5
