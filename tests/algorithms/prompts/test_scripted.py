"""The scripted optimiser model: it edits by its grammar, and knows only what stands in the request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from literal_run import ScriptedOptimiser

from agentlightning.algorithms.prompts.reflection import new_text, reflection_prompt, rollouts_text
from agentlightning.algorithms.prompts.search import RolloutScore, Trace
from agentlightning.errors import ConfigError

GRAMMAR = {
    "add": ["Reply in valid json.", "Read the schema."],
    "drop": ["Be creative."],
    "replace": {"fast": "careful"},
}
TEXT = "Answer {question}. Be creative."


@pytest.mark.parametrize(
    ("wrong", "edited"),
    [("The output is no json.", f"{TEXT} Reply in valid json."), ("Too creative.", "Answer {question}.")],
)
async def test_it_mostly_edits_what_shares_words_with_what_went_wrong(wrong: str, edited: str) -> None:
    outcomes = (0.0, wrong), (1.0, "The schema was read.")
    scores = [RolloutScore(task=0, reward=reward, feedback=words) for reward, words in outcomes]
    rollouts = rollouts_text([Trace(task="json", steps=("schema",), score=score) for score in scores])
    prompt, model = reflection_prompt("system", TEXT, rollouts), ScriptedOptimiser(GRAMMAR)
    answers = Counter([new_text(await model(prompt, "test", number)) for number in range(60)])
    assert answers[edited] > 45
    assert new_text(await ScriptedOptimiser({"drop": ["gone"]})(prompt, "test", 0)) is None


@pytest.mark.parametrize("grammar", [{}, {"add": [""]}, {"remove": ["x"]}, {"add": [3]}, {"replace": ["x"]}])
def test_a_grammar_that_is_none_is_refused(grammar: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^grammar"):
        ScriptedOptimiser(grammar)
