"""The benchmark of the gateway runs from end to end and says what it promises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("wrk", "nginx") if shutil.which(name) is None]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

FIGURES = {
    "nginx_rps",
    "litellm_rps",
    "text_rps",
    "token_rps",
    "text_over_litellm",
    "token_over_litellm",
    "token_over_nginx",
    "added_ms_p50",
    "ttft_added_ms_p50",
    "rss_growth_mb_per_100k",
}
OF_LITELLM = {"litellm_rps", "text_over_litellm", "token_over_litellm"}


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")
@pytest.mark.skipif(CORES < 2, reason="needs Linux and two cores")
def test_a_quick_run_prints_every_figure() -> None:
    command = [sys.executable, "benchmarks/gateway.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures.keys() >= FIGURES
    assert {line.split()[0] for line in table if " requests/s " in line} >= {"nginx", "text", "token"}
    litellm = (REPOSITORY / ".venv-litellm" / "bin" / "litellm").exists()
    assert {name for name in FIGURES if figures[name] is None} == (set() if litellm else OF_LITELLM)
    assert 0 < figures["token_rps"] < figures["nginx_rps"]
    assert figures["token_over_nginx"] == pytest.approx(figures["token_rps"] / figures["nginx_rps"], abs=1e-3)
    if litellm:
        quotient = figures["token_rps"] / figures["litellm_rps"]
        rounded = 0.06 + 0.05 * quotient / figures["litellm_rps"]  # the quotient's own rounding, and that of LiteLLM's
        assert figures["token_over_litellm"] == pytest.approx(quotient, abs=rounded)


def test_a_run_without_its_tools_says_which_are_missing() -> None:
    command = [sys.executable, "benchmarks/gateway.py", "--quick"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "wrk and nginx: not found" in done.stderr
