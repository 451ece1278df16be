"""Real traces: 180 of seven frameworks, 2,068 SQL episodes, rollouts of NeMo Gym, cached chat completions.

They are read from AGL_DATA; where it is absent, excerpts that are made here in the same shapes have to do.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from span_samples import ROLLOUT

from agentlightning.adapters.episodes import Episode, episodes_of_row
from agentlightning.adapters.model_records import call_records, conversations
from agentlightning.adapters.semantics import role_of
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.adapters.spans import tool_uses
from agentlightning.records import JSON

FOLDER = Path(os.environ.get("AGL_DATA", "/nonexistent")) / "traces"
real = pytest.mark.skipif(not FOLDER.is_dir(), reason="AGL_DATA is not set")


def rows(name: str) -> list[Any]:
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def read(name: str) -> list[tuple[JSON, list[Episode]]]:
    return [(row, found) for row in rows(name) if (found := episodes_of_row(row)) is not None]


@real
def test_every_trace_of_seven_frameworks_gives_its_calls_tools_and_agents() -> None:
    found = read("any_agent_otel")
    assert len(found) == 180
    told: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row, [episode] in found:
        count = told[row["framework"], row["format"]]
        spans = episode.spans
        given = row["trace"] if isinstance(row["trace"], list) else row["trace"]["spans"]
        assert len(spans) == len({one["context"]["span_id"] for one in given})  # one was exported twice
        assert (
            len(tool_uses(SpanTree(spans))) == sum(role_of(span) == "tool" for span in spans) > 0
            or row["framework"] != "OPENAI"
        )
        count["traces"] += 1
        for call in episode.calls:
            count["calls"] += 1
            count["mended"] += call.mended
            count["usable"] += call.missing is None
            count["with agent"] += call.agent is not None
            assert call.model
            if call.missing is None:
                assert call.messages is not None
                assert call.messages[-1]["role"] in ("user", "tool", "system", "assistant")
    usable = {name: count["usable"] / count["calls"] for name, count in told.items()}
    assert all(share == 1.0 for (_, form), share in usable.items() if form == "openinference")
    assert (
        min(share for (_, form), share in usable.items() if form == "gen_ai") > 0.7
    )  # LlamaIndex: no results of tools
    total = sum((count for count in told.values()), Counter[str]())
    assert (total["traces"], total["calls"], total["usable"], total["mended"]) == (180, 579, 508, 311)
    # one framework alone names no agent: LlamaIndex under OpenInference
    assert {name for name, count in told.items() if count["with agent"] < count["calls"]} == {
        ("LLAMA_INDEX", "openinference")
    }


@real
def test_calls_recorded_by_three_layers_of_a_framework_are_counted_once() -> None:
    for row, [episode] in read("any_agent_otel"):
        if (row["framework"], row["format"]) == ("SMOLAGENTS", "openinference"):
            assert len(episode.calls) == 3
            assert sum(role_of(span) == "model" for span in episode.spans) == 9
            assert all(
                call.completion["tool_calls"][0]["function"]["arguments"] != "{}"
                for call in episode.calls
                if call.completion
            )


@real
def test_parents_that_were_never_exported_do_not_cost_the_agents_name() -> None:
    orphans = 0
    for row, [episode] in read("any_agent_otel"):
        tree = SpanTree(episode.spans)
        lost = [span for span in tree.spans if span.parent_id is not None and tree.parent(span) is None]
        orphans += len(lost)
        if row["framework"] == "GOOGLE":
            assert all(tree.agent(span) == "any_agent" for span in lost)
    assert orphans > 100


@real
def test_the_answer_of_a_trace_is_the_one_that_its_framework_returned() -> None:
    same = several = 0
    for row, [episode] in read("any_agent_otel"):
        final = row["trace"].get("final_output") if isinstance(row["trace"], dict) else None
        last = episode.calls[-1].completion if episode.calls else None
        if isinstance(final, str) and last is not None and not last.get("tool_calls"):
            several += 1
            same += final.strip() in str(last["content"]).strip()
    assert several > 40
    assert same / several > 0.95


@real
def test_every_sql_episode_has_a_reward_for_each_turn() -> None:
    found = read("intercode_sql")
    assert len(found) == 2068
    for row, [episode] in found:
        assert [call.completion["content"] for call in episode.calls if call.completion] == row["turn_history"][
            "actions"
        ]
        assert len(episode.steps) == len(episode.calls)
        assert episode.reward == row["summary"]["max_reward"]
        assert len(call_records(episode.calls, ROLLOUT, 1, str)) == len(episode.calls)
    tasks = {json.dumps(episode.task) for _, [episode] in found}
    assert len(tasks) < 1100  # two models were asked most of the questions: pairs for preferences


@real
def test_every_rollout_of_nemo_gym_keeps_its_turns_tools_and_reward() -> None:
    found = read("nemo_gym_rollouts")
    assert len(found) == 60
    for row, [episode] in found:
        assert episode.reward == row["reward"]
        asked = sum(item["type"] == "function_call" for item in row["response"]["output"])
        told = sum(len(call.completion.get("tool_calls") or ()) for call in episode.calls if call.completion)
        assert told == asked
        if asked:
            assert episode.calls[0].tools


@real
def test_every_cached_chat_completion_is_a_call_with_its_tools() -> None:
    found = read("agl_prompt_caches")
    assert len(found) == 32
    assert all(len(found) == 1 and found[0].calls[0].missing is None for _, found in found)
    assert sum(bool(episodes[0].calls[0].tools) for _, episodes in found) == 17


@real
@pytest.mark.parametrize("name", ["any_agent_otel", "intercode_sql", "nemo_gym_rollouts", "agl_prompt_caches"])
def test_records_of_real_calls_rebuild_their_prompts(name: str) -> None:
    for _, episodes in read(name):
        for episode in episodes:
            usable = [call for call in episode.calls if call.missing is None]
            records = call_records(usable, ROLLOUT, 1, lambda place: f"{place:05}")
            told = [row["messages"][-1] for row in conversations(records)]
            assert all(answer["role"] == "assistant" for answer in told)
            assert len(records) == len(usable)


def test_excerpts_in_the_shapes_of_real_traces_are_read() -> None:
    """Of any-agent's dumps: ids as integers, a parent that never came, messages of the first call alone, a root without
    end."""

    def span(number: int, parent: int | None, start: int, end: int | None, **attributes: Any) -> JSON:
        return {
            "name": "x",
            "context": {"trace_id": 29058251178970396048731401614503366582, "span_id": number},
            "kind": "internal",
            "parent": {"trace_id": None, "span_id": parent},
            "start_time": start,
            "end_time": end,
            "status": {"status_code": "ok", "description": None},
            "attributes": {key.replace("__", "."): value for key, value in attributes.items()},
            "events": [],
        }

    ask = json.dumps([{"role": "user", "content": "Which year?"}])
    spans = [
        span(11, 5, 10, 20, gen_ai__operation__name="call_llm", gen_ai__request__model="m", gen_ai__input__messages=ask,
             gen_ai__output='[{"tool.name": "clock", "tool.args": {}}]'),
        span(12, 6, 21, 22, gen_ai__operation__name="execute_tool", gen_ai__tool__name="clock", gen_ai__output="2025"),
        span(13, 5, 23, 30, gen_ai__operation__name="call_llm", gen_ai__request__model="m", gen_ai__output="It is 2025."),
        span(10, None, 1, None, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="any_agent"),
    ]  # fmt: skip
    [episode] = episodes_of_row({"trace": {"spans": spans, "final_output": "It is 2025."}}) or []
    assert [(call.agent, call.mended, call.missing) for call in episode.calls] == [
        ("any_agent", False, None),
        ("any_agent", True, None),
    ]
    assert episode.output == "It is 2025."
