# An agent of Semantic Kernel as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install semantic-kernel
#   agl train --agent "agent-venv/bin/python agent.py" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
import asyncio
import json
import os
from pathlib import Path

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function

POPULATION = {"Oslo": "717710", "Bergen": "291940", "Bodø": "53712"}


class Cities:
    @kernel_function(description="How many people live in a city.")
    def population(self, city: str) -> str:
        return POPULATION.get(city, "error: no such city")


service = OpenAIChatCompletion(ai_model_id=os.environ["AGL_MODEL"], async_client=AsyncOpenAI())
choice = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=3)
settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=choice)
agent = ChatCompletionAgent(service=service, plugins=[Cities()], arguments=KernelArguments(settings=settings))
task = json.loads(Path(os.environ["AGL_TASK"]).read_text())
answer = str(asyncio.run(agent.get_response(task["question"])).content)
print(json.dumps({"reward": float(task["answer"] in answer)}))
