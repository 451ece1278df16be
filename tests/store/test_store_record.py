"""Conformance: calls, spans, rewards, resources, metrics, runs, workers' surroundings."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

import pytest
from store_samples import Clock, a_call, a_reward, a_run, a_span, a_worker, claimed, ending, new_id, one

from agentlightning.errors import ConflictError, InputError, NotFoundError, RewardError
from agentlightning.records import Checkpoint, Metric, Resource, RetryPolicy, VersionSpan
from agentlightning.store.base import LightningStore

# --- calls and spans --------------------------------------------------------------------------------------------------


async def test_calls_come_back_as_they_were_appended(store: LightningStore) -> None:
    [claim] = await claimed(store)
    root = a_call(claim, finished_ns=5)
    child = a_call(
        claim,
        parent_id=root.id,
        finished_ns=9,
        suffix_ids=[],
        sampled_ids=[2**31 - 1],
        logprobs=[-0.125],
        versions=[VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=1)],
        tools=None,
        fork_cause="the prompt was rewritten",
        agent="writer",
        span_id=f"{claim.rollout.id}.1.00f067aa0ba902b7",
        messages=[{"role": "tool", "content": "é\u0000"}],
    )
    text_path = a_call(claim, finished_ns=7, suffix_ids=[], sampled_ids=[], logprobs=[], versions=[], policy="")
    await store.append_calls([root, child])
    await store.append_calls([text_path])
    assert await store.calls([claim.rollout.id]) == [root, text_path, child]


async def test_appending_again_changes_nothing(store: LightningStore) -> None:
    [claim] = await claimed(store)
    call, span = a_call(claim), a_span(claim)
    await store.append_calls([call])
    await store.append_calls([a_call(claim, id=call.id, sampled_ids=[1], logprobs=[0.0])])
    await store.append_spans([span])
    await store.append_spans([span, span])
    assert await store.calls([claim.rollout.id]) == [call]
    assert await store.spans([claim.rollout.id]) == [span]


async def test_calls_are_marked_as_delivered_or_not(store: LightningStore) -> None:
    [claim] = await claimed(store)
    first, second = a_call(claim, finished_ns=5), a_call(claim, finished_ns=6, delivered=False)
    await store.append_calls([first, second])
    assert [call.delivered for call in await store.calls([claim.rollout.id])] == [True, False]
    await store.mark_delivered(claim.rollout.id, 1, [second.id, "no such call"], True)
    await store.mark_delivered(claim.rollout.id, 1, [first.id], False)
    await store.mark_delivered(claim.rollout.id, 2, [second.id], False)
    await store.mark_delivered(claim.rollout.id, 1, [], True)
    marked = [replace(first, delivered=False), replace(second, delivered=True)]
    assert await store.calls([claim.rollout.id]) == marked
    await store.append_calls([first])  # ids that exist are ignored
    assert await store.calls([claim.rollout.id]) == marked


async def test_concurrent_appends_are_all_there(store: LightningStore) -> None:
    claims = await claimed(store, 10)
    calls = [a_call(claims[number % 10], finished_ns=number) for number in range(100)]
    await asyncio.gather(*[store.append_calls([call]) for call in calls])
    found = await store.calls([claim.rollout.id for claim in claims])
    assert found == sorted(calls, key=lambda call: (call.rollout_id, call.finished_ns))


async def test_calls_are_of_the_latest_attempt_unless_one_is_named(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    first = a_call(claim)
    await store.append_calls([first])
    await store.finish([ending(claim, "failed")])
    [claim] = await store.claim(a_worker(claim.rollout.run_id))
    assert await store.calls([claim.rollout.id]) == []
    second = a_call(claim)
    await store.append_calls([second])
    assert await store.calls([claim.rollout.id]) == [second]
    assert await store.calls([claim.rollout.id], attempt=1) == [first]


async def test_a_call_of_no_attempt_is_refused_and_harms_no_other(store: LightningStore) -> None:
    [claim] = await claimed(store)
    good = [a_call(claim) for _ in range(10)]
    bad = a_call(claim, attempt=2)
    results = await asyncio.gather(
        *[store.append_calls([call]) for call in [*good[:5], bad, *good[5:]]], return_exceptions=True
    )
    [refusal] = [result for result in results if result is not None]
    assert isinstance(refusal, NotFoundError)
    assert "no attempt 2" in str(refusal)
    assert len(await store.calls([claim.rollout.id])) == 10


async def test_a_parent_of_another_rollout_is_refused_and_hinders_no_deletion(store: LightningStore) -> None:
    [theirs] = await claimed(store)
    [mine, other] = await claimed(store, 2)
    victim = a_call(theirs)
    await store.append_calls([victim])
    child = a_call(mine, parent_id=victim.id)
    same_id = a_call(mine, id=victim.id)  # ignored, or recorded as this rollout's own: by the store
    here = a_call(other)
    for calls in ([child], [here, a_call(mine, parent_id=here.id)], [a_call(mine, parent_id=new_id())]):
        with pytest.raises(NotFoundError, match="not recorded in their rollout"):
            await store.append_calls(calls)
    with contextlib.suppress(NotFoundError):
        await store.append_calls([same_id, child])
    assert await store.calls([other.rollout.id]) == []
    await store.finish([ending(theirs)])
    assert await store.drop_records([theirs.rollout.id]) == 1
    assert await store.delete_runs([theirs.rollout.run_id]) == 1


async def test_calls_that_make_no_sense_are_bad_input(store: LightningStore) -> None:
    [claim] = await claimed(store)
    table: list[tuple[dict[str, object], str]] = [
        ({"logprobs": [-1.0]}, "logprobs: expected one for each of 2"),
        ({"logprobs": [-1.0, float("-inf")]}, "logprobs"),
        ({"suffix_ids": [2**31]}, "suffix_ids: expected 32-bit integers"),
    ]
    for fields, said in table:
        with pytest.raises(InputError, match=said):
            await store.append_calls([a_call(claim, **fields)])
    assert await store.calls([claim.rollout.id]) == []


async def test_a_span_comes_back_with_all_that_opentelemetry_says_of_it(store: LightningStore) -> None:
    [claim] = await claimed(store)
    span = a_span(
        claim,
        "tool é",
        parent_id=f"{claim.rollout.id}.1.00f067aa0ba902b7",
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        kind="client",
        status="error",
        status_message="no such table: \u00e9",
        events=[{"name": "exception", "time_ns": 2**62, "attributes": {"exception.type": "ValueError"}}],
        attributes={"deep": [{"a": [1.5, True, None]}]},
    )
    await store.append_spans([span])
    assert await store.spans([claim.rollout.id]) == [span]


async def test_spans_come_by_rollout_and_start(store: LightningStore) -> None:
    a, b = await claimed(store, 2)
    spans = [a_span(b, started_ns=1), a_span(a, started_ns=3, attributes={"x": [1, None]}), a_span(a, started_ns=2)]
    await store.append_spans(spans)
    assert await store.spans([b.rollout.id, a.rollout.id]) == [spans[2], spans[1], spans[0]]


async def test_appending_nothing_is_nothing(store: LightningStore) -> None:
    await store.append_calls([])
    await store.append_spans([])
    await store.record_rewards([])
    await store.log_metrics([])
    assert await store.calls([]) == []


# --- rewards ----------------------------------------------------------------------------------------------------------


async def test_rewards_come_by_rollout_and_creation(store: LightningStore, clock: Clock) -> None:
    a, b = await claimed(store, 2)
    call = a_call(a)
    await store.append_calls([call])
    late = a_reward(a, 1.0, "emitted", call_id=call.id, created_ns=clock.now_ns + 5)
    early = a_reward(a, 0.5, "emitted")
    other = a_reward(b, 2.0, "posted", name="style")
    await store.record_rewards([late, other, early, early])
    found = await store.rewards([b.rollout.id, a.rollout.id])
    assert [reward.id for reward in found] == [early.id, late.id, other.id]
    assert [reward.created_ns for reward in found] == [clock.now_ns, clock.now_ns + 5, clock.now_ns]
    assert found[1] == late


async def test_a_reward_that_is_no_finite_number_is_refused(store: LightningStore) -> None:
    [claim] = await claimed(store)
    for value in (float("nan"), float("-inf"), "high"):
        with pytest.raises(RewardError, match="expected a finite number"):
            await store.record_rewards([a_reward(claim, 1.0), a_reward(claim, value)])
    assert await store.rewards([claim.rollout.id]) == []


async def test_a_reward_after_the_finish_is_kept_and_changes_nothing(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),))])
    await store.record_rewards([a_reward(claim, 0.0, "posted")])
    assert len(await store.rewards([claim.rollout.id])) == 2
    assert [rollout.reward for rollout in await store.wait(claim.rollout.run_id)] == [1.0]


async def test_a_reward_of_no_attempt_or_call_is_refused(store: LightningStore) -> None:
    [claim] = await claimed(store)
    with pytest.raises(NotFoundError, match="no attempt 7"):
        await store.record_rewards([a_reward(claim, 1.0, attempt=7)])
    with pytest.raises(NotFoundError, match="not recorded"):
        await store.record_rewards([a_reward(claim, 1.0, call_id="unknown")])


async def test_a_reward_for_a_call_of_another_rollout_is_refused_and_hinders_no_deletion(
    store: LightningStore,
) -> None:
    [theirs] = await claimed(store)
    [mine] = await claimed(store)
    victim = a_call(theirs)
    await store.append_calls([victim])
    with pytest.raises(NotFoundError, match="not recorded in their rollout"):
        await store.record_rewards([a_reward(mine, 1.0), a_reward(mine, 1.0, "emitted", call_id=victim.id)])
    assert await store.finish([ending(mine, rewards=(a_reward(mine, 1.0, "emitted", call_id=victim.id),))]) == [True]
    failed = await one(store, mine.rollout.id)
    assert failed.state == "failed"
    assert failed.error == f"reward: expected call_id to name a recorded call of the rollout, got {victim.id}"
    assert await store.rewards([mine.rollout.id]) == []
    await store.finish([ending(theirs)])
    assert await store.drop_records([theirs.rollout.id]) == 1
    assert await store.delete_runs([theirs.rollout.run_id]) == 1


async def test_a_reward_names_a_call_of_an_earlier_attempt_of_its_rollout(store: LightningStore) -> None:
    [first] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    call = a_call(first)
    await store.append_calls([call])
    await store.finish([ending(first, "failed")])
    [second] = await store.claim(a_worker(first.rollout.run_id))
    await store.record_rewards([a_reward(second, 0.5, "emitted", call_id=call.id)])
    [reward] = await store.rewards([first.rollout.id])
    assert (reward.attempt, reward.call_id) == (2, call.id)


# --- resources --------------------------------------------------------------------------------------------------------


async def test_versions_of_resources_count_up_and_are_never_used_twice(store: LightningStore, clock: Clock) -> None:
    run_id, other = await a_run(store), await a_run(store)
    policy = Resource(run_id=run_id, name="default", kind="policy", value={"endpoints": ["http://e"]}, parent=0, step=3)
    prompt = Resource(run_id=run_id, name="system", kind="prompt_template", value={"text": "hi"})
    stored = await store.put_resources([policy, prompt, policy])
    assert [resource.version for resource in stored] == [1, 1, 2]
    assert stored[0].created_ns == clock.now_ns
    again = await asyncio.gather(*[store.put_resources([policy]) for _ in range(5)])
    assert sorted(resource.version for [resource] in again) == [3, 4, 5, 6, 7]
    assert [(r.name, r.version) for r in await store.resources(run_id)] == [("default", 7), ("system", 1)]
    assert [r.version for r in await store.resources(run_id, "default", latest=False)] == [1, 2, 3, 4, 5, 6, 7]
    assert (await store.resources(run_id, "system"))[0] == stored[1]
    assert [(r.name, r.version) for r in await store.resources(run_id, "default", version=2)] == [("default", 2)]
    assert [r.name for r in await store.resources(run_id, version=1)] == ["default", "system"]
    assert await store.resources(run_id, "system", version=2) == []
    assert await store.resources(other) == []
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.put_resources([Resource(run_id="nowhere", name="x", kind="policy", value={})])


async def test_of_several_who_put_after_the_same_version_one_does(store: LightningStore) -> None:
    run_id = await a_run(store)
    routes = Resource(run_id=run_id, name="routes", kind="routes", value={"stable": 1})
    other = Resource(run_id=run_id, name="default", kind="policy", value={})
    for newest in (0, 1):
        puts = [store.put_resources([other, routes], {"routes": newest}) for _ in range(5)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        [stored] = [each for each in outcomes if isinstance(each, list)]
        assert [one.version for one in stored] == [newest + 1, newest + 1]
        refused = [each for each in outcomes if isinstance(each, ConflictError)]
        sentence = f"resources: the newest version of routes of run {run_id} is {newest + 1}, not {newest}"
        assert [str(each) for each in refused] == [sentence] * 4
    assert [(one.name, one.version) for one in await store.resources(run_id)] == [("default", 2), ("routes", 2)]
    [stored] = await store.put_resources([other], {"routes": 7})  # says nothing of what is not put
    assert stored.version == 3


# --- metrics ----------------------------------------------------------------------------------------------------------


async def test_metrics_come_by_step_name_and_time(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await store.log_metrics([Metric(run_id=run_id, step=2, name="loss", value=1.5, created_ns=7)])
    await store.log_metrics([Metric(run_id=run_id, step=1, name=name, value=1) for name in ("reward", "loss")])
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=2)])
    found = await store.metrics(run_id)
    assert [(metric.step, metric.name, metric.value) for metric in found] == [
        (1, "loss", 1.0),
        (1, "loss", 2.0),
        (1, "reward", 1.0),
        (2, "loss", 1.5),
    ]
    assert [metric.created_ns for metric in found] == [clock.now_ns] * 3 + [7]
    assert [metric.name for metric in await store.metrics(run_id, "reward")] == ["reward"]
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.log_metrics([Metric(run_id="nowhere", step=1, name="x", value=1)])


async def test_a_metric_that_is_no_finite_number_is_kept_as_nan_and_one_that_no_database_holds_is_bad_input(
    store: LightningStore,
) -> None:
    run_id = await a_run(store)
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=float("inf"))])
    with pytest.raises(InputError, match="64 bits"):
        await store.log_metrics([Metric(run_id=run_id, step=2**63, name="x", value=1)])
    [metric] = await store.metrics(run_id)
    assert math.isnan(metric.value)


# --- runs and checkpoints ---------------------------------------------------------------------------------------------


async def test_runs_are_listed_newest_first_with_readable_sortable_ids(store: LightningStore, clock: Clock) -> None:
    made = []
    for number in range(3):
        made.append(await store.create_run(f"run {number}", {"number": number}))
        clock.advance(0.001)
    assert [run.state for run in made] == ["running"] * 3
    assert made[1].config == {"number": 1}
    assert made[0].id.startswith("20270115-")
    assert await store.runs() == made[::-1]
    assert await store.runs(limit=1) == made[2:]
    assert await store.runs(ids=[made[0].id, "unknown"]) == made[:1]


async def test_a_run_id_that_exists_is_a_conflict_and_a_bad_one_bad_input(store: LightningStore) -> None:
    assert len({run.id for run in await asyncio.gather(*[store.create_run("same", {}) for _ in range(5)])}) == 5
    await store.create_run("mine", {}, run_id="my-run.1")
    with pytest.raises(ConflictError, match=r"my-run\.1"):
        await store.create_run("mine", {}, run_id="my-run.1")
    with pytest.raises(InputError, match="run_id"):
        await store.create_run("mine", {}, run_id="../up")


async def test_updating_a_run_merges_its_summary(store: LightningStore, clock: Clock) -> None:
    run = await store.create_run("a", {})
    await store.update_run(run.id, summary={"step": 1, "reward": 0.5})
    clock.advance(1)
    updated = await store.update_run(run.id, state="finished", summary={"step": 2})
    assert (updated.state, updated.summary) == ("finished", {"step": 2, "reward": 0.5})
    assert (updated.created_ns, updated.updated_ns) == (run.created_ns, clock.now_ns)
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.update_run("nowhere", state="failed")


async def test_a_checkpoint_replaces_the_earlier_one_of_its_step(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    for step, path in ((2, "/c/2"), (1, "/c/1"), (2, "/c/2-again")):
        await store.put_checkpoint(Checkpoint(run_id=run_id, step=step, path=path, version=step))
    assert await store.checkpoints(run_id) == [
        Checkpoint(run_id=run_id, step=1, path="/c/1", version=1, created_ns=clock.now_ns),
        Checkpoint(run_id=run_id, step=2, path="/c/2-again", version=2, created_ns=clock.now_ns),
    ]
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.put_checkpoint(Checkpoint(run_id="nowhere", step=1, path="/c", version=1))
    with pytest.raises(ConflictError, match=r"step -1 .* 0 or more"):  # it would come before all others
        await store.put_checkpoint(Checkpoint(run_id=run_id, step=-1, path="/c", version=1))
    assert [one.step for one in await store.checkpoints(run_id)] == [1, 2]
