"""Prompts with weights: a training run whose schedule searches for prompts, as processes, killed and resumed.

The agent is the lookup demo's, whose tiny model reads no prompt: half a reward is for an answer, the rest for the words of
the prompt that its rollout has. So what a search finds shows in the rewards, and the weights have theirs to learn.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import orjson
import pytest
from command_line import Folder, until

from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON, Run
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.prompt_candidates import read_candidates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 300.0
STEPS, TASKS, GROUP, SEARCHED = 4, 4, 4, (2, 3)
AGENT = """
from agentlightning import prompt
from agentlightning.demo import lookup


async def solve(task, llm):
    words = prompt("system").split()
    found = await lookup.solve(task, llm)
    return 0.5 * float(found or 0.0) + 0.25 * ("facts." in words) + 0.25 * ("answer." in words)
"""
CONFIG = """
[model]
path = "{model}"
[agent]
run = "agent.py:solve"
workers = 1
concurrency = 16
timeout_s = 300
[data]
train = "train.jsonl"
val = "val.jsonl"
[prompts.templates]
system = "You are a helper."
[optimize]
model = "scripted"
grammar = "grammar.json"
max_rollouts = 60
[algorithm]
group_size = 4
minibatches = 2
[[algorithm.schedule]]
from_step = 2
name = "random_search"
race_alpha = 0.5
[[algorithm.schedule]]
from_step = 4
name = "lightning_rl"
group_size = 4
minibatches = 1
[trainer]
steps = 4
tasks_per_step = 4
learning_rate = 1e-3
checkpoint_every = 1
[eval]
sampled = false
[engine]
learner_threads = 1
"""


@pytest.fixture
def prepared(folder: Folder, model: Path) -> Folder:
    folder.write("agent.py", AGENT)
    folder.write("run.toml", CONFIG.format(model=model))
    folder.write("grammar.json", json.dumps({"add": ["Look up all facts.", "End with the answer.", "Be polite."]}))
    for name, split, count in (("train.jsonl", "train", 12), ("val.jsonl", "test", 6)):
        tasks = rows(lookup, split, count, 0)  # type: ignore[arg-type]  # a module is a DemoTask
        folder.write(name, "".join(orjson.dumps(row).decode() + "\n" for row in tasks))
    return folder


def rows_of(metrics: Path) -> list[JSON]:
    """The rows that are whole."""
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def store_of(folder: Folder) -> LightningStore:
    return open_store(f"sqlite:///{folder.path}/runs/agl.db")


async def check(folder: Folder) -> Run:
    """What must hold of a run that has ended, killed or not."""
    async with store_of(folder) as store:
        [run] = [each for each in await store.runs() if each.state == "finished"]
        steps = await store.steps(run.id)
        assert [(step.step, step.state) for step in steps] == [(step, "closed") for step in range(1, STEPS + 1)]
        rollouts = {each.id: each for each in await store.rollouts(RolloutQuery(run_id=run.id, mode="train"))}
        consumed = Counter(each.rollout_id for step in steps for each in step.consumed)
        assert set(consumed.values()) == {1}, "each is consumed by exactly one step"
        assert set(consumed) == set(rollouts), "nothing that was sampled to learn from is lost"
        for step in steps:
            groups = {rollouts[each.rollout_id].group_id.split(":")[0] for each in step.consumed}
            assert groups == ({"optimize"} if step.step in SEARCHED else {"train"})
        trained = {each.rollout_id for step in steps for each in step.consumed if each.outcome == "trained"}
        assert any(rollouts[each].step in SEARCHED for each in trained), "the weights learn from a search's rollouts"
        await check_prompts(store, run)
        return run


async def check_prompts(store: LightningStore, run: Run) -> None:
    first = await read_candidates(store, run.id, SEARCHED[0])
    assert [each.number for each in first if each.number is not None] == list(range(len(first)))
    [newest] = [each for each in await store.resources(run.id) if each.kind == "prompt_template"]
    assert "facts." in newest.value["template"] or "answer." in newest.value["template"], (
        "the search found a better one"
    )
    policies = await store.resources(run.id, "default", latest=False)
    assert policies[0].value["prompts"] == {"system": 1}
    assert policies[-1].value["prompts"] == {"system": newest.version}, (
        "weights are stamped with the prompts they go with"
    )
    [last] = await store.steps(run.id, after=STEPS - 1)
    learned = await store.rollouts(RolloutQuery(ids=[each.rollout_id for each in last.consumed]))
    assert [dict(each.prompts) for each in learned] == [{"system": newest.version}] * TASKS * GROUP


async def test_a_schedule_searches_for_prompts_and_trains_the_weights_from_one_pool(prepared: Folder) -> None:
    done = prepared.start("train", "run.toml")
    out, err = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, out + err
    run = await check(prepared)
    metrics = rows_of(prepared.path / "runs" / run.id / "metrics.jsonl")
    by_step = {row["step"]: row for row in metrics if row["kind"] == "step"}
    assert all(by_step[step]["prompts/rollouts"] <= 60 for step in SEARCHED)
    assert by_step[4]["train/reward_mean"] > by_step[1]["train/reward_mean"]


async def test_a_search_that_is_killed_goes_on_in_its_step_and_runs_nothing_twice(prepared: Folder) -> None:
    process = prepared.start("train", "run.toml")
    runs = prepared.path / "runs"

    def searching() -> bool:
        assert process.poll() is None, process.communicate()
        return any(row["kind"] == "step" for each in runs.glob("*/metrics.jsonl") for row in rows_of(each))

    until(searching, "the first step was done", DEADLINE_S)
    async with store_of(prepared) as store:
        [run] = await store.runs()
        while len(await read_candidates(store, run.id, SEARCHED[0])) < 2:
            await store.wait(run.id, 0, 1, 0.01)
    process.kill()
    process.communicate()
    done = prepared.start("train", "--resume", run.id)
    out, err = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, out + err
    await check(prepared)
    async with store_of(prepared) as store:
        candidates = [each.number for each in await read_candidates(store, run.id, SEARCHED[0])]
    assert len(set(candidates)) == len(candidates)
