"""Builders of records for all tests: whole, valid records of which a test names only the fields that it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from agentlightning.cli.app import app
from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import EngineNeeds, EngineSetup, LearnerSetup
from agentlightning.records import (
    Call,
    Claim,
    Lease,
    Resource,
    RetryPolicy,
    Reward,
    Rollout,
    Sampling,
    Span,
    VersionSpan,
)
from agentlightning.training_types import TrainingSequence, Trajectory, Transition

Place = Claim | Rollout | None
"""The attempt that a record belongs to; None: attempt 1 of rollout "rollout" of run "run"."""


def place_of(place: Place) -> dict[str, Any]:
    if place is None:
        return {"run_id": "run", "rollout_id": "rollout", "attempt": 1}
    rollout = place.rollout if isinstance(place, Claim) else place
    return {"run_id": rollout.run_id, "rollout_id": rollout.id, "attempt": max(1, rollout.attempt)}


def call(place: Place = None, id: str = "call", **fields: Any) -> Call:
    """A root Chat call of policy "default": prompt ids 1 2 3, sampled 7 8."""
    sampled = fields.get("sampled_ids", [7, 8])
    given: dict[str, Any] = {
        **place_of(place),
        "id": id,
        "parent_id": None,
        "suffix_ids": [1, 2, 3],
        "sampled_ids": sampled,
        "logprobs": [-0.5] * len(sampled),
        "versions": [VersionSpan(version=1, start=0, end=len(sampled))],
        "prompt_tokens": len(fields.get("suffix_ids", [1, 2, 3])),
        "policy": "default",
        "model": "default",
        "protocol": "chat",
        "sampling": Sampling(),
        "history_hash": f"history of {id}",
        "request_hash": f"request of {id}",
        "messages": [{"role": "user", "content": "hi"}],
        "completion": {"role": "assistant", "content": "hello"},
        "started_ns": 1,
        "finished_ns": 2,
    }
    return Call(**{**given, **fields})


def reward(place: Place = None, value: float = 1.0, id: str = "reward", **fields: Any) -> Reward:
    return Reward(**{**place_of(place), "id": id, "value": value, "source": "return", **fields})


def span(place: Place = None, name: str = "tool", id: str = "span", **fields: Any) -> Span:
    return Span(**{**place_of(place), "id": id, "name": name, "started_ns": 1, "finished_ns": 2, **fields})


def rollout(id: str = "rollout", reward: float | None = 1.0, **fields: Any) -> Rollout:
    """A training rollout of step 1 that succeeded in its first attempt."""
    given: dict[str, Any] = {
        "id": id,
        "run_id": "run",
        "task": {"question": "1+1"},
        "group_id": "g",
        "replica": 0,
        "mode": "train",
        "step": 1,
        "sampling": Sampling(),
        "retry": RetryPolicy(),
        "priority": 0,
        "state": "succeeded",
        "attempt": 1,
        "lost": 0,
        "created_ns": 1,
        "started_ns": 2,
        "finished_ns": 3,
        "reward": reward,
        "calls": 1,
    }
    return Rollout(**{**given, **fields})


def claim(id: str = "rollout", **fields: Any) -> Claim:
    """A claim of a running rollout."""
    running = {"state": "running", "finished_ns": None, "reward": None, "calls": 0}
    one = rollout(id, **{**running, **fields})
    return Claim(rollout=one, lease=Lease(rollout_id=id, attempt=one.attempt, token="token"), key="sk-agl-key")


def policy(run_id: str, endpoint: str, tokenizer: Path, model: str = "policy") -> Resource:
    """The run's policy as gateways sample it, which an engine at this URL serves."""
    value = {"model": model, "endpoints": [endpoint], "tokenizer": str(tokenizer), "seed": 7}
    return Resource(run_id=run_id, name="default", kind="policy", value=value)


def transition(call_id: str = "call", **fields: Any) -> Transition:
    """A root transition: prompt ids 1, sampled 10 10."""
    sampled = fields.get("sampled_ids", [10, 10])
    given: dict[str, Any] = {
        "suffix_ids": [1],
        "sampled_ids": sampled,
        "logprobs": [-1.0] * len(sampled),
        "versions": [],
    }
    return Transition(call_id=call_id, **{**given, **fields})


def linked(transitions: list[Transition]) -> list[Transition]:
    """A conversation of them: each call continues the one before; `suffix_ids` stay as they are."""
    linked: list[Transition] = []
    for one in transitions:
        object.__setattr__(one, "parent", linked[-1] if linked else None)
        linked.append(one)
    return linked


def trajectory(id: str = "a0", reward: float = 1.0, calls: int = 2, length: int = 2, **fields: Any) -> Trajectory:
    """A conversation of `calls` calls of `length` sampled tokens; its group is the first letter of its id."""
    steps = [
        transition(
            f"{id}/{index}",
            suffix_ids=[1] if index == 0 else [2],
            sampled_ids=[10 + index] * length,
        )
        for index in range(calls)
    ]
    given: dict[str, Any] = {"group_id": id[0], "reward": reward, "transitions": linked(steps)}
    return Trajectory(rollout_id=id, **{**given, **fields})


def group(name: str, *rewards: float, calls: int = 2) -> list[Trajectory]:
    """Rollouts of one task, one per reward."""
    return [trajectory(f"{name}{index}", reward, calls) for index, reward in enumerate(rewards)]


def sequence(rollout_id: str = "a0", **fields: Any) -> TrainingSequence:
    """A row of five tokens of which the last three were sampled in one call."""
    tokens = fields.get("tokens", [1, 2, 3, 4, 5])
    sampled = len(tokens) - 2
    given: dict[str, Any] = {
        "tokens": tokens,
        "mask": [False, False, *[True] * sampled],
        "logprobs": [0.0, 0.0, *[-1.0] * sampled],
        "advantages": [0.0, 0.0, *[1.0] * sampled],
        "weights": [0.0, 0.0, *[1 / sampled] * sampled],
        "segments": [(2, len(tokens))],
    }
    return TrainingSequence(rollout_id=rollout_id, **{**given, **fields})


def agl(*arguments: str) -> Result:
    """The command line in this process; `.exit_code`, `.output` and `.stdout` as typer's runner gives them."""
    return CliRunner().invoke(app, arguments)


def learner_setup(
    *, reference: bool = False, critic: float | None = None, seed: int = 0, threads: int | None = 1, **config: Any
) -> LearnerSetup:
    """A learner's setup with these settings of [engine], on the CPU; critic: its learning rate over the policy's."""
    needs = EngineNeeds(reference=reference, critic_learning_rate=critic)
    engine = EngineConfig(**{"device": "cpu", "dtype": "float32", **config})
    return LearnerSetup(config=engine, needs=needs, learning_rate=1.0, seed=seed, threads=threads)


def engine_setup(
    model: Path, work_dir: Path, *, reference: bool = False, learns: bool = True, **config: Any
) -> EngineSetup:
    """An engine's setup with these settings of [engine], on the CPU."""
    engine = EngineConfig(**{"device": "cpu", "dtype": "float32", **config})
    return EngineSetup(
        model=model, work_dir=work_dir, config=engine, needs=EngineNeeds(reference=reference), threads=1, learns=learns
    )
