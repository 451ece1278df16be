"""tau2-bench: the kind ``tau2:DOMAIN?user=NAME``: customers, tools, and a policy that the agent has to keep.

Options: user (plays the customer: an external model, or a policy that is not trained, by its name), judge (the same, for
criteria in words; by default the user), max_steps (messages of an episode). The conversation and the prompts are those of
the benchmark's own agent.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read at import; else it fetches prices

from loguru import logger
from tau2.agent.llm_agent import LLMAgent
from tau2.data_model.simulation import TerminationReason
from tau2.evaluator import evaluator_nl_assertions
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry
from tau2.runner.build import build_environment, build_user
from tau2.utils.llm_utils import generate

from agentlightning.environments.base import EpisodeResult, Split, out_of_limits
from agentlightning.errors import ConfigError, InfrastructureError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

EPISODES = 256
"""Episodes at a time of one worker: each has a thread."""
HELD_OUT = 5
"""One task of so many is held out if the domain has no split of its own."""


class Tau2:
    """The tasks of one domain. Its test split is held out."""

    def __init__(self, domain: str, *, user: str, judge: str | None = None, max_steps: int = 100) -> None:
        if domain not in registry.get_task_sets():
            known = ", ".join(sorted(registry.get_task_sets()))
            raise ConfigError(f"env tau2: expected one of {known}, got {domain!r}")
        logger.disable("tau2")
        try:
            self._tasks = {task.id: task for task in registry.get_tasks_loader(domain)()}
        except OSError as cause:
            raise ConfigError(
                f"env tau2: its data are not here: {cause}; set TAU2_DATA_DIR to the folder data"
            ) from cause
        self._domain = domain
        self._user = user
        self._judge = judge or user
        self._max_steps = max_steps
        self._threads = ThreadPoolExecutor(EPISODES, "tau2")
        self._local = threading.local()
        evaluator_nl_assertions.generate = self._judged

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        load = registry.get_task_splits_loader(self._domain)
        own = load().get("train" if split == "train" else "test") if load else None
        spread = [
            key for place, key in enumerate(self._tasks) if (place % HELD_OUT == HELD_OUT - 1) == (split == "val")
        ]
        for key in (own or spread)[:limit]:
            yield {"task": key, "scenario": str(self._tasks[key].user_scenario)}

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._play, task["task"], llm)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _play(self, key: str, llm: LLM) -> EpisodeResult:
        task, access = self._tasks[key], {"api_base": llm.base_url, "api_key": llm.api_key}
        world = build_environment(self._domain)
        agent = _Agent(world.get_tools(), world.get_policy(), f"openai/{llm.model}", access)
        user = build_user("user_simulator", world, task, llm=f"openai/{self._user}", llm_args=access)
        talk = Orchestrator(self._domain, agent, user, world, task, max_steps=self._max_steps)
        try:
            run = talk.run()
        except _PolicyError as cause:
            ended = out_of_limits(str(cause))
            return EpisodeResult(
                reward=0.0, success=False, metrics={"invalid": float(not ended), "truncated": float(ended)}
            )
        except Exception as cause:  # of LiteLLM, of the tools, of the customer's reply
            raise InfrastructureError(
                f"tau2 could not play task {key}: {type(cause).__name__}: {cause}"[:1000]
            ) from cause
        self._local.judge = lambda **request: generate(**{**request, **access, "model": f"openai/{self._judge}"})
        try:
            score = evaluate_simulation(run, task, EvaluationType.ALL, solo_mode=False, domain=self._domain)
        except Exception as cause:
            raise VerifierError(f"tau2 could not judge task {key}: {type(cause).__name__}: {cause}"[:1000]) from cause
        parts = {str(part.value).lower(): float(value) for part, value in (score.reward_breakdown or {}).items()}
        truncated = run.termination_reason in (TerminationReason.MAX_STEPS, TerminationReason.TIMEOUT)
        counts = {"invalid": 0.0, "truncated": float(truncated)}
        return EpisodeResult(reward=float(score.reward), success=score.reward >= 1, metrics={**parts, **counts})

    def _judged(self, **request: Any) -> Any:
        """The judge's answer: the benchmark names one model of OpenAI's for the whole process."""
        return self._local.judge(**request)


class _PolicyError(Exception):
    """The trained model's own end: an unreadable or empty reply, or no room or no calls left."""


class _Agent(LLMAgent):  # type: ignore[misc]
    """The benchmark's agent, which says what was its model's fault."""

    def generate_next_message(self, message: Any, state: Any) -> Any:
        try:
            reply, state = super().generate_next_message(message, state)
        except Exception as cause:
            if isinstance(cause, ValueError) or out_of_limits(str(cause)):
                raise _PolicyError(str(cause)) from cause
            raise
        if not reply.is_tool_call() and not reply.has_text_content():
            raise _PolicyError("the reply is empty")
        return reply, state
