"""The agent, which keeps its code: only the address of its model is the trainer's."""

from typing import Any

from agents import Agent, AgentsException, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

import agentlightning as agl


async def solve(task: dict[str, Any], llm: agl.LLM) -> float:
    """Does one task and returns its reward."""
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    model = OpenAIChatCompletionsModel(llm.model, client)
    agent = Agent("assistant", model=model, model_settings=ModelSettings(max_tokens=24))
    untraced = RunConfig(tracing_disabled=True)  # else the SDK sends its traces to OpenAI
    try:
        result = await Runner.run(agent, task["question"], max_turns=4, run_config=untraced)
    except AgentsException:
        return 0.0  # too many turns, or a tool that does not exist: mistakes of the model
    return score(task, str(result.final_output))


def score(task: dict[str, Any], answer: str) -> float:
    """The reward: 1 for an answer that names the capital, else 0."""
    return float(task["answer"].lower() in answer.lower())
