"""Credit inputs: data that a credit rule needs besides the step's groups: earlier steps from the store, a judge's
scores, the returns of forks.

The step planner drives it before the algorithm plans. Everything it gathers is recorded, in the store or as the
judge's replies in the run's folder, so that a step that is executed again gathers the same and pays nothing. A further
kind of input is a name in a rule's `needs`, a field of `Evidence`, and a method here.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.credit import CREDIT, Evidence, find_rule
from agentlightning.algorithms.credit.judge import judge_groups
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.errors import ConfigError
from agentlightning.records import Step
from agentlightning.runner.chat_endpoint import ChatEndpoint, bearer
from agentlightning.runner.user_code import load
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.rl.fork_returns import ForkSampler
from agentlightning.trainer.rl.step_inputs import DISCARDED, fixed_inputs, read_inputs, with_failures
from agentlightning.training_types import Trajectory

TIMEOUT_S = 300.0
READ_BATCH = 512


@dataclass(kw_only=True)
class CreditInputReader:
    """Gathers evidence for one run."""

    algorithm: LightningRL
    store: LightningStore
    run_id: str
    folder: Path
    """Folder of the judge's replies."""
    on_failure: Literal["drop", "zero"] = "drop"
    collector: RolloutCollector | None = None
    """Waits for forks. None: none is enqueued, and those that are recorded are read."""
    progress: Progress = field(default_factory=Silent)
    transport: httpx.AsyncBaseTransport | None = None

    async def gather(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> tuple[Evidence, dict[str, float]]:
        """The evidence for `step`, and what it cost."""
        rule = find_rule(str(self.algorithm.credit))
        settings = self.algorithm.rule_settings
        evidence, cost = Evidence(), dict[str, float]()
        if "history" in rule.needs:
            evidence = replace(evidence, history=await self._history(step, settings["history"]))
        if "fork_returns" in rule.needs:
            sampled = await self._fork_sampler().sample(step, groups, settings)
            evidence, cost = replace(evidence, fork_returns=sampled.returns), cost | sampled.metrics
        if "scores" in rule.needs:
            async with self._client() as client:
                judged = await judge_groups(
                    groups, self._judge(client, settings), _Replies(self.folder), **_asked(settings)
                )
            evidence, cost = replace(evidence, scores=judged.scores), cost | judged.stats
        return evidence, cost

    def _fork_sampler(self) -> ForkSampler:
        return ForkSampler(
            algorithm=self.algorithm,
            store=self.store,
            collector=self.collector,
            on_failure=self.on_failure,
            on_progress=partial(self.progress.phase, "fork"),
        )

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=TIMEOUT_S, transport=self.transport)

    def _judge(self, client: httpx.AsyncClient, settings: dict[str, Any]) -> ChatEndpoint:
        return ChatEndpoint(client, settings["url"], bearer(settings["key_env"]))

    async def _history(self, step: int, steps: int) -> list[list[Trajectory]]:
        """Groups of the latest `steps` steps before this one that were learned from, oldest first."""
        if not steps:
            return []
        earlier = await self.store.steps(self.run_id, after=step - 1 - steps, limit=steps)
        groups: list[list[Trajectory]] = []
        for one in earlier:
            if one.state == "closed" and one.step < step:
                groups += await self._groups(one)
        return groups

    async def _groups(self, step: Step) -> list[list[Trajectory]]:
        """The groups of an earlier step as that step read them. ConflictError where their records are gone."""
        ids = [one.rollout_id for one in step.consumed if one.outcome not in DISCARDED]
        fixed, kept = fixed_inputs(step), list[Trajectory]()
        for start in range(0, len(ids), READ_BATCH):
            part = ids[start : start + READ_BATCH]
            found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=part))}
            rollouts = with_failures([found[key] for key in part], self.on_failure)
            inputs = await read_inputs(self.store, rollouts, fixed)
            kept += trajectories(rollouts, inputs.calls, inputs.rewards, keep_unrewarded=True)[0]
        by_group: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in kept:
            by_group[trajectory.group_id].append(trajectory)
        return shaped_air(list(by_group.values()), self.algorithm.call_gamma)


def check_credit_inputs(algorithm: LightningRL) -> None:
    """ConfigError where the credit rule needs what this process cannot give; AgentError where code that it names fails."""
    rule, settings = find_rule(str(algorithm.credit)), algorithm.rule_settings
    if rule.name in CREDIT:  # in a rule of somebody's own the names may mean something else
        for name, what in (("key", "key function"), ("features", "feature function")):
            if settings.get(name) is not None:
                load(settings[name], ("transition",), what)
    if "scores" not in rule.needs:
        return
    if settings["url"] is None:
        raise ConfigError(
            f"algorithm.credit_settings.url: is required with credit = {algorithm.credit!r}: https://HOST/v1 of the judge"
        )
    if settings["key_env"] is not None and not os.environ.get(settings["key_env"]):
        raise ConfigError(f"algorithm.credit_settings.key_env: the variable {settings['key_env']} is not set")


def _asked(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("model", "instructions", "attempts")}


@dataclass(frozen=True)
class _Replies:
    """A file a reply, written whole or not at all."""

    folder: Path

    async def get(self, key: str) -> str | None:
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    async def put(self, key: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{key}.tmp"
        with open_private(temporary, "wb") as file:
            file.write(text.encode())
        temporary.replace(self.folder / key)
