"""Every search over prompts: it finds what helps, repeats itself exactly, and ends anywhere with the best so far."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import fmean

import pytest
from literal_run import GOOD, GRAMMAR, SEED_TEXT, LiteralRun, RandomSearch, ScriptedOptimiser, bounded, planted

from agentlightning.algorithms.prompts import APO, GEPA
from agentlightning.algorithms.prompts.racing import RacedSearch
from agentlightning.algorithms.prompts.reflection import fenced
from agentlightning.algorithms.prompts.search import Split
from agentlightning.errors import DataError, EngineError

every_search = pytest.mark.parametrize("kind", [RandomSearch, APO, GEPA], ids=lambda kind: kind.name)


def noisy(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    """The planted task, where one rollout in five goes the other way, in two candidates of one replica alike."""
    reward, feedback, error = planted(texts, split, task, replica)
    flipped = random.Random(f"{split} {task} {replica}").random() < 0.2
    return (1.0 - reward, "", "") if flipped else (reward, feedback, error)


def silent(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    """No text earns anything."""
    return 0.0, "", ""


@every_search
async def test_it_finds_the_planted_words(kind: type[RacedSearch]) -> None:
    run = LiteralRun()
    result = await bounded(kind, max_proposals=1000, patience=200).search(run, seed=1)
    assert result.mean == 1.0
    assert all(sentence in result.best.texts["system"] for sentence in GOOD)
    assert "creative" not in result.best.texts["system"]
    assert result.means[0] == 0.0
    assert (
        result.reason
        == f"Candidate {result.best.number} earns 1 on every validation task: nothing is left (perfect_reward)."
    )


@every_search
async def test_killed_anywhere_and_run_again_it_ends_as_if_nothing_had_been(kind: type[RacedSearch]) -> None:
    settings = bounded(kind, max_proposals=8)
    whole = LiteralRun(noisy)
    result = await settings.search(whole, seed=5)
    for requests in range(0, len(whole.log), 7):
        killed = LiteralRun(noisy, requests=requests)
        await settings.search(killed, seed=5)
        resumed = LiteralRun(noisy, record=killed.record)
        assert await settings.search(resumed, seed=5) == result
        assert resumed.log == whole.log
        assert resumed.spent == whole.spent - killed.spent


@every_search
async def test_a_budget_may_end_at_every_request(kind: type[RacedSearch]) -> None:
    settings = bounded(kind, max_proposals=8)
    whole = LiteralRun()
    end = await settings.search(whole, seed=1)
    assert end.mean is not None
    best = -1.0
    for requests in range(len(whole.log)):
        run = LiteralRun(requests=requests)
        result = await settings.search(run, seed=1)
        assert result.reason == f"The budget of {requests} requests is spent."
        assert len(run.log) == requests
        assert (result.mean is None) == (requests == 0)
        if result.mean is not None:
            assert result.mean == result.means[result.best.number]
            assert best <= result.mean <= end.mean
            best = result.mean


@every_search
async def test_where_nothing_helps_the_seed_is_the_best(kind: type[RacedSearch]) -> None:
    run = LiteralRun(silent, rollouts=400)
    result = await bounded(kind, patience=5).search(run, seed=0)
    assert result.best == run.seed
    assert result.mean == 0.0


@every_search
async def test_answers_without_a_text_cost_one_request_and_one_sentence_each(kind: type[RacedSearch]) -> None:
    async def babbling(prompt: str, purpose: str, number: int) -> str:
        return "I am sorry, Dave."

    run = LiteralRun(optimiser=babbling)
    result = await bounded(kind, patience=6).search(run, seed=0)
    assert result.best == run.seed
    assert result.reason == "6 tries in a row brought no new text that can be used (patience)."
    sentence = "The optimiser model's answer has no text between fences, and is left out: 'I am sorry, Dave.'."
    assert run.notes[1:] == [sentence] * 6
    assert run.candidates == [run.seed]


@every_search
async def test_a_refused_candidate_is_a_sentence_and_the_search_goes_on(kind: type[RacedSearch]) -> None:
    async def forgetful(prompt: str, purpose: str, number: int) -> str:
        return fenced("Answer." if number % 2 else f"{SEED_TEXT} {GOOD[0]}")

    run = LiteralRun(optimiser=forgetful)
    result = await bounded(kind, patience=4).search(run, seed=0)
    assert "A candidate is refused: prompts.templates.system: expected the placeholders ['{question}']" in run.notes
    assert GOOD[0] in result.best.texts["system"]


@every_search
async def test_an_agent_that_fails_under_a_candidate_earns_nothing_and_its_error_is_shown(
    kind: type[RacedSearch],
) -> None:
    def failing(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
        return (1.0, "", "") if GOOD[0] in texts["system"] else (0.0, "", "agent failed: ValueError: no valid json.")

    run = LiteralRun(failing)
    result = await bounded(kind, max_proposals=500, patience=100).search(run, seed=0)
    assert result.mean == 1.0
    shown = any("agent failed: ValueError: no valid json." in key[1] for key in run.log if key[0] == "ask")
    assert shown == (kind is not RandomSearch)


@every_search
async def test_an_optimiser_model_that_is_away_ends_the_search_with_its_error(kind: type[RacedSearch]) -> None:
    async def away(prompt: str, purpose: str, number: int) -> str:
        raise EngineError("external.optimiser: no answer after 5 tries")

    with pytest.raises(EngineError, match="no answer after 5 tries"):
        await kind().search(LiteralRun(optimiser=away), seed=0)


@every_search
@pytest.mark.parametrize(("sizes", "split"), [((0, 4), "train"), ((4, 0), "val")])
async def test_a_search_without_tasks_is_refused(kind: type[RacedSearch], sizes: tuple[int, int], split: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.{split}: a prompt search needs tasks"):
        await kind().search(LiteralRun(sizes=sizes), seed=0)


async def test_gepa_and_apo_beat_random_search_at_equal_rollouts_over_20_seeds() -> None:
    means = {}
    for kind in (APO, GEPA, RandomSearch):
        results = [
            await kind().search(LiteralRun(optimiser=ScriptedOptimiser(GRAMMAR, seed), rollouts=300), seed)
            for seed in range(20)
        ]
        means[kind.name] = fmean(result.mean or 0.0 for result in results)
    assert means["apo"] > means["random_search"] + 0.1
    assert means["gepa"] >= means["apo"]
