"""Workers that run elsewhere give agents the external model that the run's configuration in the store names."""

from __future__ import annotations

import sys
from pathlib import Path

from runner_bench import Bench

HOSTED = {"url": "http://127.0.0.1:9/v1", "models": ["*-5", "small-1"]}
PROGRAM = "import os\nprint(float(os.environ['AGL_MODEL'] == 'small-1'))\n"


async def test_agents_of_a_worker_elsewhere_get_the_runs_external_model(bench: Bench, tmp_path: Path) -> None:
    config = {"model": {"path": "external:hosted"}, "external": {"hosted": HOSTED}}
    run = await bench.store.create_run("hosted", config)
    own = Bench(bench.server, bench.store, run.id, bench.processes)
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    queued = await own.enqueue({"question": "who?"})
    own.worker_process("--command", f"{sys.executable} {program}")
    [done] = await own.settled(queued)
    assert (done.state, done.reward) == ("succeeded", 1.0)
