"""Rules of the life of rollouts: what a claim, a heartbeat, an end, a silence and a training step may change.

Pure functions, driven by the stores, which gather what is known, ask here, and write the answer in one transaction. Knows no
database, clock or network.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning.errors import ConflictError, InputError, NotFoundError, RewardError, StoreError
from agentlightning.records import (
    FINAL_STATES,
    JSON,
    AttemptEnd,
    AttemptState,
    Cause,
    Consumed,
    Finish,
    Lease,
    Mode,
    RetryPolicy,
    Reward,
    Rollout,
    RolloutKind,
    RolloutState,
    Step,
    WorkerStatus,
)
from agentlightning.store.gateway_events import (
    BROKEN,
    BROKEN_SPANS,
    FAILED_CALLS,
    IGNORED_BASE_URL,
    LIMIT_REACHED,
    NO_CALLS,
    OUTGROWN,
    REFUSED_CALLS,
    UNKNOWN_ROUTE,
    broken_counts,
    refused_counts,
)

MAX_REASONS = 16  # reasons of refused calls that a warning names

MAX_REWARD = 1e9
"""Largest reward, and smallest with a minus: sums and squares of a step's rewards stay far from where numbers end."""

MAX_REWARDS = 10_000
"""Rewards that the agent of one attempt may give: an endless loop of them must fill neither its worker nor the store."""
MAX_REWARD_NAME_CHARS = 100
AIR_PREFIX = "air."
"""Beginning of the names of AIR's rewards, which nobody else may give: they count whatever a run's weights are."""

NEVER_FINAL: frozenset[str] = frozenset({"air", "rescored"})
"""Sources of rewards that never settle a rollout: what AIR saw, and what a reward function said of it afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRollout:
    """A rollout that is queued or running, as far as its end depends on it."""

    id: str
    run_id: str
    kind: RolloutKind
    state: RolloutState
    attempt: int
    lost: int
    retry: RetryPolicy
    token: str = ""  # of the running attempt's lease, as is the next
    worker_id: str = ""

    def held_by(self, lease: Lease) -> bool:
        """True where the lease is that of the running attempt."""
        given = lease.token.encode(errors="replace")
        return self.attempt == lease.attempt and secrets.compare_digest(self.token.encode(), given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The wanted end of an attempt."""

    state: AttemptEnd
    error: str | None = None
    output: str | None = None
    diagnosis: str | None = None  # the worker's guess where no call was recorded
    agent_failed: bool = False  # the worker reports that the agent failed: only then a refused call may be why
    exited: bool = False  # by the agent's own doing, as its worker reports
    cause: Cause | None = None  # as its worker reports
    cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """The record of an attempt when it ends; stores fill it in."""

    rewards: list[Reward] = field(default_factory=list)  # in the order they were made
    calls: int = 0
    last_call_ns: int = 0
    unknown_path: str | None = None  # the last path that a request asked for and that is no route
    refused: Counter[str] = field(default_factory=Counter)  # refused calls by their fields
    refused_last: bool = False  # a call was refused after the last recorded one, for another reason than OUTGROWN
    limited_last: bool = False  # a limit was reached after the last recorded call, or the context was full
    failed_last: str | None = None  # how a call failed for want of a model after the last recorded one
    broken: Counter[str] = field(default_factory=Counter)  # broken spans by cause

    def add_event(self, name: str, started_ns: int, attributes: JSON) -> None:
        """Adds a gateway event; they come in the order of their start, after the calls."""
        if name == UNKNOWN_ROUTE:
            self.unknown_path = attributes.get("path")
        elif name == FAILED_CALLS and started_ns > self.last_call_ns:
            self.failed_last = str(attributes.get("message"))
        elif name == LIMIT_REACHED:
            self.limited_last |= started_ns > self.last_call_ns
        elif name == BROKEN_SPANS:
            self.broken.update(broken_counts(attributes))
        elif name == REFUSED_CALLS and (counts := refused_counts(attributes)):
            self.refused.update(counts)
            if started_ns > self.last_call_ns:
                self.refused_last |= OUTGROWN not in counts
                self.limited_last |= OUTGROWN in counts


@dataclass(frozen=True, slots=True, kw_only=True)
class EndChange:
    """The change of an attempt, where one ran, and of its rollout."""

    ran: bool
    attempt_state: AttemptState
    state: RolloutState
    lost: int
    error: str | None
    output: str | None
    reward: float | None = None
    calls: int = 0
    warning: str | None = None
    refused: bool = False
    gave_up: bool = False
    cause: Cause | None = None


def end_attempt(rollout: LiveRollout, ending: Ending, evidence: AttemptRecord | None) -> EndChange:
    """The change that ends a live rollout's attempt. evidence: None where nobody looks at the record, since the attempt was
    lost or cancelled."""
    attempt_state, error, reward = ending.state, ending.error, None
    if evidence is not None and attempt_state == "succeeded":
        try:
            reward = final_reward(evidence.rewards)
        except RewardError as contradiction:
            attempt_state, error = "failed", str(contradiction)
    cause = None if ending.cancelled else _cause(rollout.kind, attempt_state, ending, evidence)
    if cause == "infra" and attempt_state != "lost":
        assert evidence is not None
        said = f"the last model call failed: {evidence.failed_last}"
        attempt_state, reward, error = "lost", None, f"{said}; {error}" if error else said
    refused = cause == "refused"
    sampled = evidence is not None and evidence.calls > 0
    ran = rollout.state == "running"
    return EndChange(
        ran=ran,
        attempt_state=attempt_state,
        state="cancelled" if ending.cancelled else _next_state(rollout, attempt_state, refused),
        lost=rollout.lost + (ran and attempt_state == "lost"),
        error=error if attempt_state != "succeeded" else None,
        output=ending.output,
        reward=reward,
        calls=0 if evidence is None else evidence.calls,
        warning=None if evidence is None else _warning(attempt_state, ending.diagnosis, evidence),
        refused=refused,
        gave_up=sampled and ending.exited and cause in ("agent", "limit"),
        cause=cause,
    )


def _cause(kind: RolloutKind, ended: AttemptState, ending: Ending, evidence: AttemptRecord | None) -> Cause:
    """A model that is away explains an agent's end, its time-out, and a reward that it gives afterwards: else an agent that
    catches every error would earn a 0 that is nobody's. A session ends by its user's silence, whatever came last."""
    evidence = evidence or AttemptRecord()
    away = evidence.failed_last is not None and not evidence.refused_last and kind != "session"
    if ended == "lost" or away:
        return "infra"
    if ended == "succeeded":
        return "policy"
    if ended == "timed_out":
        return "timeout"
    if ending.cause is not None:
        return ending.cause
    if not ending.agent_failed:
        return "agent"
    return "refused" if evidence.refused_last else "limit" if evidence.limited_last else "agent"


def _next_state(rollout: LiveRollout, ended: AttemptState, refused: bool) -> RolloutState:
    """By the retry policy. Every attempt that ended and was not lost used one of max_attempts."""
    if ended == "succeeded":
        return "succeeded"
    if ended == "lost":
        return "queued" if rollout.lost + 1 < rollout.retry.max_lost else "failed"
    if refused:  # the same program would be refused again
        return "failed"
    used = rollout.attempt - rollout.lost
    return "queued" if ended in rollout.retry.retry_on and used < rollout.retry.max_attempts else "failed"


def _warning(ended: AttemptState, diagnosis: str | None, evidence: AttemptRecord) -> str | None:
    """Refused calls explain more than a wrong path, and that more than any guess."""
    silent = evidence.calls == 0 and ended != "lost"
    said = None
    if evidence.refused:
        said = _refused_warning(evidence.refused)
        said = f"{NO_CALLS}: {said}" if silent else said
    elif silent and evidence.unknown_path is not None:
        path = evidence.unknown_path
        said = f"{NO_CALLS}: the agent asked for {path}, which is no route; its base URL must end as it was given"
    elif silent:
        said = f"{NO_CALLS}: {diagnosis or IGNORED_BASE_URL}"
    if not evidence.broken:
        return said
    broken = broken_warning(evidence.broken)
    return broken if said is None else f"{said}; {broken}"


def broken_warning(counts: Mapping[str, int]) -> str:
    """Returns the warning of a rollout about its broken spans."""
    causes = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
    return f"{BROKEN}, dropped or cut: {causes}"


def _refused_warning(counts: Mapping[str, int]) -> str:
    """Returns the warning of a rollout about its refused calls."""
    total = sum(counts.values())
    named = sorted(counts.items())[:MAX_REASONS]
    fields = ", ".join(f"{field} {count}" for field, count in named) + (", …" if len(counts) > len(named) else "")
    return f"{total} call{'' if total == 1 else 's'} refused: {fields}"


def overdue(rollout: LiveRollout) -> Ending:
    """The end of an attempt whose lease ran out: a session is over when its user is silent, a worker is lost."""
    if rollout.kind == "session":
        return Ending(state="succeeded")
    return Ending(state="lost", error=f"worker {rollout.worker_id} stopped sending heartbeats")


def cancelled() -> Ending:
    """The end of a rollout that nobody wants any more."""
    return Ending(state="lost", error="the rollout was cancelled", cancelled=True)


def restarted(worker_id: str) -> Ending:
    """The end of what a worker held that was started again under its name."""
    return Ending(state="lost", error=f"worker {worker_id} ended and started again")


def is_successor(worker: WorkerStatus, host: str, pid: int) -> bool:
    """True where a worker that claims has the name and host of a known one, and is another process."""
    return worker.host == host and worker.pid != pid


def last_rewards(
    rollout: LiveRollout, finish: Finish, now_ns: int, known_calls: Collection[tuple[str, str]]
) -> tuple[list[Reward], Ending]:
    """The rewards that come with the end of an attempt, and that end: one that is no reward fails the attempt, since user
    code is never a store's error. known_calls: (call, rollout) of the calls that the rewards name."""
    ending = Ending(
        state=finish.state,
        error=finish.error,
        output=finish.output,
        diagnosis=finish.diagnosis,
        agent_failed=finish.state == "failed",
        exited=finish.exited,
        cause=finish.cause,
    )
    kept = []
    for reward in finish.rewards:
        try:
            value = reward_number(reward.value, reward.name)
            if reward.call_id is not None and (reward.call_id, rollout.id) not in known_calls:
                raise RewardError(
                    f"{reward.name}: expected call_id to name a recorded call of the rollout, got {reward.call_id}"
                )
        except RewardError as error:
            whose: Cause = "verifier" if reward.source == "function" else "agent"
            ending = replace(ending, state="failed", error=str(error), exited=False, cause=whose)
            continue
        named = replace(reward, run_id=rollout.run_id, rollout_id=rollout.id, attempt=rollout.attempt)  # by the lease
        kept.append(replace(named, value=value, created_ns=reward.created_ns or now_ns))
    return kept, ending


def pinned(rollout: Rollout, newest: Mapping[str, int]) -> Rollout:
    """The rollout with the versions of prompt templates that it keeps: its first attempt pins the newest of what it does not
    name."""
    return replace(rollout, prompts={**newest, **rollout.prompts}) if newest and rollout.attempt == 1 else rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRollout:
    """A rollout that a training step lists, as the store knows it."""

    run_id: str
    mode: Mode
    state: RolloutState
    step: int | None  # the step that consumed it already


def present_step(present: Step | None, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step | None:
    """The step where it is open with this list already, None where there is none. ConflictError otherwise."""
    if present is None or (present.state == "open" and present.consumed == list(consumed)):
        return present
    raise refusal(f"step_{present.state}", step, run_id)


def check_listed(run_id: str, step: int, wanted: Sequence[str], known: Mapping[str, ListedRollout]) -> None:
    """ConflictError or NotFoundError where a new step may not list these rollouts."""
    where = step, run_id
    if len(set(wanted)) < len(wanted):
        raise refusal("listed_twice", *where)
    for rollout_id in wanted:
        rollout = known.get(rollout_id)
        if rollout is None:
            raise refusal("no_rollout", *where, rollout_id)
        if rollout.run_id != run_id:
            raise refusal("of_other_run", *where, rollout_id, rollout.run_id)
        if rollout.mode != "train":
            raise refusal("is_evaluation", *where, rollout_id)
        if rollout.state not in FINAL_STATES:
            raise refusal("not_finished", *where, rollout_id, rollout.state)
        if rollout.step is not None:
            raise refusal("consumed", *where, rollout_id, rollout.step)


def closed_step(present: Step | None, run_id: str, step: int, version: int) -> Step:
    """The step, closed with this version. NotFoundError where there is none, ConflictError where it has another version."""
    if present is None:
        raise refusal("no_step", step, run_id)
    if present.state == "closed" and present.version != version:
        raise refusal("step_closed_otherwise", step, run_id, present.version, version)
    return replace(present, state="closed", version=version)


def final_reward(rewards: Sequence[Reward], source: str | None = None) -> float | None:
    """The final reward among an attempt's records, in the order they were made; None where there is none.

    The last one of the one deliberate source (return value, reward function, output, post), else the last that was emitted
    without a call. RewardError names two deliberate sources, unless `source` says which to take.
    """
    finals = [reward for reward in rewards if reward.call_id is None and reward.source not in NEVER_FINAL]
    if source is not None:
        finals = [reward for reward in finals if reward.source == source]
    deliberate = {reward.source for reward in finals if reward.source != "emitted"}
    if len(deliberate) > 1:
        raise RewardError(
            f"final rewards from two sources ({', '.join(sorted(deliberate))}) contradict each other: give the reward in "
            "one way only"
        )
    chosen = [reward for reward in finals if reward.source in deliberate] or finals
    return chosen[-1].value if chosen else None


def reward_number(value: Any, name: str = "reward") -> float:
    """`value` as a finite float within ± `MAX_REWARD`; RewardError, with the value and what was expected, otherwise.

    Booleans count as 0 and 1 (``return answer == expected`` is the commonest reward there is).
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardError(f"{name}: expected a finite number, got {type(value).__name__} {value!r:.80}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as cause:  # an array of several numbers, an integer without end
        raise RewardError(f"{name}: expected a finite number, got {type(value).__name__}: {cause}") from None
    if not math.isfinite(number):
        raise RewardError(f"{name}: expected a finite number, got {number}")
    if abs(number) > MAX_REWARD:
        raise RewardError(f"{name}: expected a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, got {number:g}")
    return number


def reward_name(name: Any) -> str:
    """`name` as the name of a reward that an agent or a reward function gives; RewardError where it is none."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_REWARD_NAME_CHARS or not name.isprintable():
        raise RewardError(f"name: expected 1 to {MAX_REWARD_NAME_CHARS} printable characters, got {name!r:.80}")
    if name.startswith(AIR_PREFIX):
        raise RewardError(f"name: expected one that does not begin with {AIR_PREFIX!r}, as AIR's do, got {name!r:.80}")
    return name


def check_run_id(run_id: str) -> None:
    """Run ids name folders."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", run_id):
        raise InputError(f"run_id: expected letters, digits, '.', '_' and '-', got {run_id!r}")


def run_ids(now_ns: int) -> Iterator[str]:
    """The UTC second, then the part of it in 1/65536ths: for this moment, then for those after it, without end."""
    while True:
        second, rest = divmod(now_ns, 10**9)
        yield f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(second))}-{rest * 65536 // 10**9:04x}"
        now_ns += 10**9 // 65536 + 1


# --- sentences --------------------------------------------------------------------------------------------------------

_STEP = "step {0} of run {1}"

_REFUSALS: dict[str, tuple[type[StoreError], str]] = {
    "no_run": (NotFoundError, "no such run: {0}"),
    "run_exists": (ConflictError, "run {0} exists already"),
    "no_token": (NotFoundError, "no such token: {0}"),
    "token_has_run": (ConflictError, "token {0} has its run already, or was revoked; it creates no other"),
    "no_template": (NotFoundError, "prompts: run {0} has no prompt template {1!r} of version {2}"),
    "no_file_user": (NotFoundError, "files: there is no rollout {0} in run {1}"),
    "no_session": (NotFoundError, "rewards: rollout {0} is no session of run {1}"),
    "no_attempt": (NotFoundError, "{0}: rollout {1} has no attempt {2}"),
    "no_call": (
        NotFoundError,
        "{0}: they name a call that is not recorded in their rollout (a parent comes before its children)",
    ),
    "resource_changed": (ConflictError, "resources: the newest version of {0} of run {1} is {2}, not {3}"),
    "negative_step": (ConflictError, f"{_STEP}: a checkpoint's step is 0 or more"),
    "no_step": (NotFoundError, f"no such step: {_STEP}"),
    "step_open": (ConflictError, f"{_STEP} is open with another list of rollouts already"),
    "step_closed": (ConflictError, f"{_STEP} is closed already"),
    "step_closed_otherwise": (ConflictError, f"{_STEP} was closed with version {{2}}, not {{3}}"),
    "listed_twice": (ConflictError, f"{_STEP}: a rollout is listed twice"),
    "no_rollout": (NotFoundError, f"{_STEP}: no such rollout: {{2}}"),
    "of_other_run": (ConflictError, f"{_STEP}: rollout {{2}} belongs to run {{3}}"),
    "is_evaluation": (ConflictError, f"{_STEP}: rollout {{2}} is an evaluation rollout, never learned from"),
    "not_finished": (ConflictError, f"{_STEP}: rollout {{2}} is {{3}}, not finished"),
    "consumed": (ConflictError, f"{_STEP}: rollout {{2}} was consumed by step {{3}} already"),
    "no_credited_rollout": (NotFoundError, "credit: there is no rollout {0} in run {1}"),
    "no_model": (NotFoundError, "no such model version: {0}"),
    "model_changed": (ConflictError, "{0}: was changed meanwhile; look at it again"),
    "no_alias": (NotFoundError, "no such alias: {0}"),
    "model_deleted": (ConflictError, "{0}: its weights were deleted"),
    "model_in_use": (ConflictError, "{0}: its weights are kept, since it is {1}"),
    "run_has_models": (ConflictError, "run {0} is kept with the model versions that are in use: {1}"),
    "has_records_to_come": (ConflictError, "rollout {0} is {1}: only records of finished rollouts can be dropped"),
}


def refusal(code: str, *arguments: object) -> StoreError:
    kind, sentence = _REFUSALS[code]
    return kind(sentence.format(*arguments))
