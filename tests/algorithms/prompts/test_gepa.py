"""GEPA: repeatability between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from literal_run import COMPLAINTS, GOOD

from agentlightning.algorithms.prompts.search import Split

TWO = {"writer": "Write {question}.", "checker": "Check."}
REPEATED = """
import asyncio, json
from literal_run import LiteralRun, bounded
from test_gepa import TWO, two_templates
from agentlightning.algorithms.prompts import GEPA
run = LiteralRun(two_templates, texts=TWO, sizes=(30, 32), rollouts=500)
asyncio.run(bounded(GEPA, patience=12).search(run, 1))
print(json.dumps(run.log))
"""


def two_templates(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    """A quarter of the tasks needs a sentence in one template, a quarter one in the other, and one needs both unchanged:
    so that the start stays on the front, and has children that differ in one template each."""
    if task == 31:
        good, words = texts == TWO, "Too long."
    elif task % 4 == 0:
        good, words = GOOD[0] in texts["writer"], COMPLAINTS[0]
    elif task % 4 == 1:
        good, words = GOOD[1] in texts["checker"], COMPLAINTS[1]
    else:
        good, words = False, ""
    return (1.0, "", "") if good else (0.0, words, "")


def test_another_process_makes_the_same_requests_whatever_its_hashes() -> None:
    here = Path(__file__).parent
    logs = []
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(here)}
        found = subprocess.run(
            [sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        logs.append(json.loads(found.stdout))
    assert logs[0] == logs[1]
