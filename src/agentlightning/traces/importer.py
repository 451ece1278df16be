"""Traces from files as a recorded run: for `agl train --from-run`, reward functions and whoever wants to look at them.

Driven by ``agl record --traces``. Every episode becomes a finished rollout; of mode train, unless the file says that it was
an evaluation. Its calls have the tokens that the file has, else text alone, as those of an external model have. A rollout
is written whole or not at all: after a kill, the run holds those that were.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import uuid_utils

from agentlightning.adapters.conversations import TRACE_PROTOCOL
from agentlightning.errors import DataError
from agentlightning.records import (
    JSON,
    Call,
    Claim,
    Finish,
    NewRollout,
    Reward,
    Rollout,
    Sampling,
    Span,
    WorkerStatus,
    with_completion,
)
from agentlightning.rendering.graph import answer_digests, chain, root, verbatim
from agentlightning.store.base import LightningStore
from agentlightning.traces.episode import CallTokens, Episode, ModelCall
from agentlightning.traces.episodes import TraceFileReader
from agentlightning.trainer.data.tasks import content_key

IMPORTED = "traces"
"""The entry of a run's configuration that names the files it was made of."""
BATCH = 64
"""Rollouts that are written at a time."""
LEASE_S = 600.0


@dataclass(kw_only=True)
class TraceImport:
    """One import, and what came of it."""

    store: LightningStore
    run_id: str
    task_fields: Sequence[str] = ()
    rollouts: int = 0
    calls: int = 0
    """Those that can be learned from."""
    rewarded: int = 0
    """Rollouts with a final reward."""
    without: int = 0
    """Rollouts of which no call can be learned from."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Calls that cannot be learned from, by reason."""
    broken: Counter[str] = field(default_factory=Counter)
    """Broken spans, by cause."""
    _replicas: Counter[str] = field(default_factory=Counter)

    async def read(self, files: Sequence[Path], name: str, progress: Callable[[int], None]) -> None:
        """Make the run and record every episode of the files. DataError where one cannot be read or holds nothing."""
        sources = [TraceFileReader(path, self.task_fields) for path in files]
        run = await self.store.create_run(name, {IMPORTED: [str(path) for path in files]}, self.run_id)
        try:
            for source in sources:
                for part in _batches(source):
                    await self._write(part)
                    progress(self.rollouts)
                self.broken += source.broken
            for name in self.task_fields:
                if all(name not in source.found_fields for source in sources):
                    raise DataError(f"--task-fields: no row of {', '.join(map(str, files))} has a field {name!r}")
            if not self.rollouts:
                raise DataError(f"{', '.join(map(str, files))}: holds no trace and no conversation")
        except BaseException:
            await self.store.update_run(run.id, state="failed")
            raise
        summary: JSON = {"rollouts": self.rollouts, "calls": self.calls}
        await self.store.update_run(run.id, state="finished", summary=summary)

    async def _write(self, episodes: Sequence[Episode]) -> None:
        queued = await self.store.enqueue([self._new(one) for one in episodes])
        by_id = {rollout.id: episode for rollout, episode in zip(queued, episodes, strict=True)}
        worker = WorkerStatus(
            id="import", run_id=self.run_id, host=socket.gethostname(), pid=os.getpid(), running=0, seen_ns=0
        )
        claims = await self.store.claim(worker, limit=len(queued), lease_s=LEASE_S)
        calls: list[Call] = []
        spans: list[Span] = []
        finishes: list[Finish] = []
        for claim in claims:
            episode = by_id[claim.rollout.id]
            own = self._calls(claim, episode)
            self.without += not own
            calls += own
            spans += _spans(claim, episode.spans)
            finishes.append(
                Finish(
                    lease=claim.lease,
                    state="succeeded" if episode.error is None else "failed",
                    error=episode.error,
                    rewards=tuple(_rewards(claim, episode, own)),
                    diagnosis=_why_nothing(episode),
                )
            )
        await self.store.append_calls(calls)
        await self.store.append_spans(spans)
        await self.store.finish(finishes)
        self.rollouts += len(claims)
        self.calls += len(calls)
        self.rewarded += sum(_final(one) is not None for one in episodes)

    def _new(self, episode: Episode) -> NewRollout:
        task = content_key(episode.task, size=8)
        replica = self._replicas[task]
        self._replicas[task] += 1
        return NewRollout(
            run_id=self.run_id, task=episode.task, group_id=f"traces:{task}", replica=replica, mode=episode.mode
        )

    def _calls(self, claim: Claim, episode: Episode) -> list[Call]:
        for call in episode.calls:
            if call.missing is not None:
                self.left_out[call.missing] += 1
        attempt = claim.lease.attempt
        records = call_records(episode.calls, claim.rollout, attempt, lambda _: str(uuid_utils.uuid7()))
        prefix = f"{claim.rollout.id}.{attempt}."
        return [replace(one, span_id=prefix + one.span_id) if one.span_id else one for one in records]


def _spans(claim: Claim, spans: Iterable[Span]) -> list[Span]:
    """The spans of a trace as those of an attempt: an id is unique within its trace, not in the world."""
    prefix = f"{claim.rollout.id}.{claim.lease.attempt}."
    return [
        replace(
            span,
            id=prefix + span.id,
            parent_id=None if span.parent_id is None else prefix + span.parent_id,
            run_id=claim.rollout.run_id,
            rollout_id=claim.rollout.id,
            attempt=claim.lease.attempt,
        )
        for span in spans
    ]


def _rewards(claim: Claim, episode: Episode, calls: Sequence[Call]) -> Iterable[Reward]:
    """Step rewards, further final ones, then the final one, which counts because it is the last."""

    def reward(value: float, name: str, call_id: str | None = None) -> Reward:
        return Reward(
            id=str(uuid_utils.uuid7()),
            run_id=claim.rollout.run_id,
            rollout_id=claim.rollout.id,
            attempt=claim.lease.attempt,
            value=value,
            name=name,
            call_id=call_id,
            source="emitted",
            created_ns=claim.rollout.created_ns,
        )

    kept = [place for place, call in enumerate(episode.calls) if call.missing is None]
    for place, call in zip(kept, calls, strict=True):
        for name, value in (episode.steps[place] if episode.steps else {}).items():
            yield reward(value, name, call.id)
    final = _final(episode)
    for name, value in episode.rewards.items():
        if name != "reward":
            yield reward(value, name)
    if final is not None:
        yield reward(final, "reward")


def _final(episode: Episode) -> float | None:
    return episode.rewards.get("reward") if episode.reward is None else episode.reward


def _why_nothing(episode: Episode) -> str | None:
    """For the warning of a rollout of which no call can be learned from."""
    reasons = Counter(call.missing for call in episode.calls)
    if None in reasons:
        return None
    told = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    return (
        f"of its {len(episode.calls)} model calls none can be learned from: {told}"
        if told
        else "no span is a model call"
    )


def _batches(episodes: Iterable[Episode]) -> Iterator[list[Episode]]:
    waiting = iter(episodes)
    while part := list(islice(waiting, BATCH)):
        yield part


def call_records(
    calls: Sequence[ModelCall], rollout: Rollout, attempt: int, call_id: Callable[[int], str]
) -> list[Call]:
    """The calls that can be learned from (`ModelCall.missing`) as records of an attempt.

    call_id: the id of the n-th record, from 0. A call without tokens has the policy '': an external model answered it; its
    token counts are those that the trace tells.
    """
    histories: dict[bytes, Call] = {}
    known: dict[str, _Continued] = {}
    records: list[Call] = []
    protocol = TRACE_PROTOCOL if all(one.tokens is None for one in calls) else "chat"
    for one in calls:
        if one.missing is not None:
            continue
        messages, completion = one.messages or [], one.completion or {"role": "assistant", "content": ""}
        hashes = chain(root(one.tools), [verbatim(message) for message in messages])
        history = [chain(hashes[-1], [found])[-1] for found in answer_digests(completion, verbatim)]
        place = next((at for at in range(len(hashes) - 1, 0, -1) if hashes[at] in histories), 0)
        parent = histories.get(hashes[place]) if place else None
        columns: JSON = {"suffix_ids": [], "sampled_ids": [], "logprobs": [], "versions": [], "prompt_tokens": 0}
        columns |= {"policy": "", "sampling": Sampling()}
        if one.tokens is not None:
            before = _continued(one.tokens, known)
            parent, place = (None, 0) if before is None else (before.call, len(before.messages))
            columns = _columns(one.tokens, 0 if before is None else len(before.ids))
        record = Call(
            id=call_id(len(records)),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=attempt,
            parent_id=None if parent is None else parent.id,
            model=one.model,
            protocol=protocol,
            history_hash=history[0].hex(),
            request_hash=hashes[-1].hex(),
            messages=messages[place:],
            completion=completion,
            tools=one.tools if parent is None else None,
            usage=one.usage,
            agent=one.agent,
            finish_reason=one.finish_reason,
            started_ns=one.started_ns,
            finished_ns=one.finished_ns,
            span_id=one.span_id or None,
            **columns,
        )
        for digest in history:
            histories[digest] = record
        if one.tokens is not None:
            ids = [*one.tokens.prompt_ids, *one.tokens.sampled_ids]
            known[one.tokens.id] = _Continued(record, ids, with_completion(messages, completion))
        records.append(record)
    return records


class _Continued(NamedTuple):
    """A call that others may continue, with all ids and messages up to its end."""

    call: Call
    ids: list[int]
    messages: list[JSON]


def _continued(tokens: CallTokens, known: Mapping[str, _Continued]) -> _Continued | None:
    """The call that these tokens continue: the one that is named, else the longest whose ids the prompt begins with."""
    fitting = [one for one in known.values() if tokens.prompt_ids[: len(one.ids)] == one.ids]
    named = known.get(tokens.parent or "")
    return named if named in fitting else max(fitting, key=lambda one: len(one.ids), default=None)


def _columns(tokens: CallTokens, known: int) -> JSON:
    """Fields of a record; the first `known` ids of the prompt are those of the call that it continues."""
    return {
        "suffix_ids": tokens.prompt_ids[known:],
        "sampled_ids": tokens.sampled_ids,
        "logprobs": tokens.logprobs,
        "versions": tokens.versions,
        "prompt_tokens": len(tokens.prompt_ids),
        "policy": tokens.policy,
        "sampling": Sampling(temperature=tokens.temperature),
        "decoding": tokens.decoding,
        "delivered": tokens.delivered,
    }
