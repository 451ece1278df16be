"""GEPA: parents from the Pareto front, merges, and repeatability between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from literal_run import COMPLAINTS, GOOD, LiteralRun, bounded

from agentlightning.algorithms.prompts import GEPA
from agentlightning.algorithms.prompts.optimizers import merged_texts
from agentlightning.algorithms.prompts.search import PromptCandidate, Split
from agentlightning.errors import InputError

SEED = 1
"""With which a merge is made."""
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


async def test_it_merges_candidates_that_improved_different_templates() -> None:
    run = LiteralRun(two_templates, texts=TWO, sizes=(30, 32))
    result = await bounded(GEPA, patience=12).search(run, seed=SEED)
    assert any(one.source == "gepa merge" and len(one.parents) == 2 for one in run.candidates)
    assert GOOD[0] in result.best.texts["writer"]
    assert GOOD[1] in result.best.texts["checker"]
    assert result.mean == 0.5


def test_a_merge_has_of_each_template_the_text_that_changed() -> None:
    start = PromptCandidate(number=0, texts={"a": "x", "b": "y"})
    one = PromptCandidate(number=1, texts={"a": "x!", "b": "y"}, parents=(0,))
    other = PromptCandidate(number=2, texts={"a": "x", "b": "y!"}, parents=(0,))
    below = PromptCandidate(number=3, texts={"a": "x?", "b": "y"}, parents=(1,))
    known = {each.number: each for each in (start, one, other, below)}
    assert merged_texts(one, other, known) == {"a": "x!", "b": "y!"}
    assert merged_texts(below, other, known) == {"a": "x?", "b": "y!"}
    assert merged_texts(one, below, known) is None  # one is made of the other
    assert merged_texts(start, one, known) is None
    same = PromptCandidate(number=4, texts={"a": "z", "b": "y"}, parents=(0,))
    assert merged_texts(one, same, known | {4: same}) is None  # both changed the same template


async def test_a_merge_that_is_refused_ends_nothing() -> None:
    class Choosy(LiteralRun):
        async def propose(self, texts, parents, source):  # type: ignore[no-untyped-def]
            if source == "gepa merge":
                raise InputError("prompts.templates.checker: not beside this writer")
            return await super().propose(texts, parents, source)

    run = Choosy(two_templates, texts=TWO, sizes=(30, 32))
    result = await bounded(GEPA, patience=12).search(run, seed=SEED)
    assert "A candidate is refused: prompts.templates.checker: not beside this writer" in run.notes
    assert result.mean is not None


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
    assert any(request[2] == "gepa merge" for request in logs[0] if request[0] == "propose")
