"""Rollouts with their tokens in the forms of OpenEnv and Harbor, there and back."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson
import pytest

import build
from agentlightning.adapters.trajectories import trajectories
from agentlightning.environments.packages import environment_folder
from agentlightning.errors import DataError
from agentlightning.records import Call, Finish, NewRollout, Reward, Rollout, Sampling, VersionSpan, WorkerStatus
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.traces.episodes import TraceFileReader
from agentlightning.traces.export import WRITERS, TokenTraceExport
from agentlightning.traces.importer import TraceImport
from agentlightning.training_types import Trajectory

HERE = Path(__file__).parent
SCHEMAS = {"training-trace": HERE / "training_trace_v1.schema.json", "atif": HERE / "atif_v1.8.schema.json"}
"""Of openenv 0.10.0 and harbor 0.26.0, without descriptions."""
FORMS = pytest.mark.parametrize("form", sorted(WRITERS))
ASK = {"role": "user", "content": "Where is Ana?"}
LOOKS_UP: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"who":"Ana"}'}}],
}
FOUND = {"role": "tool", "tool_call_id": "t1", "content": "Oslo"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def recorded(store: LightningStore, calls: int = 5) -> None:
    """Run "run": a rollout that looks up, answers, goes on from the look-up once more, and asks something beside it; and one
    that failed without a call."""
    await store.create_run("recorded", {}, "run")
    new = [NewRollout(run_id="run", task={"who": n}, group_id="g", replica=n, mode="train") for n in range(2)]
    await store.enqueue(new)
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    claim, failing = await store.claim(worker, limit=2)

    def said(id: str, sampled: list[int], **fields: Any) -> Call:
        numbers = [-0.1 - one / 3 for one in sampled]
        return build.call(
            claim, id, sampled_ids=sampled, logprobs=numbers, sampling=Sampling(temperature=0.7), **fields
        )

    spans = [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]
    later: dict[str, Any] = {"parent_id": "a", "suffix_ids": [30, 31], "messages": [FOUND]}
    made = [
        said("a", [7, 8], messages=[ASK], completion=LOOKS_UP, tools=TOOLS, versions=spans, finish_reason="tool_calls"),
        said("b", [9, 10, 11], **later, prompt_tokens=7, decoding={"forced": [[1, 2]]}),
        said("c", [12], **later, prompt_tokens=7, completion={"role": "assistant", "content": "It is Oslo."}),
        said("d", [13, 14], agent="summary", messages=[{**ASK, "role": "developer"}], finish_reason="length"),
        said("e", [15], parent_id="b", suffix_ids=[5], prompt_tokens=11, messages=[ASK], delivered=False),
    ]
    await store.append_calls(made[:calls])
    rewards = (
        build.reward(claim, 0.25, "r1", name="reward", call_id="b", source="emitted"),
        build.reward(claim, 0.125, "r2", name="speed", source="emitted"),
        build.reward(claim, 0.75, "r3"),
    )
    await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=rewards if calls else rewards[1:])])
    await store.finish([Finish(lease=failing.lease, state="failed", error="no luck")])


async def exported(store: LightningStore, form: str, file: Path, run: str = "run") -> TokenTraceExport:
    done = TokenTraceExport(store=store, run_id=run, form=form)
    write(file, [row async for row in done.rows()])
    return done


def write(file: Path, rows: list[Any]) -> None:
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


async def imported(store: LightningStore, file: Path) -> tuple[Rollout, list[Call], list[Reward]]:
    await TraceImport(store=store, run_id="copy").read([file], "copy", lambda _: None)
    [rollout] = await store.rollouts(RolloutQuery(run_id="copy"))
    return rollout, await store.calls([rollout.id]), await store.rewards([rollout.id])


def learned(rollout: Rollout, calls: list[Call], rewards: list[Reward]) -> Trajectory:
    """What is trained on, under names that two runs share."""
    [found], _ = trajectories([rollout], calls, rewards)
    names = {call.id: chr(ord("a") + place) for place, call in enumerate(calls)}
    renamed = [replace(one, call_id=names[one.call_id], parent=None) for one in found.transitions]
    return replace(found, rollout_id="", group_id="", transitions=renamed)


@FORMS
async def test_a_rollout_that_is_exported_and_recorded_again_trains_on_the_same_numbers(
    store: LightningStore, tmp_path: Path, form: str
) -> None:
    await recorded(store)
    file = tmp_path / "rows.jsonl"
    done = await exported(store, form, file)
    assert done.left_out == {"it has no call": 1}
    rollout, calls, rewards = await imported(store, file)
    [original] = await store.rollouts(RolloutQuery(run_id="run", states=["succeeded"]))
    before = await store.calls([original.id])
    places = {one.id: place for own in (before, calls) for place, one in enumerate(own)}
    for old, new in zip(before, calls, strict=True):
        for name in (
            "suffix_ids",
            "sampled_ids",
            "logprobs",
            "versions",
            "prompt_tokens",
            "policy",
            "model",
            "sampling",
        ):
            assert getattr(new, name) == getattr(old, name), (old.id, name)
        for name in (
            "messages",
            "completion",
            "tools",
            "agent",
            "finish_reason",
            "delivered",
            "decoding",
            "started_ns",
        ):
            assert getattr(new, name) == getattr(old, name), (old.id, name)
        assert places.get(new.parent_id or "") == places.get(old.parent_id or "")
    assert learned(rollout, calls, rewards) == learned(original, before, await store.rewards([original.id]))
    assert (rollout.task, rollout.mode, rollout.reward) == (original.task, "train", 0.75)
    again = tmp_path / "again.jsonl"
    await exported(store, form, again, "copy")
    await TraceImport(store=store, run_id="third").read([again], "third", lambda _: None)
    [third] = await store.rollouts(RolloutQuery(run_id="third"))
    assert learned(third, await store.calls([third.id]), await store.rewards([third.id])) == learned(
        rollout, calls, rewards
    )


@FORMS
async def test_rows_are_of_the_schema_of_the_form_s_own_package(
    store: LightningStore, tmp_path: Path, form: str
) -> None:
    await recorded(store)
    await exported(store, form, tmp_path / "rows.jsonl")
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    schema = json.loads(SCHEMAS[form].read_text())
    jsonschema_rs.validate(schema, row)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, {**row, "reward": 1.0})


CHECKS = {
    "atif": "\nfrom harbor.models.trajectories.trajectory import Trajectory as Model",
    "training-trace": """
import types
for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
    sys.modules[name] = types.ModuleType(name)  # its own imports a server
    sys.modules[name].__path__ = [sys.argv[2] + "/" + name.replace(".", "/")]
from openenv.core.harness.training import TrainingTrace as Model
""",
}


@pytest.mark.slow
@FORMS
async def test_the_form_s_own_package_reads_the_rows(store: LightningStore, tmp_path: Path, form: str) -> None:
    environments = [HERE.parents[1] / name for name in (".venv-openenv", ".venv-clients-openenv")]
    package, where = (
        ("openenv", environments) if form == "training-trace" else ("harbor", [environment_folder("harbor")])
    )
    found = [path.parent for one in where for path in one.glob(f"lib/python3*/site-packages/{package}")]
    if not found:
        pytest.skip(f"{package} is not installed")
    await recorded(store)
    await exported(store, form, tmp_path / "rows.jsonl")
    python = sys.executable if form == "training-trace" else str(found[0].parents[2] / "bin" / "python")
    program = f"import sys{CHECKS[form]}"
    program += "\nfor line in open(sys.argv[1]): print(len(Model.model_validate_json(line).model_dump_json()) > 100)"
    command = [python, "-c", program, str(tmp_path / "rows.jsonl"), str(found[0])]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def turn(**changes: Any) -> dict[str, Any]:
    """As OpenEnv captures one."""
    given: dict[str, Any] = {
        "node_id": "n1",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4],
        "per_token_logps": [-0.5, -1.5],
        "loss_mask": [0, 0, 0, 1],
        "request": {"messages": [ASK], "tools": None},
        "response": {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]},
        "metadata": {"model": "m", "sampling_params": {"temperature": 0.5}},
    }
    return {**given, **changes}


async def test_a_trace_that_openenv_captured_keeps_its_mask_temperature_and_graph(
    store: LightningStore, tmp_path: Path
) -> None:
    second = turn(node_id="n2", prompt_token_ids=[1, 2, 3, 4, 5], loss_mask=[0] * 5 + [1, 1])
    (tmp_path / "trace.json").write_text(json.dumps({"schema_version": 1, "turns": [turn(), second]}))
    rollout, (first, next_), _ = await imported(store, tmp_path / "trace.json")
    assert (first.decoding, first.sampling.temperature, first.policy) == ({"forced": [[0, 1]]}, 0.5, "default")
    assert (next_.parent_id, next_.suffix_ids, next_.decoding) == (first.id, [5], {})
    assert (rollout.task, rollout.reward) == ({"messages": [ASK]}, None)


async def test_a_trajectory_of_harbor_without_tokens_is_text(store: LightningStore, tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "Where is Ana?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "t1", "function_name": "look", "arguments": {"who": "Ana"}}],
            "observation": {"results": [{"source_call_id": "t1", "content": "Oslo"}]},
        },
        {"step_id": 3, "source": "agent", "message": "Oslo", "metrics": {"prompt_tokens": 5}},
        {"step_id": 4, "source": "agent", "message": "copied", "is_copied_context": True},
    ]
    row = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1", "model_name": "m"}, "steps": steps}
    (tmp_path / "trajectory.json").write_text(json.dumps(row))
    _, (first, second), _ = await imported(store, tmp_path / "trajectory.json")
    assert (first.protocol, first.policy, first.messages) == ("trace", "", [ASK])
    assert first.completion["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"who": "Ana"}'}
    assert (second.parent_id, second.messages) == (first.id, [FOUND])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"per_token_logps": [-0.5]}, "as many log-probabilities and masks as completion ids; got 2 prompt ids, 2"),
        ({"completion_token_ids": ["a", "b"]}, "n1: expected completion ids as a list of numbers"),
        ({"loss_mask": None}, "turns[0]: expected prompt_token_ids and loss_mask as lists"),
        ({"prompt_token_ids": [], "loss_mask": [0, 1]}, "expected a prompt"),
    ],
)
def test_a_turn_that_is_not_of_the_contract_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps({"turns": [turn(**change)]}) + "\n")
    with pytest.raises(DataError, match=re.escape(sentence)):
        list(TraceFileReader(tmp_path / "trace.jsonl"))
