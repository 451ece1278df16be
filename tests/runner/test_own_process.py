"""The processes of a reward function that needs its main thread end with the worker's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

WORKER = """
import asyncio, os, time
from agentlightning.runner.own_process import OwnProcess

def score(task, result):
    print(os.getpid(), flush=True)
    time.sleep(task)
    return os.getpid()

if __name__ == "__main__":
    own = OwnProcess(f"{__file__}:score", ("task", "result"), "reward function")
    asyncio.run(own.call(0, None))
    asyncio.run(own.call(600, None))
"""
"""One call that ends, so that a process waits for work, and one that is cut off."""


def test_processes_of_a_killed_worker_end_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(WORKER)
    worker = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    worker.stdout.readline(), worker.stdout.readline()
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []
