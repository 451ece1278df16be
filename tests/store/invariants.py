"""What must hold in every store whatever was killed: `violations` reads a store at rest and says what does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.records import FINAL_STATES, Attempt, Call, Resource, Reward, Rollout, Span, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.scan import read_calls, read_rollouts, read_steps
from agentlightning.store.summaries import RolloutSummary, SummaryQuery


async def violations(store: LightningStore) -> list[str]:
    """A sentence for each thing that is wrong."""
    found = [sentence for run in await store.runs() for sentence in await _of_run(store, run.id)]
    for alias in await store.aliases():
        versions = {version.number: version for version in await store.models(alias.name)}
        found += check_alias_target(alias, versions)
    return found


async def _of_run(store: LightningStore, run_id: str) -> list[str]:
    found = list(check_versions(await store.resources(run_id, latest=False)))
    newest = {one.name: one.version for one in await store.resources(run_id) if one.kind == "policy"}
    steps = [step async for portion in read_steps(store, run_id) for step in portion]
    rollouts = {one.id: one async for portion in read_rollouts(store, RolloutQuery(run_id=run_id)) for one in portion}
    for previous, step in zip([None, *steps], steps, strict=False):
        found += check_step_order(previous, step, max(newest.values(), default=0))
        listed = await store.rollouts(RolloutQuery(ids=[one.rollout_id for one in step.consumed]))
        found += check_step_list(step, {one.id: one for one in listed})
    found += await _of_checkpoints(store, run_id, steps)
    summaries = await _summaries(store, run_id)
    async for portion in read_rollouts(store, RolloutQuery(run_id=run_id)):
        for record in await _records(store, portion):
            found += check_record(record, newest)
            if record.rollout.state in FINAL_STATES:
                found += check_summary(record.rollout, summaries.get(record.rollout.id))
    counts, seen = await store.count(run_id), Counter((one.mode, one.state) for one in rollouts.values())
    if counts != dict(seen):
        found.append(f"its rollouts are counted as {counts}, but there are {dict(seen)}")
    consumed, outcomes = (
        sum(len(step.consumed) for step in steps),
        sum(one.outcome is not None for one in rollouts.values()),
    )
    if consumed != outcomes:
        found.append(f"its steps list {consumed} rollouts, but {outcomes} rollouts have an outcome")
    return [f"run {run_id}: {sentence}" for sentence in found + await _of_places(store, run_id, rollouts)]


async def _of_checkpoints(store: LightningStore, run_id: str, steps: Sequence[Step]) -> list[str]:
    [run] = await store.runs([run_id])
    data = run.config.get("data", {})
    if data.get("from_run") and data.get("train") is None:
        return []  # an offline run consumes nothing, and has no steps
    known = {step.step for step in steps}
    return [
        f"there is a checkpoint of step {one.step}, but no such step"
        for one in await store.checkpoints(run_id)
        if one.step > 0 and one.step not in known
    ]


async def _of_places(store: LightningStore, run_id: str, rollouts: Mapping[str, Rollout]) -> list[str]:
    """Places in the order of finished rollouts are 1, 2, 3, … without a gap or a double."""
    places, last = [], 0
    while page := await store.wait(run_id, last, 1, 0.0):
        places += [rollout.finished_seq or 0 for rollout in page]
        last = places[-1]
    finished = sum(rollout.state in FINAL_STATES for rollout in rollouts.values())
    return [] if places == list(range(1, finished + 1)) else [f"{finished} rollouts finished in the places {places}"]


async def _summaries(store: LightningStore, run_id: str) -> dict[str, RolloutSummary]:
    found, after = {}, None
    while True:
        page = await store.summaries(SummaryQuery(run_id=run_id, limit=1000, after=after))
        found |= {row.id: row for row in page.rows}
        if (after := page.next) is None:
            return found


async def _records(store: LightningStore, portion: Sequence[Rollout]) -> list[RolloutRecord]:
    ids = [rollout.id for rollout in portion]
    records = {rollout.id: RolloutRecord(rollout) for rollout in portion}
    for attempt in await store.attempts(ids):
        records[attempt.rollout_id].attempts.append(attempt)
    for call in await read_calls(store, portion):
        records[call.rollout_id].calls.append(call)
    for span in await store.spans(ids):
        records[span.rollout_id].spans.append(span)
    for reward in await store.rewards(ids):
        records[reward.rollout_id].rewards.append(reward)
    return list(records.values())


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Everything about one rollout; calls in the order they finished."""

    rollout: Rollout
    attempts: list[Attempt] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)


def check_record(record: RolloutRecord, newest: Mapping[str, int]) -> Iterator[str]:
    """`newest`: the last version of each policy, read after the calls."""
    for sentence in (*_of_attempts(record), *_of_end(record), *_of_belongings(record), *_of_calls(record, newest)):
        yield f"rollout {record.rollout.id}: {sentence}"


def check_summary(rollout: Rollout, summary: RolloutSummary | None) -> Iterator[str]:
    """A finished rollout against its summary, which was read after it."""
    if summary is None:
        yield f"rollout {rollout.id}: it has finished, and has no summary"
        return
    for name in ("run_id", "mode", "step", "state", "reward", "lost", "refused", "finished_ns", "finished_seq"):
        mine, its = getattr(rollout, name), getattr(summary, name)
        if mine != its:
            yield f"rollout {rollout.id}: its {name} is {mine!r}, and {its!r} in its summary"
    if rollout.outcome is not None and summary.outcome != rollout.outcome:
        yield f"rollout {rollout.id}: its outcome is {rollout.outcome!r}, and {summary.outcome!r} in its summary"


def check_versions(resources: Sequence[Resource]) -> Iterator[str]:
    """All versions of all resources of a run, by name and in order."""
    last: dict[str, int] = {}
    for one in resources:
        before = last.get(one.name, 0)
        if one.version == before:
            yield f"version {one.version} of resource {one.name!r} was used twice"
        elif one.version < before:
            yield f"version {one.version} of resource {one.name!r} comes after version {before}"
        last[one.name] = one.version


def check_step_order(previous: Step | None, step: Step, newest: int) -> Iterator[str]:
    """One step and the one before it; `newest`: the last version of any policy, 0 where there is none."""
    where = f"step {step.step}"
    if step.state == "closed" and step.version is None:
        yield f"{where} is closed and has no version"
    if step.version is not None and step.version > newest > 0:
        yield f"{where} published version {step.version}, but the last that exists is {newest}"
    if previous is None:
        return
    if step.step == previous.step:
        yield f"{where} is there twice"
    elif step.step != previous.step + 1:
        yield f"{where} follows step {previous.step}: there is none between them"
    if previous.state == "open" and step.state == "closed":
        yield f"{where} is closed, but step {previous.step} before it is open"
    if step.version is not None and previous.version is not None and step.version <= previous.version:
        yield f"{where} published version {step.version}, and step {previous.step} before it {previous.version}"


def check_step_list(step: Step, found: Mapping[str, Rollout]) -> Iterator[str]:
    """A step's list; `found`: the rollouts on it that exist."""
    where = f"step {step.step} lists rollout"
    seen = set()
    for consumed in step.consumed:
        rollout = found.get(consumed.rollout_id)
        if consumed.rollout_id in seen:
            yield f"{where} {consumed.rollout_id} twice"
        elif rollout is None:
            yield f"{where} {consumed.rollout_id}, which does not exist"
        elif rollout.run_id != step.run_id:
            yield f"{where} {rollout.id}, which belongs to run {rollout.run_id}"
        elif rollout.mode != "train":
            yield f"{where} {rollout.id}, which is for evaluation"
        elif rollout.state not in FINAL_STATES:
            yield f"{where} {rollout.id}, which is {rollout.state}, not finished"
        elif rollout.outcome != consumed.outcome:
            yield f"{where} {rollout.id} as {consumed.outcome}, but the rollout says {rollout.outcome}"
        seen.add(consumed.rollout_id)


def check_alias_target(alias: ModelAlias, versions: Mapping[int, ModelVersion]) -> Iterator[str]:
    """An alias; `versions`: those of its name by number."""
    for number in (alias.number, alias.previous):
        version = None if number is None else versions.get(number)
        if number is not None and version is None:
            yield f"alias {alias.name}@{alias.alias} names version {number}, which does not exist"
        elif version is not None and version.deleted:
            yield f"alias {alias.name}@{alias.alias} names version {number}, whose weights were deleted"


def _of_attempts(record: RolloutRecord) -> Iterator[str]:
    rollout, attempts = record.rollout, record.attempts
    numbers = [attempt.attempt for attempt in attempts]
    if numbers != list(range(1, rollout.attempt + 1)):
        yield f"its attempts should be 1 to {rollout.attempt}, and are {numbers}"
        return
    lost = sum(attempt.state == "lost" for attempt in attempts)
    running = [attempt.attempt for attempt in attempts if attempt.state == "running"]
    last = attempts[-1].state if attempts else None
    if len(running) > 1:
        yield f"attempts {running} are running at a time"
    if rollout.state == "running" and running != [rollout.attempt]:
        yield f"it is running, but its last attempt is {last}"
    if rollout.state != "running" and running:
        yield f"it is {rollout.state}, but attempt {running[0]} is running"
    if (rollout.state == "succeeded") != (last == "succeeded"):
        yield f"it is {rollout.state}, but its last attempt {last}"
    if rollout.lost != lost:
        yield f"it counts {rollout.lost} lost attempts, but there are {lost}"
    for attempt in attempts:
        if (attempt.finished_ns is None) != (attempt.state == "running"):
            yield f"attempt {attempt.attempt} is {attempt.state}, and finished_ns is {attempt.finished_ns}"


def _of_end(record: RolloutRecord) -> Iterator[str]:
    rollout = record.rollout
    finished = rollout.state in FINAL_STATES
    if (rollout.finished_seq is not None) != finished:
        yield f"it is {rollout.state}, and its place in the order of finishing is {rollout.finished_seq}"
    if rollout.outcome is not None and not finished:
        yield f"it is {rollout.state}, and was consumed as {rollout.outcome}"
    if rollout.outcome is not None and rollout.mode == "eval":
        yield f"it is for evaluation, and was consumed as {rollout.outcome}"
    values = [reward.value for reward in record.rewards if reward.attempt == rollout.attempt]
    if rollout.reward is not None and rollout.reward not in values:
        yield f"its reward {rollout.reward:g} is none of those recorded"


def _of_belongings(record: RolloutRecord) -> Iterator[str]:
    rollout = record.rollout
    calls = {call.id: call for call in record.calls}
    for kind, things in (("call", record.calls), ("span", record.spans), ("reward", record.rewards)):
        for thing in things:
            if thing.run_id != rollout.run_id:
                yield f"{kind} {thing.id} names run {thing.run_id}"
            if not 1 <= thing.attempt <= rollout.attempt:
                yield f"{kind} {thing.id} belongs to attempt {thing.attempt}, which does not exist"
    for reward in record.rewards:
        if reward.call_id is not None and reward.call_id not in calls:
            yield f"reward {reward.id} names call {reward.call_id}, which is not recorded"
        if not math.isfinite(reward.value):
            yield f"reward {reward.id} is {reward.value}"


def _of_calls(record: RolloutRecord, newest: Mapping[str, int]) -> Iterator[str]:
    rollout = record.rollout
    calls = {call.id: call for call in record.calls}
    if len(calls) < len(record.calls):
        yield "a call is recorded twice"
    of_last = sum(call.attempt == rollout.attempt for call in record.calls)
    if rollout.state == "succeeded" and 0 < of_last < rollout.calls:  # none at all: they were dropped
        yield f"{rollout.calls} calls were recorded when it finished, but there are {of_last}"
    for call in record.calls:
        parent = calls.get(call.parent_id) if call.parent_id is not None else None
        if call.parent_id is not None and (parent is None or parent.attempt != call.attempt):
            yield f"call {call.id} continues call {call.parent_id}, which its attempt does not have"
        yield from _of_tokens(call, parent)
        last = newest.get(call.policy)
        for span in call.versions:
            if last is not None and span.version > last:
                yield f"call {call.id} was sampled by version {span.version} of {call.policy!r}, which does not exist"


def _of_tokens(call: Call, parent: Call | None) -> Iterator[str]:
    if len(call.logprobs) != len(call.sampled_ids):
        yield f"call {call.id} has {len(call.logprobs)} logprobs for {len(call.sampled_ids)} sampled ids"
    if not all(map(math.isfinite, call.logprobs)):
        yield f"call {call.id} has logprobs that are no finite numbers"
    ends = [0, *(span.end for span in call.versions)]
    if call.versions and ([span.start for span in call.versions] != ends[:-1] or ends[-1] != len(call.sampled_ids)):
        yield f"call {call.id} says of some sampled ids not once which version sampled them"
    before = 0 if parent is None else parent.prompt_tokens + len(parent.sampled_ids)
    if call.policy and (parent is None or parent.policy) and call.prompt_tokens != before + len(call.suffix_ids):
        yield f"call {call.id} has {call.prompt_tokens} prompt tokens, but {before + len(call.suffix_ids)} are recorded"
