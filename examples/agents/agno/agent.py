# An agent of Agno as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install agno openai
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.run import RunStatus

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


class Limited(OpenAIChat):
    """Is asked four times in a run: Agno goes on as long as the model calls tools."""

    left = 4

    def invoke(self, *args, **options):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("too many turns")
        return super().invoke(*args, **options)


agent = Agent(
    model=Limited(id=os.environ["AGL_MODEL"]),
    tools=[population],
    telemetry=False,
)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
end = agent.run(task["question"])
if end.status == RunStatus.error and agent.model.left >= 0:  # a call failed, which Agno does not raise
    raise RuntimeError(end.content)
answer = end.content or ""
print(json.dumps({"reward": float(task["answer"] in answer)}))
