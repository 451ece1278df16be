"""The scripted optimiser model: it edits by its grammar, and knows only what stands in the request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentlightning.algorithms.prompts.reflection import (
    ANSWER_WITH_TEXT,
    CURRENT,
    TriedText,
    critique_prompt,
    edit_prompt,
    fenced,
    new_text,
    reflection_prompt,
    rollouts_text,
)
from agentlightning.algorithms.prompts.scripted import ScriptedOptimiser
from agentlightning.algorithms.prompts.search import RolloutScore, Trace
from agentlightning.errors import ConfigError

GRAMMAR = {
    "add": ["Reply in valid json.", "Read the schema.", "Be polite."],
    "drop": ["Be creative."],
    "replace": {"fast": "careful"},
}
TEXT = "Answer {question}. Be creative."
RANDOM_EDIT = f"Write another version.\n{CURRENT}\n{fenced(TEXT)}\n{ANSWER_WITH_TEXT}"


def rollouts(*outcomes: tuple[float, str]) -> str:
    return rollouts_text(
        [Trace(task="json", steps=("schema",), score=RolloutScore(task=0, reward=r, feedback=f)) for r, f in outcomes]
    )


async def answers(prompt: str) -> Counter[str | None]:
    """The new texts of 60 requests, by number."""
    model = ScriptedOptimiser(GRAMMAR)
    return Counter([new_text(await model(prompt, "test", number)) for number in range(60)])


async def answered(prompt: str) -> str | None:
    """The new text that it mostly answers."""
    [(text, count)] = (await answers(prompt)).most_common(1)
    assert count > 45
    return text


async def test_it_adds_the_sentence_that_shares_words_with_what_went_wrong() -> None:
    prompt = reflection_prompt("system", TEXT, rollouts((0.0, "The output is no json."), (1.0, "The schema was read.")))
    assert await answered(prompt) == f"{TEXT} Reply in valid json."


async def test_it_drops_what_rollouts_complain_of() -> None:
    assert await answered(reflection_prompt("system", TEXT, rollouts((0.0, "Too creative.")))) == "Answer {question}."


async def test_it_seldom_repeats_what_was_worse() -> None:
    refused, other = f"{TEXT} Reply in valid json.", f"{TEXT} Read the schema."
    outcomes = rollouts((0.0, "No json."), (0.0, "The schema was not read."))
    before = await answers(reflection_prompt("system", TEXT, outcomes))
    tried = [TriedText(text=refused, wins=0, losses=9, ties=2)]
    after = await answers(reflection_prompt("system", TEXT, outcomes, tried))
    assert after[refused] < before[refused] / 2
    assert after[other] > before[other]


async def test_its_critique_names_words_of_low_rewards_and_leads_its_edit() -> None:
    prompt = critique_prompt("system", TEXT, rollouts((0.0, "The schema was not read."), (1.0, "Valid json.")))
    critique = await ScriptedOptimiser(GRAMMAR)(prompt, "test", 0)
    assert critique == "Rollouts with low rewards speak of: read, schema."
    assert await answered(edit_prompt("system", TEXT, critique)) == f"{TEXT} Read the schema."


async def test_without_a_word_about_rollouts_its_edits_are_by_chance_and_repeatable() -> None:
    prompt = RANDOM_EDIT
    found = await answers(prompt)
    assert found == await answers(prompt)
    assert len(found) == 4  # three to add, one to drop
    assert max(found.values()) < 30


@pytest.mark.parametrize(
    "words", ["## Rollout 2, reward high", "# Texts that were tried in its place", "```\n", "# Critique of it\n"]
)
async def test_feedback_that_looks_like_a_part_of_the_request_breaks_nothing(words: str) -> None:
    assert sum((await answers(reflection_prompt("system", TEXT, rollouts((0.0, f"No.\n{words}\nNo."))))).values()) == 60


async def test_where_the_grammar_has_no_edit_of_a_text_the_answer_has_none() -> None:
    model = ScriptedOptimiser({"drop": ["gone"]})
    assert new_text(await model(RANDOM_EDIT, "test", 0)) is None


@pytest.mark.parametrize(
    "grammar", [{}, {"add": [""]}, {"remove": ["x"]}, {"add": [3]}, {"add": "Be polite."}, {"replace": ["x"]}]
)
def test_a_grammar_that_is_none_is_refused(grammar: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^grammar"):
        ScriptedOptimiser(grammar)
