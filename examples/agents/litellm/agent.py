# An agent of LiteLLM as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install litellm
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "population",
            "description": "How many people live in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def population(arguments: str) -> str:
    try:
        return POPULATION.get(json.loads(arguments)["city"], "error: no such city")
    except (ValueError, KeyError, TypeError):
        return 'error: expected {"city": "…"}'  # the model wrote them: anything may stand there


task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
messages = [{"role": "user", "content": task["question"]}]
answer = ""
for _ in range(4):
    reply = litellm.completion("openai/" + os.environ["AGL_MODEL"], messages, tools=TOOLS)
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        answer = message.content or ""
        break
    for call in message.tool_calls:
        result = population(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(json.dumps({"reward": float(task["answer"] in answer)}))
