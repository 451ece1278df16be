"""LightningStore: the methods of the durable core; any other process may be killed at any time.

Each method is one transaction: when it returns, what it did survives SIGKILL of every process. Methods take and return
batches. One conformance suite (tests/store/) runs against every implementation. Knows nothing of HTTP, agents or tensors.

Life of a rollout::

    queued --claim--> running --finish--> succeeded
      ^                  |  `--finish(failed | timed_out)--> queued again while the retry policy allows, else failed
      `--- lease expires | finish(lost) ---'                 (lost attempts are counted apart, up to retry.max_lost)
    queued | running --cancel--> cancelled

A session is a rollout of a group of its own, claimed as it is made: no worker runs its agent, which is a program elsewhere.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from agentlightning.records import (
    JSON,
    Attempt,
    Call,
    CallCredit,
    Checkpoint,
    Claim,
    Consumed,
    Finish,
    Lease,
    Metric,
    Mode,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    RunState,
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.models import ModelRegistry
from agentlightning.store.summaries import SeriesPoint, SummaryPage, SummaryQuery
from agentlightning.store.tokens import NewToken, Token, TokenRole

LEASE_S = 30.0  # seconds a lease lasts without a heartbeat; workers send one every 10

SESSION_HOLDER = "gateway"  # holds the leases of sessions, in the place of a worker

CREDIT_STEPS = 50  # latest steps of a run whose credit of calls and tokens is kept
MAX_FINISHED = 1000  # most rollouts that `wait` returns at a time: no caller holds a whole run in memory

EXPIRING_S = 10
SEEN_S = 60  # seconds within which leases count as expiring, and workers as seen, in `statistics`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """A filter over rollouts; every field given must match. Results are in id order (by creation time)."""

    run_id: str | None = None
    ids: Sequence[str] | None = None
    mode: Mode | None = None
    states: Sequence[RolloutState] | None = None
    group_ids: Sequence[str] | None = None
    step: int | None = None
    unconsumed: bool = False  # only rollouts without an outcome
    after: str | None = None  # cursor: only ids greater than this one
    limit: int | None = None
    newest_first: bool = False


class LightningStore(ModelRegistry):
    """The abstract store. Every method may raise StoreError when the store cannot serve."""

    background: BackgroundTasks | None = None  # the loops of this store in this process; None where it has none

    @property
    def shared(self) -> bool:
        """True where several servers may use it at a time, so that none of them sees all writes."""
        return True

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, create or check the schema. Raises StoreError where the database is newer than this program."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Finish what was accepted and disconnect; a second call does nothing."""

    def watch_commits(self, heard: Callable[[float, int], None]) -> None:
        """Call `heard` after every commit of this process, from any thread: seconds since the first of its writes was
        asked for, and how many they were. Stores elsewhere call nothing."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abc.abstractmethod
    async def signing_secret(self) -> bytes:
        """32 random bytes of the store that sign the keys of attempts. For gateways; over HTTP a server gives them to
        holders of its key, and without a key to its own machine only."""

    # --- runs -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        """A new run in state running; without `run_id` its id is made from the time. ConflictError if the id exists. A
        trainer's token that has no run yet gets this one in the same transaction."""

    @abc.abstractmethod
    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        """Change the state, merge `summary` into the run's. NotFoundError if there is no such run."""

    @abc.abstractmethod
    async def runs(self, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
        """Runs, newest first."""

    @abc.abstractmethod
    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        """Queue rollouts, returned in the order given; for a (run_id, group_id, replica) that exists, the existing one is
        returned unchanged. NotFoundError if a run, or a prompt template that a rollout names, does not exist."""

    @abc.abstractmethod
    async def claim(
        self,
        worker: WorkerStatus,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        """Take up to `limit` queued rollouts of the worker's run: each starts a new attempt under a lease.

        No rollout is claimed twice. Where none is queued, waits up to `wait_s` seconds for one (pushed, not polled).
        Records the worker as seen; a worker restarted under the same name on the same host holds none of its predecessor's
        leases. The first claim of a rollout pins the newest version of each prompt template that the rollout does not name.
        """

    @abc.abstractmethod
    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        """Extend leases; False for each one no longer held (expired and given up, finished, or cancelled)."""

    @abc.abstractmethod
    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        """End attempts, each with its last rewards, in one transaction; False where the lease is stale (nothing changes).

        On succeeded: the rollout's reward becomes `final_reward` of the attempt's records; if that raises, the attempt
        ends as failed with the sentence as its error. An attempt without a recorded call gets a warning. On failed,
        timed_out, lost: queued again or failed, by the rollout's retry policy; an attempt that failed after its last model
        call was refused, for another reason than OUTGROWN, is not retried, and its rollout is `refused`. One whose last
        model call failed for want of a model is lost, whatever its agent made of it. Each end has a `Cause`.
        """

    @abc.abstractmethod
    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel queued and running rollouts (their leases become stale); returns how many."""

    @abc.abstractmethod
    async def expire_leases(self, within_s: float | None = None) -> int:
        """End as lost every attempt whose lease has run out; returns how many. Called regularly by the server. Ends none
        where the store gets to it later than `within_s` seconds from now: while it was away, nobody could renew."""

    @abc.abstractmethod
    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """Rollouts that match."""

    @abc.abstractmethod
    async def summaries(self, query: SummaryQuery) -> SummaryPage:
        """Summaries of finished rollouts that match, in order, at most `limit`. InputError names what is wrong with the
        filter, and where. They stay when records of their rollouts are dropped."""

    @abc.abstractmethod
    async def count(self, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
        """Returns the number of the run's rollouts in each state, by mode."""

    @abc.abstractmethod
    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """All attempts of these rollouts, by rollout and number."""

    @abc.abstractmethod
    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        """Rollouts of the run that finished after position `after`, in the order of `finished_seq`.

        Returns as soon as there are `at_least` of them, or with what there is after `timeout_s` seconds; at most
        MAX_FINISHED, of which the last one's position is the next call's `after`. Pushed, not polled. NotFoundError if
        there is no such run, or no longer.
        """

    @abc.abstractmethod
    async def workers(self, run_id: str | None = None) -> list[WorkerStatus]:
        """Workers, last seen first."""

    # --- sessions: rollouts of users who talk to a served model, for gateways -------------------------------------

    @abc.abstractmethod
    async def open_session(self, session: NewRollout, lease_s: float) -> Claim:
        """Open a session, or renew the one that is open: the running rollout of the group, whose lease then ends `lease_s`
        seconds from now.

        Where there is none a new rollout begins, with the group's next replica (the one given is ignored), claimed for
        attempt 1 in the same transaction: callers at the same time, through any server, all get the same. Prompt templates
        are pinned as by `claim`. It ends by `finish`, or has succeeded when its lease runs out.
        """

    @abc.abstractmethod
    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        """Record rewards of sessions, at any time; ids that exist are ignored. The reward of a session that has succeeded
        becomes `final_reward` of its records. NotFoundError where there is no such session or call; RewardError where a
        value is not finite."""

    @abc.abstractmethod
    async def append_calls(self, calls: Sequence[Call]) -> None:
        """Record model calls; durable on return. Ids that exist are ignored, so appending may be repeated. NotFoundError
        where a parent is not recorded before it, in the same rollout."""

    @abc.abstractmethod
    async def mark_delivered(self, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool) -> None:
        """Sets `delivered` of recorded calls of an attempt, where it was recorded wrongly; ids that are not recorded are
        ignored. Steps that were opened before stay as they are."""

    @abc.abstractmethod
    async def put_files(self, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> None:
        """Keep files by the SHA-256 (hex) of their bytes, each once per run; durable on return: images of a rollout's
        requests, as long as it has its records, or (None) files of the run, such as the tokenizer. NotFoundError if there is
        no such run or rollout."""

    @abc.abstractmethod
    async def files(self, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
        """Files by hash; those that are not kept are absent."""

    @abc.abstractmethod
    async def append_spans(self, spans: Sequence[Span]) -> None:
        """Record other events of attempts; ids that exist are ignored."""

    @abc.abstractmethod
    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        """Calls of these rollouts in the order they finished, by rollout; of the latest attempt unless one is named."""

    @abc.abstractmethod
    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        """Spans of these rollouts, by rollout and start time."""

    @abc.abstractmethod
    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        """Record rewards; ids that exist are ignored. A rollout's final reward is settled when it finishes: later records
        are kept, and change nothing. RewardError where a value is not a finite number, NotFoundError where `call_id` names
        no call of the same rollout."""

    @abc.abstractmethod
    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        """Reward records of these rollouts, by rollout and creation time."""

    @abc.abstractmethod
    async def put_resources(
        self, resources: Sequence[Resource], after: Mapping[str, int] | None = None
    ) -> list[Resource]:
        """Store each as the next version of (run_id, name); returns them with their versions. `after`: by name, the version
        that must be the newest until now (0: there is none yet); ConflictError, and nothing is stored, where it is not."""

    @abc.abstractmethod
    async def resources(
        self, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
    ) -> list[Resource]:
        """Resources of a run, the newest version of each or all versions in order; with `version`, this one alone."""

    @abc.abstractmethod
    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Record numbers; the last one of a (run, step, name) that is not abandoned counts."""

    @abc.abstractmethod
    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        """Metrics of a run by step, name and time, abandoned ones included and marked."""

    @abc.abstractmethod
    async def series(
        self, run_id: str, names: Sequence[str] | None = None, max_points: int = 500, after_step: int | None = None
    ) -> dict[str, list[SeriesPoint]]:
        """Metrics of a run by name (all, if None), each of at most `max_points` buckets of steps, in order, without
        abandoned values and those that are not finite. `after_step`: only later steps."""

    @abc.abstractmethod
    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        """The newest version of each resource of the run that is later than `after` says (a missing name is 0), as soon as
        there is one, or nothing after `timeout_s` seconds. NotFoundError if there is no such run."""

    @abc.abstractmethod
    async def follow_metrics(
        self, run_id: str, after: int = 0, timeout_s: float = 30.0, limit: int = 10_000
    ) -> list[Metric]:
        """Metrics of the run whose `seq` is greater than `after`, in the order of `seq`, at most `limit`, as soon as
        there is one, or nothing after `timeout_s` seconds. NotFoundError if there is no such run."""

    @abc.abstractmethod
    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        """Returns the load of each run of state running, or of this one if it is; cheap however much the store holds."""

    @abc.abstractmethod
    async def drop_records(self, rollout_ids: Sequence[str]) -> int:
        """Delete calls and spans of these rollouts, which keep their state, rewards and outcome; returns how many calls.
        Rewards that name a call lose the name. ConflictError, and nothing is deleted, where one is not in a final state; ids
        that do not exist are ignored."""

    @abc.abstractmethod
    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        """Delete runs with everything that belongs to them; returns how many there were.

        In portions, so that nobody else waits long; the run itself goes last, so that an interrupted deletion can be
        repeated. Others who write to it, or wait for it, get NotFoundError. Ids that do not exist are ignored. Its model
        versions stay as entries whose weights were deleted; ConflictError, and nothing is deleted, where an alias
        names one of them.
        """

    @abc.abstractmethod
    async def create_token(
        self, name: str, role: TokenRole, run_id: str | None = None, lifetime_s: float | None = None
    ) -> NewToken:
        """Make a token, with its secret, of which only a hash is kept. It ends after `lifetime_s` seconds, when it is
        revoked, or with its run. InputError where role and run do not fit together, NotFoundError if the run does not
        exist."""

    @abc.abstractmethod
    async def tokens(self, run_id: str | None = None) -> list[Token]:
        """Tokens, those that ended included, oldest first; of one run, or all."""

    @abc.abstractmethod
    async def find_token(self, secret_hash: str) -> Token | None:
        """The token whose secret has this SHA-256 (hex), ended or not. For servers."""

    @abc.abstractmethod
    async def revoke_token(self, token_id: str) -> Token:
        """End a token; one that is revoked already stays as it is. NotFoundError if there is no such token."""

    @abc.abstractmethod
    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        """Write a training step's ordered list before it learns, with the records that it learns from; sets each rollout's
        outcome. A rollout is consumed by one step only, and only finished training rollouts can be: ConflictError otherwise,
        and nothing is written. Opening a step that is open again with the same list returns it."""

    @abc.abstractmethod
    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        """The step learned and published `version`. Closing it again with the same version does nothing."""

    @abc.abstractmethod
    async def steps(self, run_id: str, after: int | None = None, limit: int | None = None) -> list[Step]:
        """Steps in order: those later than `after`, at most `limit`."""

    @abc.abstractmethod
    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        """Go back to checkpoint `after`: later closed steps become open again, and their metrics abandoned. Returns the
        steps to execute from their lists, in order."""

    @abc.abstractmethod
    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a checkpoint whose files are complete; replaces an earlier one of the same step."""

    @abc.abstractmethod
    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Checkpoints of a run by step."""

    @abc.abstractmethod
    async def record_credit(self, credits: Sequence[CallCredit]) -> None:
        """Record what steps learned from calls. A call's earlier one is replaced: a call is learned from in one step, which
        may be executed again. NotFoundError where a rollout is none of its run, InputError where a number is not finite."""

    @abc.abstractmethod
    async def credit(self, rollout_ids: Sequence[str], call_ids: Sequence[str] | None = None) -> list[CallCredit]:
        """Recorded credit of the calls of these rollouts, of `call_ids` alone where they are given, by rollout and call. It
        goes with the rollouts' records."""

    @abc.abstractmethod
    async def drop_credit(self, run_id: str, before: int) -> None:
        """Delete the credit of the run's steps before this one."""
