"""How much completions depend on their prompts, by scores of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.trainer.rl.mutual_information import from_scores, mutual_information
from agentlightning.training_types import TrainingSequence, Transition


def call(name: str, prompt: list[int], sampled: list[int]) -> Transition:
    return Transition(
        call_id=name,
        suffix_ids=prompt,
        sampled_ids=sampled,
        logprobs=[-1.0] * len(sampled),
        versions=[],
        temperature=0.5,
    )


class PrefersItsPrompt:
    """An engine under which a token that the prompt has is likely, and any other is not."""

    def __init__(self) -> None:
        self.rows: list[TrainingSequence] = []

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        self.rows += sequences
        found = []
        for row in sequences:
            prompt = row.tokens[: row.segments[0][0]]
            found.append([math.log(0.5) if token in prompt else math.log(0.25) for token in row.tokens])
        return found


def test_completions_that_only_their_own_prompts_give_share_all_there_is() -> None:
    never = -1e9
    found = from_scores([[0.0, never, never], [never, 0.0, never], [never, never, 0.0]])
    assert found == {"mutual_information": pytest.approx(math.log(3)), "prompt_retrieval": 1.0}


def test_completions_that_every_prompt_gives_share_nothing() -> None:
    assert from_scores([[-1.0, -2.0], [-1.0, -2.0]]) == {
        "mutual_information": pytest.approx(0.0),
        "prompt_retrieval": 0.5,
    }


def test_scores_by_hand() -> None:
    # probabilities [[0.5, 0.1], [0.25, 0.3]]: log(0.5 / 0.375) and log(0.3 / 0.2), halved
    scores = [[math.log(0.5), math.log(0.1)], [math.log(0.25), math.log(0.3)]]
    expected = (math.log(4 / 3) + math.log(1.5)) / 2
    assert from_scores(scores) == {"mutual_information": pytest.approx(expected), "prompt_retrieval": 1.0}


async def test_first_completions_are_scored_after_each_others_prompts() -> None:
    engine: Any = PrefersItsPrompt()
    first, second = call("a", [1, 2], [1, 1, 1, 1]), call("b", [3, 4, 5], [3])
    others = [
        replace(first, call_id="a2", sampled_ids=[9]),
        replace(second, call_id="b2", parent=second, suffix_ids=[7]),
    ]
    found = await mutual_information(engine, "default", [first, second, *others], 8)
    assert len(engine.rows) == 4
    # no row is longer than the longest call, of 6 tokens
    assert [row.tokens for row in engine.rows] == [[1, 2, 1, 1, 1], [1, 2, 3], [3, 4, 5, 1, 1, 1], [3, 4, 5, 3]]
    assert {row.temperature for row in engine.rows} == {0.5}
    assert found == {"mutual_information": pytest.approx(math.log(0.5 / 0.375)), "prompt_retrieval": 1.0}


async def test_one_task_has_nothing_to_be_compared_with() -> None:
    engine: Any = PrefersItsPrompt()
    assert await mutual_information(engine, "default", [call("a", [1], [1]), call("b", [1], [2])], 8) == {}
    assert await mutual_information(engine, "default", [], 8) == {}


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(st.lists(st.floats(-9, 0), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_the_estimate_is_at_most_the_logarithm_of_the_tasks(scores: list[list[float]]) -> None:
    found = from_scores(scores)
    assert found["mutual_information"] <= math.log(len(scores)) + 1e-9
    assert 0.0 <= found["prompt_retrieval"] <= 1.0
