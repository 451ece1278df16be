"""The scripted optimiser model: it edits by its grammar, and knows only what stands in the request."""

from __future__ import annotations

import pytest

from agentlightning.algorithms.prompts.reflection import (
    TriedText,
    critique_prompt,
    edit_prompt,
    new_text,
    random_edit_prompt,
    reflection_prompt,
    rollouts_text,
)
from agentlightning.algorithms.prompts.scripted import EditGrammar, ScriptedOptimiser
from agentlightning.algorithms.prompts.search import RolloutScore, Trace
from agentlightning.errors import ConfigError

GRAMMAR = {
    "add": ["Reply in valid json.", "Read the schema.", "Be polite."],
    "drop": ["Be creative."],
    "replace": {"fast": "careful"},
}
TEXT = "Answer {question}. Be creative."


def rollouts(*outcomes: tuple[float, str]) -> str:
    return rollouts_text(
        [Trace(task="json", steps=("schema",), score=RolloutScore(task=0, reward=r, feedback=f)) for r, f in outcomes]
    )


async def answered(prompt: str, number: int = 0) -> str | None:
    return new_text(await ScriptedOptimiser(GRAMMAR)(prompt, "test", number))


async def test_it_adds_the_sentence_that_shares_words_with_what_went_wrong() -> None:
    prompt = reflection_prompt("system", TEXT, rollouts((0.0, "The output is no json."), (1.0, "The schema was read.")))
    assert await answered(prompt) == f"{TEXT} Reply in valid json."


async def test_it_drops_what_rollouts_complain_of() -> None:
    assert await answered(reflection_prompt("system", TEXT, rollouts((0.0, "Too creative.")))) == "Answer {question}."


async def test_it_replaces_what_rollouts_complain_of() -> None:
    prompt = reflection_prompt("system", "Be fast.", rollouts((0.0, "It was fast and wrong.")))
    assert await answered(prompt) == "Be careful."


async def test_it_passes_over_texts_that_were_tried() -> None:
    tried = [TriedText(text=f"{TEXT} Reply in valid json.", wins=0, losses=2, ties=2)]
    outcomes = rollouts((0.0, "No json."), (0.0, "No json, and the schema was not read."))
    assert await answered(reflection_prompt("system", TEXT, outcomes, tried)) == f"{TEXT} Read the schema."


async def test_its_critique_names_words_of_low_rewards_and_leads_its_edit() -> None:
    prompt = critique_prompt("system", TEXT, rollouts((0.0, "The schema was not read."), (1.0, "Valid json.")))
    critique = await ScriptedOptimiser(GRAMMAR)(prompt, "test", 0)
    assert critique == "Rollouts with low rewards speak of: read, schema, the."
    assert await answered(edit_prompt("system", TEXT, critique)) == f"{TEXT} Read the schema."


async def test_without_a_word_about_rollouts_its_edits_are_by_chance_and_repeatable() -> None:
    prompt = random_edit_prompt("system", TEXT)
    found = [await answered(prompt, number) for number in range(60)]
    assert found == [await answered(prompt, number) for number in range(60)]
    assert len(set(found)) == 4  # three to add, one to drop


async def test_words_of_tasks_steps_and_successes_lead_nobody() -> None:
    prompt = reflection_prompt("system", TEXT, rollouts((0.0, "No."), (1.0, "A polite answer.")))
    assert len({await answered(prompt, number) for number in range(60)}) == 4


async def test_when_every_edit_was_tried_the_answer_has_no_text() -> None:
    model = ScriptedOptimiser({"drop": ["gone"]})
    assert new_text(await model(random_edit_prompt("system", TEXT), "test", 0)) is None


@pytest.mark.parametrize("grammar", [{}, {"add": [""]}, {"remove": ["x"]}, {"add": [3]}])
def test_a_grammar_that_is_none_is_refused(grammar: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"^grammar"):
        ScriptedOptimiser(grammar)


def test_a_grammar_is_data_or_an_object() -> None:
    assert (
        ScriptedOptimiser(EditGrammar(add=("Be polite.",))).grammar
        == ScriptedOptimiser({"add": ["Be polite."]}).grammar
    )
