"""An AutoGen agent that solves word problems with a calculator. It knows nothing of training: only its base URL is given.

Each model call costs about 2.6 ms of CPU, of which the openai SDK takes 1.1; building the agent for a question costs 0.3.
"""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from word_problem import Calculator, name_numbers

MODEL_INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    structured_output=False,
    multiple_system_messages=True,
    family="unknown",
)


async def solve(task: dict[str, Any], llm: Any) -> float:
    """Success (1 or 0) on one task: {"question": "7 red apples and ...", "answer": "9"}."""
    question, numbers = name_numbers(task["question"])
    calculator = Calculator(numbers)
    agent = AssistantAgent(
        "solver",
        model_client=OpenAIChatCompletionClient(
            model=llm.model,
            base_url=llm.base_url,
            api_key=llm.api_key,
            http_client=llm.http_client,  # one connection pool for all questions
            model_info=MODEL_INFO,
            include_name_in_message=False,
            parallel_tool_calls=False,
            max_tokens=8,  # a call of the tool takes 6 tokens, an answer 3
        ),
        tools=[FunctionTool(calculator.calculate, name="calculate", description="Calculates, for example, N0 + N1.")],
        system_message=None,
        reflect_on_tool_use=False,  # a reflection drops the tools, and with them the prompt that the next call continues
        max_tool_iterations=4,
    )
    result = await agent.run(task=question)
    return float(calculator.is_right(result.messages[-1].to_text(), task["answer"]))
