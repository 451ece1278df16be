"""The contract of every environment, through its name alone.

A test file runs it on an environment by importing everything and saying which one is meant:

    from agentlightning.testing.environment_contract import *

    @pytest.fixture
    def environment_name():
        return "mypackage/grid.py:Grid?length=8"

Needs pytest. Episodes are played with models on loopback that answer as `answers` says, "[0]" by default; one whose episodes
cost seconds plays fewer of them at once by a fixture `at_once`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from agentlightning.environments.base import (
    Environment,
    EpisodeResult,
    Split,
    close_environment,
    episode_result,
    open_environment,
    task_rows,
)
from agentlightning.environments.checks import check_openings, check_rows
from agentlightning.environments.local_model import local_models
from agentlightning.records import JSON

__all__ = [
    "answers",
    "at_once",
    "environment",
    "test_a_held_out_task_is_no_training_task",
    "test_a_task_opens_alike_each_time",
    "test_an_episode_ends_with_a_number",
    "test_episodes_at_once_equal_episodes_alone",
    "test_tasks_are_json_and_the_same_every_time",
]

SPLITS: tuple[Split, ...] = ("train", "val")
Answers = Callable[[JSON], str | JSON]


@pytest.fixture
def answers() -> Answers:
    """The text, or the message, that answers a request."""
    return lambda request: "[0]"


@pytest.fixture
def at_once() -> int:
    """Episodes that are played together."""
    return 32


@pytest.fixture
def environment(environment_name: str) -> Iterator[Environment]:
    """The environment, closed in the end."""
    made = open_environment(environment_name)
    yield made
    close_environment(made)


def test_tasks_are_json_and_the_same_every_time(environment: Environment) -> None:
    for split in SPLITS:
        first, second = ([*environment.tasks(split, 4, 0)] for _ in range(2))
        assert 0 < len(first) <= 4
        assert first == second
        assert orjson.loads(orjson.dumps(first)) == first


def test_a_held_out_task_is_no_training_task(environment: Environment) -> None:
    train, val = (_rows(environment, split, 32) for split in SPLITS)
    assert not [row for row in train if row in val]
    kept, _ = check_rows(train, val)
    assert kept


def test_a_task_opens_alike_each_time(environment: Environment) -> None:
    asyncio.run(check_openings(environment, _rows(environment, "train", 2), []))


def test_an_episode_ends_with_a_number(environment: Environment, answers: Answers) -> None:
    (outcome,) = _played(environment, _rows(environment, "train", 1), answers)
    assert math.isfinite(outcome.reward)
    assert all(math.isfinite(value) for value in outcome.metrics.values())


def test_episodes_at_once_equal_episodes_alone(environment: Environment, answers: Answers, at_once: int) -> None:
    rows = _rows(environment, "train", at_once)
    alone = [_comparable(one) for row in rows for one in _played(environment, [row], answers)]
    assert [_comparable(one) for one in _played(environment, rows, answers)] == alone


def _rows(environment: Environment, split: Split, limit: int) -> list[JSON]:
    return task_rows(environment, split, limit, 0)


def _played(environment: Environment, rows: Sequence[JSON], answers: Answers) -> list[EpisodeResult]:
    async def answer(request: JSON) -> JSON:
        given = answers(request)
        return {"role": "assistant", "content": given} if isinstance(given, str) else given

    async def play() -> list[EpisodeResult | float]:
        async with local_models() as model:
            return [*await asyncio.gather(*(environment.play(row, model(answer)) for row in rows))]

    return [*map(episode_result, asyncio.run(play()))]


def _comparable(outcome: EpisodeResult) -> Any:
    """Without the ids of calls."""
    return outcome.reward, outcome.success, [reward for _, reward in outcome.steps], dict(outcome.metrics)
