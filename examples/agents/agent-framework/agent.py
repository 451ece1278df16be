# An agent of Microsoft Agent Framework as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install agent-framework-openai
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import asyncio
import json
import os
from pathlib import Path

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


client = OpenAIChatCompletionClient(os.environ["AGL_MODEL"])
client.function_invocation_configuration["max_iterations"] = 3
agent = Agent(client, tools=[population])
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
answer = asyncio.run(agent.run(task["question"])).text
print(json.dumps({"reward": float(task["answer"] in answer)}))
