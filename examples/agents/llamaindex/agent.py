# An agent of LlamaIndex as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install llama-index-core llama-index-llms-openai-like
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import asyncio
import json
import os
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


llm = OpenAILike(
    model=os.environ["AGL_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
)


async def solve(question: str) -> str:
    agent = FunctionAgent(tools=[population], llm=llm)
    try:
        return str(await agent.run(question, max_iterations=4))
    except WorkflowRuntimeError:
        return ""  # too many turns: a mistake of the model


task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
answer = asyncio.run(solve(task["question"]))
print(json.dumps({"reward": float(task["answer"] in answer)}))
