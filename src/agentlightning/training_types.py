"""Frozen types of learning: transitions of a trajectory, the sequences that an engine trains on, and its losses.

Made by adapters from what a store keeps (types.py), given rewards and advantages by algorithms, trained on by engines. Like
types.py it holds no behaviour and loads in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.records import JSON, VersionSpan, with_completion


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """An image in a list of token ids: ids [start, end) are its placeholders."""

    hash: str
    start: int
    end: int
    data: bytes = field(default=b"", repr=False)
    """The file as the agent sent it; rows with one image share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """(state, action, reward) of one call: the MDP step of the unified data interface.

    As a call is stored, it holds what its parent did not have, so that a rollout of T turns costs O(tokens).
    """

    call_id: str
    suffix_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    temperature: float = 1.0
    policy: str = "default"
    agent: str | None = None
    model: str = ""
    """The model name that was asked for."""
    truncated: bool = False
    """True: it ended at the limit of tokens."""
    masked: bool = False
    """True: no token of it is trained, whatever it earned."""
    trained: bool = True
    """False: context of another agent or policy, which credit rules see and nothing is learned from."""
    reward: float = 0.0
    """Step rewards recorded on this call, summed; 0 where none was."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The same by name."""
    decoding: JSON = field(default_factory=dict)
    """The constraints on the logits beside the temperature: `Call.decoding`."""
    messages: list[JSON] = field(default_factory=list)
    """The messages that the parent's history did not have."""
    completion: JSON = field(default_factory=dict)
    """The assistant message that was sampled."""
    images: list[ImageInput] = field(default_factory=list)
    """Images among `suffix_ids`."""
    parent: Transition | None = field(default=None, compare=False, repr=False)
    """The call that this one continues: one of the trajectory's, or one that is context and belongs to none."""

    @property
    def mask(self) -> list[bool]:
        """True on sampled tokens that are trained, False on forced ones: the call's grammar allowed no other."""
        mask = [not self.masked] * len(self.sampled_ids)
        for start, end in self.decoding.get("forced", ()):
            mask[start:end] = [False] * len(mask[start:end])
        return mask

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens that are trained: the length of the completion in every average."""
        return sum(self.mask)

    @property
    def path(self) -> list[Transition]:
        """The calls from the first of the conversation to this one."""
        path, node = [], self
        while True:
            path.append(node)
            if node.parent is None:
                return path[::-1]
            node = node.parent

    @property
    def prompt_ids(self) -> list[int]:
        """The full prompt, built anew each time: O(its tokens)."""
        *before, last = self.path
        return [token for call in before for token in (*call.suffix_ids, *call.sampled_ids)] + last.suffix_ids

    @property
    def prompt_messages(self) -> list[JSON]:
        """The full prompt as messages, built anew each time."""
        *before, last = self.path
        return [
            message for call in before for message in with_completion(call.messages, call.completion)
        ] + last.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All transitions of one rollout in the order they finished, with its final reward."""

    rollout_id: str
    group_id: str
    reward: float
    """NaN where none is known; `algorithms.rewards` says how it counts."""
    transitions: list[Transition]
    rewards: dict[str, float] = field(default_factory=dict)
    """Final rewards by name."""
    failed: bool = False
    """True where all attempts failed; `reward` is then what the run gives for that."""
    replayed: dict[str, str] = field(default_factory=dict)
    """Calls of a fork that were not sampled for it, each with the call whose completion it repeats: the one that was
    sampled, where those in between were read, too. They are no transitions: what was sampled once is learned from once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """A training example of an engine: prefix-merged transitions. All lists have one entry per token."""

    rollout_id: str
    tokens: list[int]
    mask: list[bool]
    """True on sampled tokens that are trained (not on those that a grammar forced). Never true on the first token; where it
    is False, the other columns mean nothing."""
    logprobs: list[float]
    """The sampler's logprobs on masked tokens, 0 elsewhere."""
    advantages: list[float]
    weights: list[float]
    """Per-token weight of the loss: every engine computes one SUM over tokens of weight × loss, and nothing else."""
    segments: list[tuple[int, int]]
    """[start, end) of each call's sampled tokens."""
    temperature: float = 1.0
    decodings: list[JSON] = field(default_factory=list)
    """The constraints on the logits of each segment (`Call.decoding`), in their order; where it ends early, the rest has
    none. A learner rebuilds the masks from it and computes every log-probability under them."""
    ref_logprobs: list[float] | None = None
    """Logprobs of a frozen reference on masked tokens, for the loss's KL term."""
    old_logprobs: list[float] | None = None
    """The trainer's own logprobs before the step's first update. None: the loss's ratio is taken to the sampler."""
    kl_weights: list[float] | None = None
    """Weights of the KL term where it is aggregated otherwise than the loss; None: `weights`."""
    entropy_weights: list[float] | None = None
    """Weights of the entropy term; None: `weights`."""
    returns: list[float] | None = None
    """On masked tokens, what a value head is to say of the state before each: the critic's targets."""
    values: list[float] | None = None
    """On masked tokens, what the value head said before the step's first update, for `value_clip`."""
    images: list[ImageInput] = field(default_factory=list)
    """Images among `tokens`, in their order; none of their placeholders is sampled."""
    calls: list[str] = field(default_factory=list, compare=False, repr=False)
    """Ids of the calls of the segments, in their order, for the record of credit: no engine reads them."""


LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce", "sft")
"""Losses of a token that come with engines."""


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """Numbers of an update for every token of a sequence."""

    ratios: list[float]
    entropies: list[float]
    """In nats, of the distribution that the token's log-probability is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The per-token loss that an engine applies; see engines/losses.py for the formulas and their sources.

    The ratio of a loss is policy / old_logprobs where sequences have them, else policy / sampler. The corrections
    (importance, ratio_mask, off_policy_kl) act on the policy term alone, never on KL or entropy.
    """

    name: str = "ppo_clip"
    """One of `LOSSES`, or a plug-in: ``file.py:name``, ``package.module:name``, or the name of an entry point."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a plug-in: its keyword-only arguments."""
    code_hash: str | None = None
    """Of a plug-in: the hash of its file; an engine that finds another file refuses it. None: not checked."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    """For ppo_clip: where the advantage is negative, a ratio above this (> 1) has no gradient."""
    importance: Literal["token", "call"] | None = None
    """Truncated importance sampling: times min(trainer / sampler, importance_cap), of the token or of its whole call."""
    importance_cap: float = 2.0
    ratio_mask: Literal["token", "call"] | None = None
    """Leave out tokens (or calls, by the geometric mean) whose ratio trainer / sampler is outside the next two bounds; a
    token that stays in is multiplied by its ratio (IcePop), a call is not."""
    ratio_mask_low: float = 0.5
    ratio_mask_high: float = 5.0
    off_policy_kl: float | None = None
    """Leave out calls of negative advantage whose mean log(sampler / policy) is above this."""
    kl: float = 0.0
    """Coefficient of the KL to the reference, per token, with `kl_weights`; needs `ref_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    """Coefficient of the entropy bonus, per token, with `entropy_weights`."""
    value: float | None = None
    """With a value head: train it on `returns`, each token with its weight. The gradient goes on into the policy's own
    layers times this number; 0 leaves them alone."""
    value_clip: float | None = None
    """An estimate that moved further than this from `values` has no gradient."""

    @property
    def is_plugin(self) -> bool:
        """True where the loss is not one of `LOSSES`."""
        return self.name not in LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """One example of a preference loss: rows whose trained tokens are one completion, whatever number of calls it took.

    DPO compares chosen with rejected; KTO takes a completion that is either (the other is empty). Sequences need
    `ref_logprobs`; their advantages and weights are not read.
    """

    chosen: list[TrainingSequence] = field(default_factory=list)
    rejected: list[TrainingSequence] = field(default_factory=list)
    weight: float = 1.0
    """Every engine computes one SUM over examples of weight × loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss of completions, not of tokens; see engines/losses.py for the formulas and their sources."""

    name: Literal["dpo", "kto"] = "dpo"
    beta: float = 0.1
    """Strength that holds the policy at the reference."""
    chosen_weight: float = 1.0
    """For kto: weight of completions that are wanted (the paper's lambda_D)."""
    rejected_weight: float = 1.0
    """For kto: weight of completions that are not (lambda_U)."""
