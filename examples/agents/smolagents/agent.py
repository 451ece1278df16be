# An agent of smolagents as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install "smolagents[openai]"
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

from smolagents import ActionStep, CodeAgent, OpenAIModel, tool
from smolagents.models import REMOVE_PARAMETER

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


@tool
def population(city: str) -> str:
    """How many people live in a city.

    Args:
        city: Name of the city.
    """
    return POPULATION.get(city, "error: no such city")


def keep_as_said(step, agent):
    if step.model_output_message is not None:  # the call went well
        step.model_output = step.model_output_message.raw.choices[0].message.content
    step.tool_calls = None


model = OpenAIModel(os.environ["AGL_MODEL"], stop=REMOVE_PARAMETER)
agent = CodeAgent([population], model, max_steps=4, verbosity_level=0, step_callbacks={ActionStep: keep_as_said})
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
answer = agent.run(task["question"])
print(json.dumps({"reward": float(task["answer"] in str(answer))}))
