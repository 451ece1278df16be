# An agent of Instructor as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install instructor
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import APIError, OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


client = instructor.from_openai(OpenAI())
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
messages = [{"role": "user", "content": task["question"]}]
try:
    found = client.create(model=os.environ["AGL_MODEL"], messages=messages, response_model=City, max_retries=1)
    reward = float(str(found.people) == task["answer"])
except (InstructorRetryException, IncompleteOutputException) as error:
    if isinstance(error.__cause__, APIError):
        raise  # a call failed: no mistake of the model
    reward = 0.0  # no object that fits, after its tries: a mistake of the model
print(json.dumps({"reward": reward}))
