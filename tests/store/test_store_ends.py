"""Ends of attempts: what is retried, which reward is final, and what is said where no call was recorded."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from store_samples import a_call, a_reward, a_span, a_worker, claimed, ending, finished, one, some, states

from agentlightning.records import JSON, AttemptEnd, RetryPolicy
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import (
    BROKEN_SPANS,
    FAILED_CALLS,
    LIMIT_REACHED,
    NO_CALLS,
    OUTGROWN,
    REFUSED_CALLS,
)
from agentlightning.store.rules import broken_warning
from agentlightning.store.summaries import SummaryQuery

DEADLINE_S = 20.0
"""For waits that are expected to end much sooner, by a push."""


async def test_failures_are_retried_until_max_attempts(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=3))
    for state in ("failed", "timed_out"):
        await store.finish([ending(claim, state, error="boom")])
        queued = await one(store, claim.rollout.id)
        assert (queued.state, queued.error, queued.finished_seq) == ("queued", "boom", None)
        [claim] = await store.claim(a_worker(claim.rollout.run_id))
    await store.finish([ending(claim, "failed", error="at last", output="printed")])
    failed = await one(store, claim.rollout.id)
    assert (failed.state, failed.error, failed.finished_seq, failed.attempt) == ("failed", "at last", 1, 3)
    attempts = await store.attempts([claim.rollout.id])
    assert [attempt.state for attempt in attempts] == ["failed", "timed_out", "failed"]
    assert attempts[2].output == "printed"


async def test_an_end_that_the_policy_does_not_retry_fails_at_once(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=3, retry_on=("timed_out",)))
    await store.finish([ending(claim, "failed")])
    assert await states(store, [claim]) == ["failed"]


async def test_lost_attempts_use_up_no_attempt_but_have_a_cap(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2, max_lost=3))
    ends = ["lost", "failed", "lost", "lost"]
    seen = []
    for number, state in enumerate(ends):
        await store.finish([ending(claim, state, error=state)])  # type: ignore[arg-type]
        rollout = await one(store, claim.rollout.id)
        seen.append((rollout.state, rollout.lost))
        if number < len(ends) - 1:
            [claim] = await store.claim(a_worker(claim.rollout.run_id))
    assert seen == [("queued", 1), ("queued", 1), ("queued", 2), ("failed", 3)]


async def test_a_success_after_a_failure_leaves_no_error(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    await store.finish([ending(claim, "failed", error="boom")])
    [claim] = await store.claim(a_worker(claim.rollout.run_id))
    await store.append_calls([a_call(claim)])
    await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),))])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.error, rollout.reward, rollout.warning) == ("succeeded", None, 1.0, None)


async def test_text_that_is_no_unicode_is_kept_readable(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.finish([ending(claim, "failed", error="half \ud83d and nul \0", output="é")])
    error = (await one(store, claim.rollout.id)).error
    assert error is not None
    assert error.startswith("half ?")
    assert (await store.attempts([claim.rollout.id]))[0].output == "é"


async def test_cancelled_rollouts_are_finished_and_their_leases_stale(store: LightningStore) -> None:
    claims = await finished(store)
    run_id = claims[0].rollout.run_id
    queued, running = await store.enqueue(some(run_id, 2, group_id="h"))
    [claim] = await store.claim(a_worker(run_id))
    assert await store.cancel([queued.id, running.id, claims[0].rollout.id, "unknown"]) == 2
    assert await store.cancel([queued.id, running.id]) == 0
    assert await store.finish([ending(claim)]) == [False]
    assert await store.count(run_id) == {("train", "succeeded"): 1, ("train", "cancelled"): 2}
    assert [attempt.state for attempt in await store.attempts([claim.rollout.id])] == ["lost"]
    assert len(await store.wait(run_id, after=1)) == 2


async def test_finishes_of_many_callers_are_each_answered(store: LightningStore) -> None:
    claims = await claimed(store, 30)
    answers = await asyncio.gather(*[store.finish([ending(claim)]) for claim in [*claims, *claims]])
    assert sum(answer == [True] for answer in answers) == 30
    rollouts = await store.wait(claims[0].rollout.run_id, at_least=30)
    assert [rollout.finished_seq for rollout in rollouts] == list(range(1, 31))


# --- rewards at the end -----------------------------------------------------------------------------------------------


async def test_the_last_emitted_reward_without_a_call_is_final(store: LightningStore) -> None:
    [claim] = await claimed(store)
    call = a_call(claim)
    await store.append_calls([call])
    last = (a_reward(claim, 0.2, "emitted"), a_reward(claim, 0.9, "emitted", call_id=call.id))
    await store.record_rewards([a_reward(claim, 0.1, "emitted")])
    await store.finish([ending(claim, rewards=last)])
    assert (await one(store, claim.rollout.id)).reward == 0.2


async def test_contradictory_final_rewards_fail_the_attempt_with_the_sentence(store: LightningStore) -> None:
    [claim] = await claimed(store)
    rewards = (a_reward(claim, 1.0, "return"), a_reward(claim, 0.0, "function"))
    assert await store.finish([ending(claim, rewards=rewards)]) == [True]
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.reward) == ("failed", None)
    assert rollout.error is not None
    assert "function, return" in rollout.error


async def test_a_reward_that_is_no_number_fails_its_attempt_only(store: LightningStore) -> None:
    claims = await claimed(store, 3)
    values = (math.nan, math.inf, 1.0)
    finishes = [ending(claim, rewards=(a_reward(claim, value),)) for claim, value in zip(claims, values, strict=True)]
    assert await store.finish(finishes) == [True] * 3
    assert await states(store, claims) == ["failed", "failed", "succeeded"]
    for bad in claims[:2]:
        assert "finite number" in ((await one(store, bad.rollout.id)).error or "")


async def test_only_rewards_of_the_successful_attempt_count(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    await store.finish([ending(claim, "failed", rewards=(a_reward(claim, 0.5),))])
    [again] = await store.claim(a_worker(claim.rollout.run_id))
    await store.finish([ending(again)])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.reward) == ("succeeded", None)
    assert [reward.attempt for reward in await store.rewards([claim.rollout.id])] == [1]


async def test_rewards_that_come_with_a_finish_belong_to_its_lease(store: LightningStore) -> None:
    mine, other = await claimed(store, 2)
    await store.finish([ending(mine, rewards=(a_reward(other, 1.0),))])
    assert [reward.rollout_id for reward in await store.rewards([mine.rollout.id, other.rollout.id])] == [
        mine.rollout.id
    ]


# --- attempts without a call ------------------------------------------------------------------------------------------


async def test_an_attempt_without_a_call_is_named_with_the_likely_cause(store: LightningStore) -> None:
    silent, diagnosed, misled = await claimed(store, 3)
    await store.append_spans([a_span(misled, "gateway.unknown_route", attributes={"path": "/chat/completions"})])
    await store.finish(
        [ending(silent), ending(diagnosed, diagnosis="HTTP_PROXY is set"), ending(misled, diagnosis="?")]
    )
    warnings = [(await one(store, claim.rollout.id)).warning or "" for claim in (silent, diagnosed, misled)]
    assert all(warning.startswith(NO_CALLS) for warning in warnings)
    assert "did not use the base URL" in warnings[0]
    assert "HTTP_PROXY is set" in warnings[1]
    assert "/chat/completions" in warnings[2]


async def test_a_failed_attempt_without_a_call_is_named_too_but_not_a_lost_one(store: LightningStore) -> None:
    failed, lost = await claimed(store, 2)
    await store.finish([ending(failed, "failed", error="404"), ending(lost, "lost")])
    assert (await one(store, failed.rollout.id)).warning is not None
    assert (await one(store, lost.rollout.id)).warning is None


async def test_a_span_that_only_looks_like_one_about_broken_spans_ends_nothing(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.append_calls([a_call(claim)])
    for attributes in ({"resource.service.name": "agent"}, {"resource.service.name": "agent", "cycle": 1}):
        await store.append_spans([a_span(claim, BROKEN_SPANS, attributes=attributes)])
    await store.finish([ending(claim)])
    assert (await one(store, claim.rollout.id)).warning == broken_warning({"cycle": 1})


async def test_what_was_wrong_with_spans_is_summed_by_cause_into_the_warning(store: LightningStore) -> None:
    told, silent, other = await claimed(store, 3)
    await store.append_calls([a_call(told), a_call(other)])
    counted = a_span(told, BROKEN_SPANS, attributes={"cycle": 2})
    await store.append_spans([counted, a_span(told, BROKEN_SPANS, attributes={"cycle": 1, "absent_id": 4})])
    await store.append_spans([counted, a_span(silent, BROKEN_SPANS, attributes={"cycle": 1}), a_span(other)])
    await store.finish([ending(told), ending(silent), ending(other)])
    warnings = [(await one(store, claim.rollout.id)).warning for claim in (told, silent, other)]
    assert warnings[0] == broken_warning({"cycle": 3, "absent_id": 4})
    assert (warnings[1] or "").startswith(NO_CALLS)
    assert (warnings[1] or "").endswith("; " + broken_warning({"cycle": 1}))
    assert warnings[2] is None


async def test_refused_calls_are_summed_by_field_and_said_before_any_guess(store: LightningStore) -> None:
    silent, going_on, other = await claimed(store, 3)
    first = a_span(silent, REFUSED_CALLS, attributes={"fields": "tools", "count": 1, "message": "no"})
    await store.append_spans([first, a_span(silent, "gateway.unknown_route", attributes={"path": "/"})])
    await store.append_spans(
        [first, a_span(silent, REFUSED_CALLS, attributes={"fields": "context_management", "count": 2})]
    )
    await store.append_spans(
        [a_span(going_on, REFUSED_CALLS, attributes={"fields": "top_a", "count": 1}), a_span(other)]
    )
    await store.append_spans([a_span(other, REFUSED_CALLS, attributes={"fields": 1, "count": "x"})])
    await store.append_calls([a_call(going_on), a_call(other)])
    await store.finish([ending(silent, diagnosis="HTTP_PROXY is set"), ending(going_on), ending(other)])
    found = [await one(store, claim.rollout.id) for claim in (silent, going_on, other)]
    assert [rollout.warning for rollout in found] == [
        f"{NO_CALLS}: 3 calls refused: context_management 2, tools 1",
        "1 call refused: top_a 1",
        None,
    ]
    assert [(rollout.state, rollout.refused) for rollout in found] == [("succeeded", False)] * 3


async def test_a_failure_after_a_refused_call_is_refused_and_not_tried_again(store: LightningStore) -> None:
    refused, mended, timed_out = await claimed(store, 3, retry=RetryPolicy(max_attempts=2))
    for claim in (refused, mended, timed_out):
        await store.append_calls([a_call(claim, finished_ns=5)])
        spoken = {"fields": "top_a", "count": 1}
        await store.append_spans([a_span(claim, REFUSED_CALLS, attributes=spoken, started_ns=10, finished_ns=10)])
    await store.append_calls([a_call(mended, finished_ns=20)])
    await store.finish(
        [ending(refused, "failed", error="400"), ending(mended, "failed"), ending(timed_out, "timed_out")]
    )
    found = [await one(store, claim.rollout.id) for claim in (refused, mended, timed_out)]
    assert [rollout.state for rollout in found] == ["failed", "queued", "queued"]
    assert [rollout.refused for rollout in found] == [True, False, False]
    assert found[0].warning == "1 call refused: top_a 1"
    assert found[0].error == "400"


async def test_a_failure_after_the_context_was_outgrown_is_tried_again_and_not_refused(store: LightningStore) -> None:
    [claim] = await claimed(store, 1, retry=RetryPolicy(max_attempts=2))
    await store.append_calls([a_call(claim, finished_ns=5)])
    outgrown = {"fields": OUTGROWN, "count": 1}
    await store.append_spans([a_span(claim, REFUSED_CALLS, attributes=outgrown, started_ns=10, finished_ns=10)])
    await store.finish([ending(claim, "failed", error="400")])
    found = await one(store, claim.rollout.id)
    assert (found.state, found.refused) == ("queued", False)
    assert found.warning == "1 call refused: context_length_exceeded 1"


async def test_what_air_saw_of_a_rollout_is_never_its_final_reward(store: LightningStore) -> None:
    given, unrewarded = await claimed(store, 2)
    await store.record_rewards([a_reward(given, 0.5, "emitted"), a_reward(given, -1.0, "air", name="air.retries")])
    await store.record_rewards([a_reward(unrewarded, -1.0, "air", name="air.retries")])
    await store.finish([ending(given, rewards=(a_reward(given, 1.0),)), ending(unrewarded)])
    assert [(await one(store, claim.rollout.id)).reward for claim in (given, unrewarded)] == [1.0, None]
    assert {reward.source for reward in await store.rewards([unrewarded.rollout.id])} == {"air"}


async def test_only_an_agent_that_exits_by_itself_after_it_sampled_gave_up(store: LightningStore) -> None:
    async def failed(
        *events: tuple[str, JSON], calls: int = 1, state: AttemptEnd = "failed", exited: bool = True
    ) -> bool:
        [claim] = await claimed(store)
        await store.append_calls([a_call(claim, finished_ns=5) for _ in range(calls)])
        for name, attributes in events:
            await store.append_spans([a_span(claim, name, attributes=attributes, started_ns=10, finished_ns=10)])
        await store.finish([ending(claim, state, error="boom", exited=exited)])
        return (await one(store, claim.rollout.id)).gave_up

    refused = {"fields": "top_a", "count": 1}
    assert await failed()
    assert not await failed(calls=0)
    assert not await failed(exited=False)
    assert not await failed(state="timed_out")
    assert not await failed(state="lost")
    assert not await failed((FAILED_CALLS, {"status": 503, "message": "no engine"}))
    assert not await failed((REFUSED_CALLS, refused))


@pytest.mark.parametrize(
    ("state", "options", "event", "cause"),
    [
        ("succeeded", {}, None, "policy"),
        ("failed", {"error": "boom", "exited": True}, None, "agent"),
        ("failed", {"error": "boom", "exited": True}, (REFUSED_CALLS, {"fields": "top_a", "count": 1}), "refused"),
        ("failed", {"error": "boom", "exited": True}, (REFUSED_CALLS, {"fields": OUTGROWN, "count": 1}), "limit"),
        ("failed", {"error": "boom"}, (LIMIT_REACHED, {"setting": "limits.attempt.max_calls"}), "limit"),
        ("timed_out", {"error": "late"}, None, "timeout"),
        ("failed", {"error": "scorer", "cause": "verifier"}, None, "verifier"),
        ("lost", {"error": "gone"}, None, "infra"),
        ("failed", {"error": "boom", "exited": True}, (FAILED_CALLS, {"status": 502, "message": "no engine"}), "infra"),
        ("timed_out", {"error": "late"}, (FAILED_CALLS, {"status": 502, "message": "no engine"}), "infra"),
        ("succeeded", {}, (FAILED_CALLS, {"status": 502, "message": "no engine"}), "infra"),
    ],
)
async def test_every_attempt_ends_with_one_cause(
    store: LightningStore, state: AttemptEnd, options: dict[str, Any], event: tuple[str, JSON] | None, cause: str
) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_lost=1))
    await store.append_calls([a_call(claim, finished_ns=5)])
    if event is not None:
        await store.append_spans([a_span(claim, event[0], attributes=event[1], started_ns=10, finished_ns=10)])
    await store.finish([ending(claim, state, **options)])
    rollout, [attempt] = await one(store, claim.rollout.id), await store.attempts([claim.rollout.id])
    assert (rollout.cause, attempt.cause) == (cause, cause)
    assert (attempt.state == "lost") == (cause == "infra") == (rollout.lost == 1)
    assert rollout.judged == (cause not in ("infra", "verifier"))
    found = await store.summaries(SummaryQuery(where=f"cause = '{cause}'", run_id=rollout.run_id))
    assert [row.id for row in found.rows] == [rollout.id]


async def test_a_reward_after_a_model_went_away_is_no_reward_and_the_rollout_is_tried_again(
    store: LightningStore,
) -> None:
    [claim] = await claimed(store)
    await store.append_calls([a_call(claim, finished_ns=5)])
    await store.append_spans([a_span(claim, FAILED_CALLS, attributes={"message": "no engine"}, started_ns=10)])
    await store.finish([ending(claim, rewards=(a_reward(claim, 0.0),))])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.reward, rollout.lost) == ("queued", None, 1)
    assert rollout.error == "the last model call failed: no engine"


async def test_a_cancelled_rollout_has_no_cause(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.cancel([claim.rollout.id])
    [attempt] = await store.attempts([claim.rollout.id])
    assert (attempt.state, attempt.cause) == ("lost", None)


async def test_an_agent_gives_up_that_got_over_a_call_without_a_model(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.append_spans([a_span(claim, FAILED_CALLS, attributes={"status": 503}, started_ns=3, finished_ns=3)])
    await store.append_calls([a_call(claim, finished_ns=5)])
    await store.finish([ending(claim, "failed", error="boom", exited=True)])
    assert (await one(store, claim.rollout.id)).gave_up
