"""An environment as the function agent that a worker runs: ``agent.run = "env:NAME"``."""

from __future__ import annotations

from agentlightning.environments.base import close_environment, episode_result, open_environment
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM, emit_reward


class EnvironmentAgent:
    """Plays tasks of one environment: ``(task, llm) -> {"reward", "success"}``, which a reward function of the run sees as
    the output and replaces. Success, metrics and rewards of steps are emitted."""

    def __init__(self, name: str) -> None:
        self._environment = open_environment(name)

    async def __call__(self, task: JSON, llm: LLM) -> JSON:
        outcome = episode_result(await self._environment.play(task, llm))
        for call_id, reward in outcome.steps:
            emit_reward(reward, name="step", call_id=call_id)
        if outcome.success is not None:
            emit_reward(float(outcome.success), name="success")
        for metric, value in outcome.metrics.items():
            emit_reward(value, name=metric)
        return {"reward": float(outcome.reward), "success": outcome.success}

    def close(self) -> None:
        """Ends what the environment started."""
        close_environment(self._environment)
