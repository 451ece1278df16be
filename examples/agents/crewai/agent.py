# An agent of CrewAI as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install crewai
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


@tool
def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


llm = LLM(model=os.environ["AGL_MODEL"], provider="openai")
clerk = Agent(
    role="clerk",
    goal="Answer questions about cities.",
    backstory="You look numbers up.",
    tools=[population],
    llm=llm,
    max_iter=4,
)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
work = Task(description=task["question"], expected_output="The number.", agent=clerk)
try:
    answer = Crew(agents=[clerk], tasks=[work]).kickoff().raw
except ValueError:
    answer = ""  # CrewAI raises it when the model says nothing at all: a mistake of the model
print(json.dumps({"reward": float(task["answer"] in answer)}))
