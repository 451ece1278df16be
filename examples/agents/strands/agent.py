# An agent of Strands as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install "strands-agents[openai]"
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


@tool
def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


agent = Agent(OpenAIModel(model_id=os.environ["AGL_MODEL"]), tools=[population], callback_handler=None)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
try:
    answer = str(agent(task["question"], limits={"turns": 4}))
except MaxTokensReachedException:
    answer = ""  # the completion was cut at the limit: a mistake of the model
print(json.dumps({"reward": float(task["answer"] in answer)}))
