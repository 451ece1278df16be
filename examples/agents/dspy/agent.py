# An agent of DSPy as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install dspy
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import dspy
from dspy.utils.exceptions import AdapterParseError

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


dspy.configure(lm=dspy.LM("openai/" + os.environ["AGL_MODEL"], cache=False))
program = dspy.ReAct("question -> answer", tools=[population], max_iters=3)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
try:
    answer = program(question=task["question"]).answer or ""
except AdapterParseError:
    answer = ""  # the completion has not the fields of the signature: a mistake of the model
print(json.dumps({"reward": float(task["answer"] in answer)}))
