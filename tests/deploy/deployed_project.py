"""A project that tests of deployments write files for, and its configurations."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
[model]
path = "Qwen/Qwen2.5-0.5B-Instruct"
[agent]
run = "agent.py:solve"
reward = "reward.py:score"
[data]
train = "train.jsonl"
val = "heldout.jsonl"
"""
VLLM = """
[engine.sampler]
type = "vllm"
python = "vllm-env/bin/python"
[external.judge]
url = "https://api.openai.com/v1"
models = ["gpt-*"]
key_env = "OPENAI_API_KEY"
"""
VERL = """
[engine]
name = "verl"
[trainer]
trackers = ["wandb"]
checkpoint_url = "s3://bucket/runs"
"""
CONFIGS = {"local": CONFIG, "vllm": CONFIG + VLLM, "verl": CONFIG + VERL}


def make_project(folder: Path, config: str = CONFIG) -> Path:
    """A project with a requirements file; returns its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text("async def solve(task, llm): ...\n")
    (folder / "reward.py").write_text("def score(task, result): return 1.0\n")
    (folder / "requirements.txt").write_text("httpx>=0.27\n")
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text('{"question": "one"}\n')
    file = folder / "train.toml"
    file.write_text(config)
    return file
