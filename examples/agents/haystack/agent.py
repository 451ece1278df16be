# An agent of Haystack as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install haystack-ai
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path
from typing import Annotated

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


@tool
def population(city: Annotated[str, "the city's name"]) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


generator = OpenAIChatGenerator(model=os.environ["AGL_MODEL"], api_base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(chat_generator=generator, tools=[population], max_agent_steps=4)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
end = agent.run(messages=[ChatMessage.from_user(task["question"])])
answer = end["messages"][-1].text or ""
print(json.dumps({"reward": float(task["answer"] in answer)}))
