"""The benchmark of structured output in its quick form: too short to learn, long enough for all that must be exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "structured.py"


@pytest.mark.slow
@pytest.mark.long
def test_every_call_follows_its_schema_and_is_learned_from_under_its_mask() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick"], stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["valid_share"], figures["forked_calls"]) == (1.0, 0)
    assert figures["kl_per_token"] < 1e-5
