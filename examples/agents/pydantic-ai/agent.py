# An agent of Pydantic AI as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install "pydantic-ai-slim[openai]"
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}
agent = Agent(OpenAIChatModel(os.environ["AGL_MODEL"]))


@agent.tool_plain
def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
try:
    answer = agent.run_sync(task["question"], usage_limits=UsageLimits(request_limit=4)).output
except (UnexpectedModelBehavior, UsageLimitExceeded):
    answer = ""  # a tool that does not exist, arguments that never fit, too many turns: mistakes of the model
print(json.dumps({"reward": float(task["answer"] in answer)}))
