"""Prompts reach agents that ask for them, and programs by their environment, in the versions of their rollout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runner_bench import Bench

import agentlightning as agl
from agentlightning.errors import InputError
from agentlightning.prompts.templates import Template
from agentlightning.records import JSON, Resource
from agentlightning.runner.agent import LLM
from agentlightning.store.scan import read_feedback


async def put(bench: Bench, *texts: str, name: str = "system", format: Any = None) -> None:
    values = [Template.of(text, format).value() for text in texts]
    await bench.store.put_resources(
        [Resource(run_id=bench.run_id, name=name, kind="prompt_template", value=value) for value in values]
    )


async def test_a_function_agent_has_the_versions_that_its_rollout_began_with(bench: Bench) -> None:
    await put(bench, "first {question}")
    seen: list[object] = []

    async def solve(task: JSON, llm: LLM) -> float:
        await put(bench, f"later {len(seen)} {{question}}")
        seen.append((llm.prompt("system"), agl.prompt("system", question="x")))
        if len(seen) == 1:
            raise RuntimeError("once more")
        return 1.0

    [queued] = await bench.enqueue({"question": "who?"}, max_attempts=2)
    async with bench.worker(solve):
        [done] = await bench.settled([queued])
    assert (done.state, done.attempt, done.prompts) == ("succeeded", 2, {"system": 1})
    assert seen == [("first who?", "first x")] * 2
    [following] = await bench.enqueue({"question": "who?"})
    async with bench.worker(lambda task, llm: float(llm.prompt("system") == "later 1 who?")):
        [done] = await bench.settled([following])
    assert (done.reward, done.prompts) == (1.0, {"system": 3})


async def test_a_program_finds_its_prompts_and_the_runs_external_model_in_its_environment_and_prints_feedback(
    bench: Bench, tmp_path: Path
) -> None:
    hosted = {"url": "http://127.0.0.1:9/v1", "models": ["*-5", "small-1"]}
    config = {"model": {"path": "external:hosted"}, "external": {"hosted": hosted}}
    bench.run_id = (await bench.store.create_run("hosted", config)).id
    await put(bench, "{% for each in items %}{{ each }};{% endfor %}", format="jinja")
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os\nfound = os.environ['AGL_PROMPT_SYSTEM'], os.environ['AGL_MODEL']\n"
        "print(json.dumps({'reward': float(found == ('a;b;', 'small-1')), 'feedback': 'right'}))\n"
    )
    [queued] = await bench.enqueue({"items": ["a", "b"]})
    bench.worker_process("--command", f"{sys.executable} {program}")
    [done] = await bench.settled([queued])
    assert (done.state, done.reward) == ("succeeded", 1.0)
    assert await read_feedback(bench.store, [done]) == ["right"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (Template.of("{schema}").value(), "placeholder 'schema': expected a field of this name"),
        (json.loads('{"format": "jinja", "template": "{{ a"}'), "template: line 1: unexpected end of template"),
    ],
)
async def test_a_prompt_that_cannot_be_rendered_fails_the_attempt_with_its_name(
    bench: Bench, value: Any, sentence: str
) -> None:
    await bench.store.put_resources([Resource(run_id=bench.run_id, name="s", kind="prompt_template", value=value)])
    [done] = await bench.solved(lambda task, llm: llm.prompt("s"), {})
    assert f"prompt 's', version 1: {sentence}" in str(done.error)


async def test_what_is_kept_from_agents_is_in_neither_their_task_nor_their_prompts_and_reaches_the_reward(
    bench: Bench,
) -> None:
    await put(bench, "{question}")
    await put(bench, "It is {answer}.", name="leaking")
    seen: list[object] = []

    async def solve(task: JSON, llm: LLM) -> str:
        seen.append((task, llm.prompt("system"), agl.prompt("system")))
        with pytest.raises(InputError, match="answer"):
            llm.prompt("leaking")
        return "42"

    def score(task: JSON, result: agl.RolloutResult) -> bool:
        return bool(task["answer"] == result.output)

    [done] = await bench.solved(solve, {"question": "6 x 7?", "answer": "42"}, reward=score, private=["answer"])
    assert (done.state, done.reward, done.error) == ("succeeded", 1.0, None)
    assert seen == [({"question": "6 x 7?"}, "6 x 7?", "6 x 7?")]
