# An agent of Google ADK as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install google-adk litellm mcp
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import asyncio
import json
import os
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city."""
    return POPULATION.get(city, "error: no such city")


agent = LlmAgent(
    name="clerk",
    model=LiteLlm("openai/" + os.environ["AGL_MODEL"]),
    tools=[population],
)


async def ask(question: str) -> str:
    runner = InMemoryRunner(agent)
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    limits = RunConfig(max_llm_calls=4)
    answer = ""
    run = runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=limits)
    try:
        async for event in run:
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or [])
    except (LlmCallsLimitExceededError, ValueError):
        return ""  # too many turns, a tool that does not exist: mistakes of the model
    return answer


task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
print(json.dumps({"reward": float(task["answer"] in asyncio.run(ask(task["question"])))}))
