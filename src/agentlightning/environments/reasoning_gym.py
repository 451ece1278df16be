"""reasoning-gym: the kind ``reasoning-gym:DATASET?option=value``. One question, one answer, a score by its own verifier.

Options are the data set's own. Questions are in the rows; the entry that scores an answer is made again in `play`, since
JSON turns its tuples into lists, which some scorers refuse.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from agentlightning.environments.base import EpisodeResult, Split, seeds
from agentlightning.environments.player import Action, Observation, play_episode
from agentlightning.errors import ConfigError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its data sets' packages, while they are compiled
    import reasoning_gym

INSTRUCTION = "Give the final answer between <answer> and </answer>."
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
KEPT_ITEMS = 4096


class ReasoningGym:
    """The tasks of one data set. An answer outside of the tags is no answer; success is a full score."""

    def __init__(self, name: str, **options: Any) -> None:
        try:
            reasoning_gym.create_dataset(name, seed=0, size=1, **options)
        except (ValueError, TypeError, AssertionError) as cause:
            raise ConfigError(f"env reasoning-gym:{name}: {cause}") from cause
        self._name = name
        self._options = options
        self._item = lru_cache(KEPT_ITEMS)(self._made)

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        # Item i of seed s is item 0 of seed s + i in most data sets: `seeds` lie further apart than `limit`.
        for one in seeds(split, limit, seed):
            yield {"seed": one, "question": self._item(one)[1]["question"]}

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        return await play_episode(_Question(self, task), llm, max_calls=1)

    def close(self) -> None:
        self._item.cache_clear()

    def score(self, seed: int, answer: str) -> float:
        """VerifierError where the data set's verifier raises, as some do on text that is no answer."""
        dataset, entry = self._item(seed)
        try:
            return float(dataset.score_answer(answer, entry))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return 0.0  # no form of an answer
        except Exception as cause:
            raise VerifierError(f"{self._name}: {type(cause).__name__}: {cause}") from cause

    def _made(self, seed: int) -> Any:
        dataset = reasoning_gym.create_dataset(self._name, seed=seed, size=1, **self._options)
        return dataset, dataset[0]


class _Question:
    """The episode of one question."""

    system = ""
    tools = ()

    def __init__(self, dataset: ReasoningGym, task: JSON) -> None:
        self._dataset = dataset
        self._task = task
        self._score = 0.0
        self._answered = False

    async def start(self) -> Observation:
        return Observation(text=f"{self._task['question']}\n{INSTRUCTION}")

    async def act(self, action: Action) -> tuple[Observation, None]:
        found = ANSWER.findall(action.text)
        self._answered = bool(found)
        if found:
            self._score = self._dataset.score(self._task["seed"], found[-1].strip())
        return Observation(text="", over=True), None

    def result(self) -> EpisodeResult:
        unanswered = {"unanswered": float(not self._answered)}
        return EpisodeResult(reward=self._score, success=self._score >= 1.0, metrics=unanswered)
