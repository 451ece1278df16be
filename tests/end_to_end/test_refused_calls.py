"""An agent whose model call is refused, as the command line tells of it."""

from __future__ import annotations

import pytest
from command_line import Folder

from agentlightning.demo import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[model]
path = "model"
[agent]
run = "agent.py:solve"
workers = 1
[data]
train = "tasks.jsonl"
"""
AGENT = """
async def solve(task, llm):
    import openai
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages = [{"role": "user", "content": task["question"]}]
    await client.chat.completions.create(model=llm.model, messages=messages, extra_body={"top_a": 0.5})
    return 1.0
"""


def test_a_check_says_which_field_was_refused_before_anything_else(folder: Folder) -> None:
    tiny_model.build(folder.path / "model", ["one"], hidden=32, layers=1, context=64)
    folder.write("train.toml", CONFIG)
    folder.write("agent.py", AGENT)
    folder.write("tasks.jsonl", '{"question": "one"}\n')
    done = folder.run("check", "train.toml", "--store", "memory://")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("error: the agent failed on the first task: ")
    assert error.endswith("1 call refused: top_a 1")
