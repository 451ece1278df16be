"""A policy from somebody's own demonstrations: what a file must hold, what is chosen from it, what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.demo import imitation, tasks
from agentlightning.errors import DataError
from build import learner_setup


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demonstration(content: Any = "Oslo", role: str = "assistant", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Where?"}, {"role": role, "content": content, **fields}]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "row 2: field 'messages' is missing"),
        ({"messages": "a"}, "row 2: messages: expected a list"),
        (demonstration(role="bot"), r"row 2: messages\[1\].role: expected one of user, assistant, tool, system"),
        (demonstration(content=None), r"row 2: messages\[1\].content: expected text"),
        (demonstration(content=None, tool_calls=[{}]), "write a tool call as text, which the agent reads"),
        (demonstration(role="user"), "row 2: messages: none has the role assistant"),
        (demonstration(), "holds 2 demonstrations; expected at least 50"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_file_row_and_field(tmp_path: Path, row: Any, says: str):
    with pytest.raises(DataError, match=f"demos.jsonl.*{says}"):
        imitation.read_demonstrations(write(tmp_path / "demos.jsonl", [demonstration(), row]))


def test_a_line_that_is_no_json_is_named(tmp_path: Path):
    (tmp_path / "demos.jsonl").write_text('{"messages": []}\n{\n')
    with pytest.raises(DataError, match=r"demos.jsonl, line 2: not JSON"):
        imitation.read_demonstrations(tmp_path / "demos.jsonl")


@pytest.mark.slow
def test_a_policy_is_made_from_demonstrations_and_its_size_and_rate_are_chosen_from_them(tmp_path: Path):
    demos, _ = tasks.demonstrations(tasks.load("lookup"), 120, seed=0)
    told: list[Any] = []

    read = imitation.read_demonstrations(write(tmp_path / "demos.jsonl", [{"messages": demo} for demo in demos]))
    facts = imitation.make_policy(read, tmp_path / "model", seed=0, threads=1, report=told.append)

    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["parameters"] < 300_000
    assert len(tokenizer.encode("<find></find>")) == 2  # tags that the assistant writes are one token each
    assert facts["learning_rate"] in imitation.LEARNING_RATES
    assert {row["phase"] for row in told} == {"warm start", *(f"learning rate {r:g}" for r in imitation.LEARNING_RATES)}
    rows = imitation.encode_all(tmp_path / "model", read)
    assert facts["context"] >= max(len(tokens) for tokens, _ in rows)
    assert facts["heldout_loss"] < 2.0


@pytest.mark.slow
@pytest.mark.long
def test_the_weights_that_did_best_on_what_is_held_out_are_kept(tmp_path: Path):
    demos, _ = tasks.demonstrations(tasks.load("lookup"), 100, seed=0)
    imitation.make_policy(demos, tmp_path, seed=1, threads=1, report=lambda _: None)
    learner = imitation.Learner(tmp_path, learner_setup(threads=1))
    rows = imitation.encode_all(tmp_path, demos)

    best = imitation.imitate(
        tmp_path,
        imitation.batches(rows[20:], 0),
        imitation.Imitation(steps=40, learning_rate=0.1),
        held_out=rows[:20],
        keep=False,
    )

    unchanged = imitation.heldout_loss(imitation.Learner(tmp_path, learner_setup(threads=1)), rows[:20])
    assert unchanged == imitation.heldout_loss(learner, rows[:20])
    assert best > unchanged
