# An agent of CAMEL as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install camel-ai
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import json
import os
from pathlib import Path

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


def population(city: str) -> str:
    """How many people live in a city.

    Args:
        city (str): The city's name.
    """
    return POPULATION.get(city, "error: no such city")


class CharacterCounter(BaseTokenCounter):
    """CAMEL counts tokens to cut long histories, with a vocabulary that it downloads; here, four characters are one."""

    def count_tokens_from_messages(self, messages: list) -> int:
        return len(str(messages)) // 4

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


model = ModelFactory.create(
    ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    os.environ["AGL_MODEL"],
    url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    token_counter=CharacterCounter(),
)
agent = ChatAgent("You look numbers up.", model=model, tools=[FunctionTool(population)], max_iteration=4)
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
reply = agent.step(task["question"])
answer = reply.msgs[0].content if reply.msgs else ""
print(json.dumps({"reward": float(task["answer"] in (answer or ""))}))
