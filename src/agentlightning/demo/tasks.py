"""Demo tasks: each module has the questions, an environment and an agent of one task; those of the tiny model a
demonstrator, too.

The warm start, the demo command and the tests drive it. A task module knows nothing of models or engines; its `solve` is
ordinary OpenAI-SDK code. The tiny model's questions are held out by their content, and asked of databases that training
never sees; the wordings are all seen in training.

Every demonstrator has bad habits: it mixes up pairs of words in most cases. One that is right on average would give a
policy that is greedily right at once; one that guesses uniformly a policy that never looks at the wording. A systematic
confusion is greedily wrong, yet the wording is represented and reward can flip it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from random import Random
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast

from agentlightning.errors import InputError
from agentlightning.records import JSON

Split = Literal["train", "test"]
Message = dict[str, str]

NAMES = ("sql", "lookup")
"""Tasks of the tiny model."""
WORD_PROBLEMS = "word_problems"
"""The task of the pretrained model."""
PEOPLE = ("Ana", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ivy", "Jon", "Kim", "Lea", "Max", "Ned", "Ola", "Pia")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Kyoto", "Quito", "Paris", "Delhi")


TINY_SETTINGS: Mapping[str, JSON] = MappingProxyType(
    {
        "agent": {"workers": 2, "concurrency": 128, "timeout_s": 60},
        "algorithm": {"minibatches": 4},
        "trainer": {"learning_rate": 1e-3, "warmup_steps": 3, "final_learning_rate": 0.1, "checkpoint_every": 5},
        "engine": {"device": "cpu"},  # so small a model is no faster on a GPU
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Settings by which the demo trains on a task."""

    steps: int
    tables: Mapping[str, JSON]
    """Settings of the configuration, by table."""
    tasks_per_step: int = 64
    """Groups of a step, of 8 rollouts each."""
    evaluations: int = 2
    """Greedy evaluations during training, beside those before and after it."""
    held_out_tasks: int = 300


class Task(Protocol):
    """The interface of a task module."""

    TRAINING: TrainingSettings

    def sample(self, rng: Random, split: Split) -> JSON:
        """One task row: `question` and `answer`, what the environment needs, and `plan`, for a demonstrator only."""

    async def solve(self, task: JSON, llm: Any) -> float:
        """The agent: answers the question with the model behind `llm`, and returns 1.0 if the answer is right, else 0.0."""


class DemoTask(Task, Protocol):
    """The interface of a task module of the tiny model."""

    SPECIAL_WORDS: tuple[str, str]
    """Opening and closing tag of a tool call: one token each."""
    MAX_CALLS: int
    """Model calls after which the agent gives up."""
    WARM_START_STEPS: int
    """Optimizer steps of the warm start, of 64 demonstrations each."""

    def demonstrate(self, task: JSON, rng: Random) -> list[Message]:
        """The conversation of the flawed demonstrator on this task, from the question to its answer."""


def load(name: str) -> DemoTask:
    """The task module of that name, of the tiny model's."""
    if name not in NAMES:
        raise InputError(f"task: {name!r} is not a demo task; expected one of {', '.join(NAMES)}")
    return cast(DemoTask, import_module(f"agentlightning.demo.{name}"))


def load_any(name: str) -> Task:
    """The task module of that name, of either model's."""
    return cast(Task, import_module(f"agentlightning.demo.{name}")) if name == WORD_PROBLEMS else load(name)


async def answer_with_tool(
    task: JSON,
    llm: Any,
    tool: Callable[[str], str],
    tags: tuple[str, str],
    max_calls: int,
    max_tokens: int,
    client: Any = None,
) -> float:
    """Runs an agent of plain OpenAI-SDK code: it calls the tool in text between the tags, and answers within `max_calls`."""
    from openai import AsyncOpenAI  # here, since whoever only wants task rows should not wait for the SDK

    client = client or AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(max_calls):
        reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=max_tokens)
        text = reply.choices[0].message.content or ""
        if reply.choices[0].finish_reason != "stop":
            return 0.0
        asked = re.fullmatch("(.*)".join(tags), text)
        if asked is None:
            return float(text == f"Answer: {task['answer']}")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": tool(asked[1])}]
    return 0.0


def rows(task: Task, split: Split, count: int, seed: int) -> list[JSON]:
    """`count` task rows, the same ones for the same arguments."""
    rng = Random(f"{split} {seed}")
    return [task.sample(rng, split) for _ in range(count)]


def demonstrations(task: DemoTask, count: int, seed: int) -> tuple[list[list[Message]], float]:
    """`count` conversations of the demonstrator on training tasks, and its success rate on them."""
    rng = Random(f"demonstrations {seed}")
    conversations, successes = [], 0
    for _ in range(count):
        row = task.sample(rng, "train")
        conversations.append(task.demonstrate(row, rng))
        successes += conversations[-1][-1]["content"] == f"Answer: {row['answer']}"
    return conversations, successes / max(count, 1)


def held_out(content: str) -> bool:
    """Tells whether a question with this content belongs to the test split; true for a quarter of all contents."""
    return hashlib.md5(content.encode(), usedforsecurity=False).digest()[0] < 64
