"""A prompt search over a store: candidates, rollouts, answers and budgets are recorded, and a kill changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_doubles import EVERY, Countdown, Crash, Crashing
from search_doubles import RUN, START, WORDS, GreedySearch, Writer, config, prompted_agents, searching, text_of

from agentlightning.algorithms.prompts import GEPA
from agentlightning.algorithms.prompts.search import ScoreRequest, SearchResult
from agentlightning.errors import AgentError, BudgetSpentError, EngineError, InputError
from agentlightning.prompts.templates import Template
from agentlightning.records import Finish, NewRollout, Rollout
from agentlightning.runner.attempt import status_here
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.templates import add_version, promote_candidate, read_candidates, validation_rewards
from agentlightning.trainer.prompts.optimization import searched

BEST = f"{START} verify cite plan"


async def all_rollouts(store: LightningStore) -> list[Rollout]:
    return await store.rollouts(RolloutQuery(run_id=RUN))


async def whole_search(
    store: Any, folder: Path, writer: Writer, rounds: int = len(WORDS), **optimize: Any
) -> SearchResult:
    async with searching(store, folder, writer, config(**optimize)) as search:
        return await GreedySearch(rounds=rounds).search(search, 0)


async def test_a_search_finds_the_words_that_are_rewarded_and_records_candidates_and_batches(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        found = await whole_search(store, tmp_path, Writer(store))
        rollouts = await all_rollouts(store)
        records = await read_candidates(store, RUN)
        means = await validation_rewards(store, RUN)
        metrics = {metric.name: metric.value for metric in await store.metrics(RUN)}
        [run] = await store.runs([RUN])
    assert (found.best.texts["system"], found.mean) == (BEST, 1.0)
    assert {rollout.mode for rollout in rollouts} == {"eval"}
    assert [(each.number, each.parents, each.source) for each in records[:3]] == [
        (0, (), "seed"),
        (1, (0,), "greedy"),
        (2, (1,), "greedy"),
    ]
    assert records[1].texts == {"system": f"{START} verify"}
    assert set(means[0].values()) == {0.0}
    assert means[1] == pytest.approx(dict.fromkeys(range(4), 1 / 3))
    assert [metrics[f"prompts/{name}"] for name in ("best_mean", "candidates", "rollouts")] == [1.0, 6.0, 34.0]
    assert metrics["prompts/tokens"] == 34 * 4 + 5 * 12
    assert run.summary["step"] == 9


async def test_equal_texts_are_one_candidate(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        async with searching(store, tmp_path, Writer(store)) as search:
            first = await search.propose({"system": f"{START} a"}, [search.seed], "test")
            again = await search.propose({"system": f"{START} a"}, [search.seed], "other")
            back = await search.propose({"system": START}, [first], "test")
        assert (again, back) == (first, search.seed)
        assert len(await store.resources(RUN, "system", latest=False)) == 2


async def test_messages_are_searched_one_text_each(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]
    settings = config({"system": {"messages": messages}})
    async with InMemoryLightningStore() as store:
        async with searching(store, tmp_path, Writer(store), settings) as search:
            child = await search.propose({"system.0": "Think."}, [search.seed], "test")
        [version] = await store.resources(RUN, "system", version=2)
    assert child.texts == {"system.0": "Think.", "system.1": "{question}"}
    assert [each["content"] for each in version.value["template"]] == ["Think.", "{question}"]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"user": "x"}, "user: expected a text of system"),
        ({"system": "Answer {answer}."}, "system: template: unknown placeholder 'answer'; expected only question"),
        ({"system": "Answer."}, "system: template: the placeholder 'question' is lost; expected only question"),
        ({"system": "Answer {question"}, "system: template: expected '}' before end of string"),
    ],
)
async def test_a_text_that_cannot_take_the_place_is_refused_in_a_sentence_that_is_recorded(
    tmp_path: Path, texts: dict[str, str], sentence: str
) -> None:
    async with InMemoryLightningStore() as store:
        for _ in range(2):
            async with searching(store, tmp_path, Writer(store)) as search:
                with pytest.raises(InputError) as refused:
                    await search.propose(texts, [search.seed], "test")
                assert str(refused.value).startswith(sentence)
        [_, record] = await read_candidates(store, RUN)
    assert (record.number, record.refused) == (None, str(refused.value))
    assert record.texts.items() >= texts.items()


async def test_rollouts_that_were_run_are_not_run_again_and_cost_nothing(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        async with searching(store, tmp_path, Writer(store), config(max_rollouts=4)) as search:
            request = ScoreRequest(candidate=search.seed, split="val", tasks=(0, 1, 2, 3))
            first = await search.evaluate([request])
            assert await search.evaluate([request, request]) == [*first, *first]
        assert len(await all_rollouts(store)) == 4


async def test_a_batch_that_would_pass_the_budget_of_rollouts_is_not_begun(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        found = await whole_search(store, tmp_path, Writer(store), max_rollouts=12)
        assert len(await all_rollouts(store)) == 10
    assert found.reason == (
        "The budget of 12 rollouts is spent: 10 were run, and the next 4 would pass it (optimize.max_rollouts)."
    )
    assert (found.best.number, found.mean) == (0, 0.0)


async def test_tokens_are_counted_of_agents_and_of_the_model_that_writes(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        writer = Writer(store)
        found = await whole_search(store, tmp_path, writer, max_tokens=30)
    assert found.reason.startswith("The budget of 30 tokens is spent")
    assert len(writer.prompts) < 5


async def test_a_search_that_is_asked_to_end_ends_before_the_next_batch(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        async with searching(store, tmp_path, Writer(store)) as search:
            await search.evaluate([ScoreRequest(candidate=search.seed, split="val", tasks=(0,))])
            search.stopping = True
            with pytest.raises(BudgetSpentError, match="asked to end"):
                await search.evaluate([ScoreRequest(candidate=search.seed, split="val", tasks=(1,))])
            assert search.stopped
        assert len(await all_rollouts(store)) == 1


@EVERY
async def test_a_search_that_is_killed_anywhere_goes_on_and_asks_nothing_twice(tmp_path: Path, every: int) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        writer = Writer(store)
        expected = await whole_search(store, tmp_path / "whole", writer, 2)
        counted, asked = len(await all_rollouts(store)), writer.prompts
        candidates = await read_candidates(store, RUN)
    ticks = 0
    while True:
        ticks += every
        async with InMemoryLightningStore() as store, prompted_agents(store):
            writer, survived = Writer(store), True
            try:
                await whole_search(Crashing(store, Countdown(ticks)), tmp_path / f"{ticks}", writer, 2)
            except Crash:
                survived = False
            assert await whole_search(store, tmp_path / f"{ticks}", writer, 2) == expected
            assert writer.prompts == asked
            assert len(await all_rollouts(store)) == counted
            assert await read_candidates(store, RUN) == candidates
        if survived:
            return


async def test_a_candidate_that_makes_the_agent_fail_scores_nothing_and_its_error_is_told(tmp_path: Path) -> None:
    async with (
        InMemoryLightningStore() as store,
        prompted_agents(store, failed=lambda text: "hurry" in text),
        searching(store, tmp_path, Writer(store)) as search,
    ):
        child = await search.propose({"system": f"{START} hurry verify"}, [search.seed], "test")
        requests = [ScoreRequest(candidate=one, split="val", tasks=(0, 1)) for one in (search.seed, child)]
        [_, scores] = await search.evaluate(requests)
        assert [(one.reward, one.error) for one in scores] == [(0.0, "boom")] * 2


async def test_an_agent_that_fails_with_the_first_prompts_ends_the_search_in_a_sentence(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        async with (
            prompted_agents(store, failed=lambda text: True),
            searching(store, tmp_path, Writer(store)) as search,
        ):
            with pytest.raises(AgentError, match="all 2 rollouts with the prompts that the search starts from failed"):
                await search.evaluate([ScoreRequest(candidate=search.seed, split="val", tasks=(0, 1))])
        # Once it is mended, the search that goes on makes other rollouts.
        async with prompted_agents(store), searching(store, tmp_path, Writer(store)) as search:
            [scores] = await search.evaluate([ScoreRequest(candidate=search.seed, split="val", tasks=(0, 1))])
            assert [one.error for one in scores] == ["", ""]
        async with searching(store, tmp_path, Writer(store)) as search:
            assert await search.evaluate([ScoreRequest(candidate=search.seed, split="val", tasks=(0, 1))]) == [scores]
        assert await validation_rewards(store, RUN) == {0: {0: 0.0, 1: 0.0}}


async def test_traces_have_the_calls_of_their_rollouts(tmp_path: Path) -> None:
    async with (
        InMemoryLightningStore() as store,
        prompted_agents(store),
        searching(store, tmp_path, Writer(store)) as search,
    ):
        [scores] = await search.evaluate([ScoreRequest(candidate=search.seed, split="train", tasks=(2, 0))])
        first, second = await search.traces(scores)
    assert (first.task, second.task) == ('{"question": "t2"}', '{"question": "t0"}')
    assert first.steps == ("model call:\n[assistant] x",)
    assert [first.score, second.score] == scores


@pytest.mark.parametrize(
    ("refuse", "sentence"),
    [([503, 429], None), ([503] * 5, "503 not now"), ([401], "401 not now")],  # a refusal is not tried again
)
async def test_a_model_that_is_away_is_asked_again_and_again_by_the_search_that_goes_on(
    tmp_path: Path, refuse: list[int], sentence: str | None
) -> None:
    async with InMemoryLightningStore() as store:
        writer = Writer(store, refuse=refuse)
        if sentence is not None:
            async with searching(store, tmp_path, writer) as search:
                with pytest.raises(EngineError, match=rf"optimize\.model: w-1 gives no answer: {sentence}"):
                    await search.ask("0 |text", "edit")
        async with searching(store, tmp_path, writer) as search:
            assert await search.ask("0 |text", "edit") == "text verify"


async def test_a_model_that_answers_nonsense_ends_the_search_with_what_it_started_from(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        writer = Writer(store, answer=lambda prompt: "I would rather not.")
        async with searching(store, tmp_path, writer) as search:
            found = await GEPA(minibatch=2).search(search, 0)
    assert (found.best.number, found.mean, len(writer.prompts)) == (0, 0.0, 20)
    assert "(patience)" in found.reason


async def test_every_rollout_has_the_versions_of_its_candidate(tmp_path: Path) -> None:
    templates = {"system": START, "other": "Be kind."}
    async with InMemoryLightningStore() as store, prompted_agents(store):
        async with searching(store, tmp_path, Writer(store), config(templates, templates=["system"])) as search:
            child = await search.propose({"system": f"{START} plan"}, [search.seed], "test")
            await search.evaluate(
                [ScoreRequest(candidate=one, split="val", tasks=(1,)) for one in (search.seed, child)]
            )
        first, second = await all_rollouts(store)
        texts = [await text_of(store, rollout) for rollout in (first, second)]
    assert texts == [START, f"{START} plan"]
    assert (first.prompts, second.prompts) == ({"system": 1, "other": 1}, {"system": 2, "other": 1})


async def test_equal_requests_with_other_numbers_are_asked_again(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, searching(store, tmp_path, writer := Writer(store)) as search:
        for number in (0, 1, 0):
            assert await search.ask("0 |text", "edit", number) == "text verify"
    assert len(writer.prompts) == 2


async def test_groups_that_somebody_else_named_like_a_searchs_are_none() -> None:
    async with InMemoryLightningStore() as store:
        await store.create_run("test", {}, RUN)
        groups = ("optimize:0:val:1", "optimize:x:val:1", "optimize:0:val:", "optimize:0:val:0:0:0:0", "optimize")
        await store.enqueue([NewRollout(run_id=RUN, task={}, group_id=group, mode="eval") for group in groups])
        claims = await store.claim(status_here("worker", RUN, 0), lease_s=60.0, limit=len(groups))
        await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])
        assert await validation_rewards(store, RUN) == {0: {1: 0.0}}


async def test_a_version_that_somebody_adds_while_a_search_runs_is_mixed_into_nothing(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, prompted_agents(store):
        async with searching(store, tmp_path, Writer(store)) as search:
            mine = await add_version(store, RUN, "system", Template.of("Mine: {question}."))
            found = await searched(GreedySearch(rounds=1), search, 0)
            await promote_candidate(store, RUN, search.book.versions(found.best.number))
        rollouts = await all_rollouts(store)
    assert mine.version not in {rollout.prompts["system"] for rollout in rollouts}
