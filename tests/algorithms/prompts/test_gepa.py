"""GEPA by its authors' package: what its engine may see, merges, repeatability between processes, and its thread."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from literal_run import COMPLAINTS, GOOD, LiteralRun

from agentlightning.algorithms.prompts import GEPA
from agentlightning.algorithms.prompts.search import Split
from agentlightning.errors import InputError

SEED = 1
"""With which a merge is made."""
TWO = {"writer": "Write {question}.", "checker": "Check."}
REPEATED = """
import asyncio, json
from literal_run import LiteralRun
from test_gepa import TWO, two_templates
from agentlightning.algorithms.prompts import GEPA
run = LiteralRun(two_templates, texts=TWO, sizes=(30, 32), rollouts=500)
asyncio.run(GEPA(patience=12).search(run, 1))
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


def below_zero(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    reward, feedback, error = two_templates(texts, split, task, replica)
    return reward - 1.0, feedback, error


def split_apart(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    """Training tasks earn 1 for the sentence, validation tasks at the same positions 0.5."""
    if GOOD[0] not in texts["system"]:
        return 0.0, COMPLAINTS[0], ""
    return (1.0 if split == "train" else 0.5), COMPLAINTS[0], ""


async def test_the_package_takes_no_reward_of_a_training_task_for_one_of_a_validation_task() -> None:
    # Its cache goes by position alone: on, it would ask for those validation tasks only that no minibatch had.
    run = LiteralRun(split_apart, sizes=(8, 8))
    result = await GEPA(patience=6).search(run, seed=0)
    texts = tuple(sorted(result.best.texts.items()))
    everything = {(texts, "val", task, 0) for task in range(8)}
    asked = [set(request[1]) for request in run.log if request[0] == "evaluate"]
    assert asked.count(everything) == 2  # ours, as its race was won, and the package's own
    assert set(result.means.values()) == {0.0, 0.5}


async def test_it_merges_candidates_that_improved_different_templates() -> None:
    run = LiteralRun(two_templates, texts=TWO, sizes=(30, 32))
    result = await GEPA(patience=12).search(run, seed=SEED)
    assert result.best.source == "gepa merge"
    assert result.best.texts == {"writer": f"{TWO['writer']} {GOOD[0]}", "checker": f"{TWO['checker']} {GOOD[1]}"}
    assert len(result.best.parents) == 2
    assert result.mean == 0.5


async def test_without_merge_every_candidate_has_one_parent() -> None:
    run = LiteralRun(two_templates, texts=TWO, sizes=(30, 32))
    await GEPA(patience=12, merge=False).search(run, seed=SEED)
    assert all(len(one.parents) == 1 for one in run.candidates[1:])


async def test_rewards_below_zero_can_be_merged() -> None:
    # The package draws a common ancestor by its mean reward, and fails where that is negative.
    run = LiteralRun(below_zero, texts=TWO, sizes=(30, 32))
    result = await GEPA(patience=12, perfect_reward=0.0).search(run, seed=SEED)
    assert any(one.source == "gepa merge" for one in run.candidates)
    assert result.mean == -0.5


async def test_a_merge_that_is_refused_ends_nothing() -> None:
    class Choosy(LiteralRun):
        async def propose(self, texts, parents, source):  # type: ignore[no-untyped-def]
            if source == "gepa merge":
                raise InputError("prompts.templates.checker: not beside this writer")
            return await super().propose(texts, parents, source)

    run = Choosy(two_templates, texts=TWO, sizes=(30, 32))
    result = await GEPA(patience=12).search(run, seed=SEED)
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


def test_without_the_package_it_is_refused_at_start_with_the_extra_that_has_it() -> None:
    code = "import sys; sys.modules['gepa'] = None; from agentlightning.algorithms.prompts import GEPA; GEPA()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (
        "MissingExtraError: gepa is not installed; install it with: pip install 'agentlightning[prompts]'"
        in done.stderr
    )


async def test_a_search_that_is_cancelled_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    asked, stopped = asyncio.Event(), asyncio.Event()

    async def never(prompt: str, purpose: str, number: int) -> str:
        asked.set()
        try:
            return await asyncio.Future()
        finally:
            stopped.set()

    search = asyncio.create_task(GEPA().search(LiteralRun(optimiser=never), seed=0))
    await asyncio.wait_for(asked.wait(), 30)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    await asyncio.wait_for(stopped.wait(), 30)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("asyncio_")]


async def test_rollouts_and_requests_run_in_the_event_loop() -> None:
    here = threading.get_ident()
    seen = set()

    async def asked(prompt: str, purpose: str, number: int) -> str:
        seen.add(threading.get_ident())
        return ""

    def rewards(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
        seen.add(threading.get_ident())
        return 0.0, "", ""

    await GEPA(patience=2).search(LiteralRun(rewards, asked), seed=0)
    assert seen == {here}
