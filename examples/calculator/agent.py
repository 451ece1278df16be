"""An AutoGen agent that solves word problems with a calculator. It knows nothing of training: only its base URL is given.

Each model call costs about 2.6 ms of CPU, of which the openai SDK takes 1.1; building the agent for a question costs 0.3.
"""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from word_problem import Calculator, answers, evaluate, name_numbers

MODEL_INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    structured_output=False,
    multiple_system_messages=True,
    family="unknown",
)


INSTRUCTIONS = (
    "Solve the problem step by step. Use the tool calculate for all arithmetic. When you are done, write a last line of the"
    " form\nAnswer: 42"
)


async def solve(task: dict[str, Any], llm: Any) -> float:
    """Success (1 or 0) on one task: {"question": "7 red apples and ...", "answer": "9"}. The model sees no digits."""
    question, numbers = name_numbers(task["question"])
    calculator = Calculator(numbers)
    tool = FunctionTool(calculator.calculate, name="calculate", description="Calculates, for example, N0 + N1.")
    agent = solver(llm, tool, None, max_tokens=8, max_calls=4)  # a call of the tool takes 6 tokens, an answer 3
    result = await agent.run(task=question)
    return float(calculator.is_right(result.messages[-1].to_text(), task["answer"]))


async def solve_text(task: dict[str, Any], llm: Any) -> float:
    """The same for a model that reads and writes digits: the question as it is, whole expressions, "Answer: 9"."""
    tool = FunctionTool(evaluate, name="calculate", description="Calculates an expression, for example (3 + 4.5) * 2.")
    agent = solver(llm, tool, INSTRUCTIONS, max_tokens=512, max_calls=8)
    result = await agent.run(task=task["question"])
    return float(answers(result.messages[-1].to_text(), task["answer"]))


def solver(llm: Any, tool: FunctionTool, instructions: str | None, max_tokens: int, max_calls: int) -> AssistantAgent:
    """An agent that may call the tool again and again, and whose last message is its answer."""
    return AssistantAgent(
        "solver",
        model_client=OpenAIChatCompletionClient(
            model=llm.model,
            base_url=llm.base_url,
            api_key=llm.api_key,
            http_client=llm.http_client,  # one connection pool for all questions
            model_info=MODEL_INFO,
            include_name_in_message=False,
            parallel_tool_calls=False,
            max_tokens=max_tokens,
        ),
        tools=[tool],
        system_message=instructions,
        reflect_on_tool_use=False,  # a reflection drops the tools, and with them the prompt that the next call continues
        max_tool_iterations=max_calls,
    )
