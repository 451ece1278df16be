"""The records of the project as frozen types: what a store keeps and a gateway records.

Every other module speaks in these; the types of learning are in training_types.py. It holds no behaviour and imports nothing
but the standard library: an agent machine loads it in milliseconds. Times are nanoseconds since the epoch, UTC. Ids of
rollouts, calls and rewards are UUIDv7 strings and sort by creation time; so do ids of runs, which are readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

JSON = dict[str, Any]

Mode = Literal["train", "eval"]
RunState = Literal["running", "finished", "interrupted", "failed"]
RolloutState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
AttemptState = Literal["running", "succeeded", "failed", "timed_out", "lost"]
AttemptEnd = Literal["succeeded", "failed", "timed_out", "lost"]
Cause = Literal["policy", "agent", "refused", "limit", "timeout", "verifier", "infra"]
"""Reason why an attempt ended. policy: its agent came to its end, and the reward says how well. agent: its code or program
failed. refused: the gateway refused its last model call. limit: a budget or the context was used up. timeout: its time was.
verifier: the reward function failed. infra: something that it needs broke, or its worker was lost."""
Outcome = Literal["trained", "zero_variance", "stale", "overprovisioned", "invalid", "dropped"]
RewardSource = Literal["return", "function", "output", "emitted", "posted", "air", "rescored"]
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
SpanStatus = Literal["unset", "ok", "error"]
StepState = Literal["open", "closed"]

ABANDONED: Final = "abandoned"
"""Finish reason of a call whose agent went away: what was sampled was never read, and nothing follows from it."""

TEMPLATE_KWARGS: Final = "chat_template_kwargs"
"""Key of `Call.request_fields`: the variables that the request gave to the model's chat template, and that it read."""

TOOL_SYNTAX: Final = "tool_syntax"
"""Key of `Call.request_fields`: the syntax in which the prompt has the tools as text, where the chat template has none."""

SYSTEM_PROMPT: Final = "system_prompt"
"""Key of `Call.request_fields`: the prompt template that replaced the agent's system prompt by a rule, its version, and the
replaced text, unless an earlier call has it (None: the rule's marks were not found)."""

RESERVED_AGENTS: Final = "agl."
"""Beginning of the agent names that the gateway gives by the caller's key: what an agent says never sets one."""

RolloutKind = Literal["task", "session", "fork", "credit"]
"""task: an agent's try at a task of its group. session: a user's conversation with a served model, which no worker claims.
fork, credit: it continues another rollout in a group of its own, by request, or to learn what its calls are worth."""

FINAL_STATES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of the gateway for one rollout, whatever the agent asks for; fixed at enqueue."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int | None = None
    """Most tokens of one call, or the agent's own smaller limit. None: the agent's, else the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Conditions under which a rollout is tried again; lost attempts count apart."""

    max_attempts: int = 1
    timeout_s: float = 600.0
    """Seconds one attempt may take, from its claim."""
    retry_on: tuple[AttemptEnd, ...] = ("failed", "timed_out")
    max_lost: int = 5
    """Lost attempts after which the rollout fails: one that kills its worker must not circle for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One experiment: a configuration, its rollouts, metrics and checkpoints."""

    id: str
    name: str
    state: RunState
    config: JSON
    created_ns: int
    updated_ns: int
    summary: JSON = field(default_factory=dict)
    """Free facts about the run that a list of runs shows: step, reward, held-out success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """The load of a run at this moment."""

    run_id: str
    queued: int
    oldest_queued_s: float
    """Age of the rollout that was queued first; 0 where none is."""
    running: int
    expiring: int
    """Leases that run out within ten seconds, or have."""
    workers: int
    """Workers seen within the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The place in a recorded attempt at which a rollout begins: its agent starts anew, and the attempt's first calls of
    policies are answered from the record."""

    rollout_id: str
    attempt: int
    calls: int
    """Number answered from the record, in the order in which they began; the next one is sampled."""
    root_id: str
    """The rollout at which it all began, whose seed (AGL_SEED) is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRollout:
    """A rollout to enqueue. (run_id, group_id, replica) is unique: enqueueing it again returns the one that exists."""

    run_id: str
    task: JSON
    group_id: str
    """Rollouts of one group are compared with each other."""
    replica: int = 0
    """Position within the group, from 0."""
    mode: Mode = "train"
    step: int = 0
    """The training step it was enqueued for."""
    sampling: Sampling = Sampling()
    retry: RetryPolicy = RetryPolicy()
    priority: int = 0
    """Higher is claimed first; equal priorities first come, first served."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Versions of prompt templates by name. Of those that are not named, the first claim pins the newest."""
    fork: Fork | None = None
    """The place in another rollout from which it goes on; None for one that begins at the beginning."""
    kind: RolloutKind = "task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the agent on one task; survives retries."""

    id: str
    run_id: str
    task: JSON
    group_id: str
    replica: int
    mode: Mode
    step: int
    sampling: Sampling
    retry: RetryPolicy
    priority: int
    state: RolloutState
    attempt: int
    """Number of the latest attempt, from 1; 0 before the first claim."""
    lost: int
    """Number of attempts that ended as lost."""
    created_ns: int
    started_ns: int | None = None
    finished_ns: int | None = None
    finished_seq: int | None = None
    """Position in the order in which the rollouts of the run finished, from 1: the cursor of `wait`."""
    reward: float | None = None
    """The final reward of the successful attempt."""
    calls: int = 0
    """Recorded model calls of the latest attempt, counted when it finishes."""
    error: str | None = None
    """Reason why the last attempt did not succeed: the traceback or the output's tail."""
    warning: str | None = None
    """Suspicious fact of a successful attempt, with the likely cause (such as no recorded model call)."""
    refused: bool = False
    """The last attempt failed after the gateway had refused its last model call: trying again would end alike."""
    cause: Cause | None = None
    """Of the end of the latest attempt that ended; None before, and where the rollout was cancelled."""
    gave_up: bool = False
    """The last attempt failed by its agent's own exit, after it had sampled and with its model there; what that counts is
    `agent.on_failure`."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Versions of the run's prompt templates by name, of all its attempts: pinned at the first claim."""
    fork: Fork | None = None
    """The place in another rollout from which it goes on; None for one that began at the beginning."""
    kind: RolloutKind = "task"
    outcome: Outcome | None = None
    """Use that training made of it; None until a training step consumed it."""

    @property
    def judged(self) -> bool:
        """False if it failed, after all its attempts, of something that says nothing about its policy: it counts as no
        reward at all, not as 0."""
        return self.state != "failed" or self.cause not in ("verifier", "infra")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a rollout, held by one worker under a lease."""

    rollout_id: str
    attempt: int
    state: AttemptState
    worker_id: str
    lease_expires_ns: int
    started_ns: int
    finished_ns: int | None = None
    error: str | None = None
    output: str | None = None
    """Tail of what a command agent printed."""
    cause: Cause | None = None
    """None while it runs, and where its rollout was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to finish one attempt. A stale token changes nothing."""

    rollout_id: str
    attempt: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claimed rollout, as a worker gets it."""

    rollout: Rollout
    lease: Lease
    key: str
    """API key (``sk-agl-…``) that opens this attempt, and only it, at the gateway."""
    judge_key: str = ""
    """The same for the worker's judge of the attempt: its calls are never learned from. No agent gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of an attempt."""

    lease: Lease
    state: AttemptEnd
    rewards: tuple[Reward, ...] = ()
    """Rewards that the worker still holds; they are recorded in the same transaction."""
    error: str | None = None
    exited: bool = False
    """It failed by the agent's own exit: its code raised, or its program ended with another exit code than 0."""
    cause: Cause | None = None
    """Its cause where the worker knows it; otherwise the record decides."""
    output: str | None = None
    diagnosis: str | None = None
    """Facts of the worker's surroundings that could explain an attempt without a recorded call (proxy variables, …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward record. Final rewards belong to no call; those with a call are step rewards."""

    id: str
    run_id: str
    rollout_id: str
    attempt: int
    value: float
    name: str = "reward"
    call_id: str | None = None
    source: RewardSource = "emitted"
    created_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a call came from this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The place of an image in a list of token ids: ids [start, end) are its placeholders."""

    hash: str
    """SHA-256 of the file's bytes, in hex, under which a store keeps them."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call, stored by what its parent call did not have.

    The full prompt is the parent's prompt, the parent's sampled ids, then ``suffix_ids``, so that a conversation of T turns
    costs O(total tokens), not O(T²).
    """

    id: str
    run_id: str
    rollout_id: str
    attempt: int
    parent_id: str | None
    suffix_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each sampled id under the distribution it was drawn from; same length."""
    versions: list[VersionSpan]
    prompt_tokens: int
    """Length of the full prompt."""
    policy: str
    """Alias of the policy that sampled; '' for a call that an external model answered."""
    model: str
    """The model name that the agent asked for."""
    protocol: str
    """Wire format: chat, completions, responses or messages."""
    sampling: Sampling
    history_hash: str
    """Hash of tools and messages up to and with the completion: a later prompt that begins so continues this call."""
    request_hash: str
    """Hash of tools and messages before the completion: finds the completion of a request that is retried."""
    messages: list[JSON]
    """The messages that the parent's history did not have (all of them without a parent)."""
    completion: JSON
    """The assistant message as the agent received it."""
    tools: list[JSON] | None = None
    """Tool definitions; kept only where they differ from the parent's (so: on roots)."""
    fork_cause: str | None = None
    """Reason why the prompt continues no earlier call of the attempt; None where it does, or where nothing came before."""
    untrained_tokens: int = 0
    """Sampled tokens of earlier calls that this prompt could not continue: rendered afresh, they are context and no more."""
    overridden_params: JSON = field(default_factory=dict)
    """Sampling fields that the agent gave and that were not applied: the run's sampling policy forced others."""
    usage: JSON = field(default_factory=dict)
    """Usage that an external model reported: prompt_tokens and sampled_tokens."""
    agent: str | None = None
    """Name of the sub-agent that made the call, where known."""
    finish_reason: str = "stop"
    """stop, length, tool_calls; or ABANDONED."""
    started_ns: int = 0
    finished_ns: int = 0
    span_id: str | None = None
    """Id of the span within which the agent made the call (its `traceparent`), which may be recorded later, or never."""
    delivered: bool = True
    """False where the agent was gone before the end of the completion was sent to it: nothing is learned from the call."""
    decoding: JSON = field(default_factory=dict)
    """The constraints on the logits besides the temperature: ``grammar`` (kind, lark, library, version), ``logits``
    (penalties, logit_bias, cuts), ``request`` (hash of the fields that asked for it), ``forced`` ([start, end) of sampled
    tokens for which the grammar allowed no other), ``untrained`` if the run learns nothing from such a call."""
    request_fields: JSON = field(default_factory=dict)
    """Fields of a Responses request that its stored response repeats, and the ``chat_template_kwargs`` that the template
    read, if they differ from the parent's."""
    images: list[ImageSpan] = field(default_factory=list)
    """Images among ``suffix_ids``, in their order."""
    replayed_id: str | None = None
    """Id of the call of another rollout (`Rollout.fork`) whose completion this repeats; None if it was sampled."""

    @property
    def learnable(self) -> bool:
        """True if the completion was sampled for this rollout and sent whole: else nobody knows whether the agent acted on
        it."""
        return self.delivered and self.finish_reason != ABANDONED and self.replayed_id is None

    @property
    def shared(self) -> bool:
        """True if the completion repeats one that was sampled for another rollout, and was sent whole."""
        return self.delivered and self.finish_reason != ABANDONED and self.replayed_id is not None

    @property
    def continuation(self) -> str:
        """Relation of the prompt to the attempt's earlier calls: continued, first_turn, or the cause of the fork."""
        return self.fork_cause or ("first_turn" if self.parent_id is None else "continued")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One OpenTelemetry span of an attempt: what an agent did outside the model calls, which are `Call`s."""

    id: str
    """``{rollout}.{attempt}.{span id, 16 hex digits}`` where it came from OpenTelemetry: unique whatever programs send."""
    run_id: str
    rollout_id: str
    attempt: int
    name: str
    parent_id: str | None = None
    """May name a span that was never recorded."""
    attributes: JSON = field(default_factory=dict)
    """Those of its scope and resource under ``scope.…`` and ``resource.…``."""
    started_ns: int = 0
    finished_ns: int = 0
    trace_id: str | None = None
    """32 hex digits."""
    kind: SpanKind = "internal"
    status: SpanStatus = "unset"
    status_message: str = ""
    events: list[JSON] = field(default_factory=list)
    """{"name", "time_ns", "attributes"} each; exceptions are events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A named, versioned thing that agents use: a policy endpoint, a prompt template. Versions are never used twice."""

    run_id: str
    name: str
    kind: Literal["policy", "prompt_template", "prompt_candidate", "external", "limits", "pause", "routes"]
    value: JSON
    version: int = 0
    """Given by the store: 1 for the first, then one more each time, whatever was abandoned."""
    parent: int | None = None
    """The version that this one was made from."""
    step: int = 0
    """The training step that made it."""
    created_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a run at a training step."""

    run_id: str
    step: int
    name: str
    value: float
    created_ns: int = 0
    abandoned: bool = False
    """True where a crash undid the step and it was executed again."""
    seq: int = 0
    """Its place in the order in which the store took metrics in, of any run; 0 before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedInputs:
    """The records of one rollout that a training step learns from: executing the step again reads these and no others."""

    attempt: int
    calls: list[str]
    """Ids of the attempt's delivered calls that were sampled for it, in the order they finished."""
    rewards: list[str] = field(default_factory=list)
    """Ids of the attempt's rewards that count, in the order they were made."""
    agents: list[tuple[str, str]] = field(default_factory=list)
    """Id of a call and name of its agent, where the name came from spans: others of them may arrive later."""
    replayed: list[str] = field(default_factory=list)
    """Ids of the attempt's calls that were delivered and that repeat those of the rollout that it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One rollout of a training step and what became of it."""

    rollout_id: str
    outcome: Outcome
    inputs: ConsumedInputs | None = None
    """None if the step learns nothing from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step's entry in the history: written open before learning, closed after publishing."""

    run_id: str
    step: int
    state: StepState
    consumed: list[Consumed]
    """In the order in which they were learned from: executing the step again gives the same update."""
    version: int | None = None
    """The policy version it published, once closed."""
    created_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredit:
    """Numbers with which one training step learned from one call: for screens, never read by training."""

    run_id: str
    step: int
    rollout_id: str
    call_id: str
    policy: str
    """Alias of the policy that learned from it."""
    credit: float
    """By the credit rule; with the advantage gae the reward that the call itself earned."""
    advantage: float
    """Mean over its trained tokens."""
    return_: float | None
    """The critic's target, mean over its trained tokens; None where there is no critic."""
    weight: float
    """Sum of the loss weights of its trained tokens in one epoch; 0 where no update had it."""
    trained_tokens: int
    """Of its sampled tokens those that an update trained."""
    token_advantages: list[float] = field(default_factory=list)
    """One per sampled token; empty where they are not kept."""
    token_ratios: list[float] = field(default_factory=list)
    """The loss's ratio of each sampled token in the first update that trained it, 1 if none did; empty if unknown."""
    clip_share: float | None = None
    """Share of its trained tokens whose ratio the loss cut in that update."""
    token_entropies: list[float] = field(default_factory=list)
    """The policy's entropy in nats at each sampled token in that update, 0 if none trained it; empty as the ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights, optimizer and random state after a training step, in a folder."""

    run_id: str
    step: int
    path: str
    """Of the folder, on the host that saved it; or its URL, with the hash of its manifest: ``s3://…/step-000010#sha256=…``."""
    version: int
    created_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A process that claims rollouts, as the store last saw it."""

    id: str
    run_id: str
    host: str
    pid: int
    """0 where its attempts outlive its process: whoever starts again under its name goes on with them."""
    running: int
    """Attempts it holds."""
    seen_ns: int
    paused: str = ""
    """Sentence that says why it claims nothing for a while; '' while it does."""


PREFILL: Final = "prefill"
"""Key of an assistant message that is the last of its request and that the completion continues; its content is a text."""


def prefill_of(messages: Sequence[JSON]) -> JSON | None:
    """The message that the completion of these messages continues; None where it begins a message of its own."""
    return messages[-1] if messages and messages[-1].get(PREFILL) is True else None


def with_completion(messages: Sequence[JSON], completion: JSON) -> list[JSON]:
    """The messages of a call and its completion: one message with the prefill, where the request had one.

    >>> begun = {"role": "assistant", "content": "It is", "prefill": True}
    >>> with_completion([begun], {"role": "assistant", "content": " late."})
    [{'role': 'assistant', 'content': 'It is late.'}]
    """
    begun = prefill_of(messages)
    if begun is None:
        return [*messages, completion]
    whole = {**begun, **completion, "content": begun["content"] + (completion.get("content") or "")}
    del whole[PREFILL]
    if reasoning := (begun.get("reasoning_content") or "") + (completion.get("reasoning_content") or ""):
        whole["reasoning_content"] = reasoning
    return [*messages[:-1], whole]
