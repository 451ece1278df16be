"""benchmarks/chaos.py in a shorter form: fixed seeds, five kills, every kind of store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "store"))
KILLS = 5


@pytest.mark.parametrize(
    ("store", "seed"),
    [
        pytest.param("sqlite", 1, marks=pytest.mark.long),
        pytest.param("http", 2, marks=pytest.mark.long),
        ("postgres", 3),
        pytest.param("redis", 4, marks=pytest.mark.long),
    ],
)
def test_a_run_whose_processes_are_killed_loses_nothing_and_trains_nothing_twice(
    store: str, seed: int, model: Path, tmp_path: Path
) -> None:
    if reason := missing(store):
        pytest.skip(reason)
    arguments = ["--store", store, "--kills", str(KILLS), "--seed", str(seed), "--quick", "--keep", str(tmp_path)]
    program = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *arguments, "--model", str(model)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    wanted = {"kills": KILLS, "lost": 0, "trained_twice": 0, "resampled": 0, "completed": True, "failed": 0}
    assert {name: figures[name] for name in wanted} == wanted, done.stdout
    assert figures["finished"] > 0


def missing(store: str) -> str | None:
    """Why this store's server cannot run here; None where it can."""
    import postgres_server
    import redis_server

    if store == "postgres":
        return postgres_server.missing()
    return redis_server.missing() if store == "redis" else None
