"""A model by hub name, all the way to an answer: every process has to find the files that the name stands for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
model.path = "org/tiny"
agent.run = "agent.py:solve"
agent.workers = 1
data.train = "tasks.jsonl"
"""

AGENT = """
from openai import AsyncOpenAI

async def solve(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages = [{"role": "user", "content": task["question"]}]
    await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=3)
    return 1.0
"""


@pytest.mark.slow
def test_a_model_in_the_hubs_cache_answers_under_its_name(tmp_path: Path) -> None:
    from agentlightning.demo import tiny_model
    from agentlightning.engines.local.model import settle

    cached = tmp_path / "hub" / "models--org--tiny"
    tiny_model.build(cached / "snapshots" / "1", ["a question", "an answer"], seed=0, special_words=("<a>", "</a>"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a question"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "check", "train.toml", "--store", "memory://"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: model.path org/tiny: no such folder here; asking the Hugging Face hub" in done.stdout
    assert "chosen: trainer.learning_rate = 1e-05 (lightning_rl of all weights, " in done.stdout
    assert re.findall(r"device (\S+) \(auto\)", done.stdout) == [settle("auto", "auto").device]
    shown, _, json_line = done.stdout.rstrip().rpartition("\n")
    assert "starting: sampler\n" in shown
    assert [path.name for path in tmp_path.glob("runs/*/logs/*r.log") if "learner" in path.name] == []
    facts = json.loads(json_line)
    assert (facts["calls"], facts["reward"]) == (1, 1.0)
