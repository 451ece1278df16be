"""The examples' path for real models, `pretrained.toml --model NAME`, on a model that only looks like a real one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HERE = {
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "trainer.steps": 2,
    "trainer.tasks_per_step": 2,
    "algorithm.group_size": 2,
    "model.max_tokens": 64,
    "eval.tasks": 4,
}
"""What a test needs changed."""


def tool(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def text(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SAYS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "calculator": (
        "tool",
        [call("calculate", expression="3 + 4"), text("Answer: 7")],
        [tool("calculate", "expression")],
    ),
    "text_to_sql": ("user", [text("```sql\nselect 1\n```"), text("RIGHT, it does.")], None),
    "rag": ("tool", [call("search", query="Paris"), text("Answer: Paris")], [tool("search", "query")]),
}
"""Who answers the model's first message, the messages that it is taught, and its tools."""


@pytest.mark.slow
@pytest.mark.skipif("AGL_DATA" not in os.environ, reason="AGL_DATA names no data")
@pytest.mark.parametrize(
    "example", ["text_to_sql", *(pytest.param(each, marks=pytest.mark.long) for each in ("calculator", "rag"))]
)
def test_a_model_with_a_real_chat_template_is_trained_through_what_it_is_answered(example: str, tmp_path: Path) -> None:
    from small_qwen import write_small_qwen  # here, since it loads torch

    role, answers, tools = SAYS[example]
    with gzip.open(Path(os.environ["AGL_DATA"], "math", "gsm8k_train.jsonl.gz"), "rt") as lines:
        texts = (json.loads(line)["question"] for line in lines)
        conversations = [
            [
                *([{"role": "system", "content": next(texts)}] * (number % 3 > 0)),
                {"role": "user", "content": next(texts)},
                answers[0],
                {"role": role, "content": next(texts)[: number % 12]},
                answers[1],
            ]
            for number in range(48)
        ]
    write_small_qwen(tmp_path / "small-qwen", conversations, tools)
    command = [sys.executable, "-m", "agentlightning", "train", str(EXAMPLES / example / "pretrained.toml")]
    command += ["--model", str(tmp_path / "small-qwen"), "--store", f"sqlite:///{tmp_path}/agl.db"]
    command += [word for name, value in HERE.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/failed"] == 0 and row["rollout/forked_calls"] == 0 for row in steps)
    assert all(row["rollout/calls"] > row["rollout/count"] for row in steps), (
        "the agent understood the model, and answered"
    )
    if example == "text_to_sql":  # writer and rewriter are trained, calls of the checker are context
        assert all(row["rollout/calls"] > row["rollout/turns"] * row["rollout/count"] for row in steps)
