"""Off-policy corrections: importance weights, masks, and the statistics of calls that they need; and the loss's inputs.

`losses.token_loss` drives it. Two policies are compared: the sampler's, recorded with each token, and the trainer's: the
old logprobs of before the step if there are any, else the policy as it is now. Everything here is a constant to the
gradient. A call's statistics come from the call's own tokens, so that a merged row and a row per call give the same
numbers. Requires torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentlightning.engines.support import CLIPPED
from agentlightning.errors import EngineError
from agentlightning.training_types import Loss, TokenNumbers, TrainingSequence


@dataclass(frozen=True, slots=True)
class Tokens:
    """The loss's inputs for N tokens; every field is a float32 tensor of shape [N], calls int64. See TrainingSequence."""

    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl_weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    calls: Tensor | None = None
    """Number of the call that each token belongs to, from 0."""
    ratios: Tensor | None = None
    """`call_ratios` of all pieces where calls are cut in pieces, shape [N, 3]."""

    @property
    def base_logprobs(self) -> Tensor:
        """Log-probabilities in the ratio's denominator."""
        return self.sampler_logprobs if self.old_logprobs is None else self.old_logprobs

    def columns(self) -> tuple[list[str], list[Tensor]]:
        """The fields that are known, by name: what is split when tokens are computed in pieces."""
        found = [(f.name, getattr(self, f.name)) for f in fields(self)]
        names, values = zip(*((name, value) for name, value in found if value is not None), strict=True)
        return list(names), list(values)


def needs_calls(loss: Loss) -> bool:
    """True where the loss of a token depends on the other tokens of its call."""
    return (
        loss.name == "gspo"
        or loss.is_plugin
        or loss.importance == "call"
        or loss.ratio_mask == "call"
        or loss.off_policy_kl is not None
    )


def call_ratios(logprobs_N: Tensor, tokens: Tokens) -> Tensor:
    """[N, 3], for each token of its call: mean log(policy / base), mean log(trainer / sampler), and the latter's sum.

    The tokens must hold their calls whole. Two calls of 2 and 1 tokens with log(policy / base) = [0.2, 0.4 | -0.1]:
    means [0.3, 0.3, -0.1].
    """
    if tokens.calls is None:
        raise EngineError("this loss compares whole calls, so tokens need calls: the segments of their sequences")
    with torch.no_grad():
        now_N = logprobs_N.detach()
        trainer_N = now_N if tokens.old_logprobs is None else tokens.old_logprobs
        gaps_N2 = torch.stack([now_N - tokens.base_logprobs, trainer_N - tokens.sampler_logprobs], 1)
        columns_N3 = torch.cat([gaps_N2, torch.ones_like(gaps_N2[:, :1])], 1)
        sums_C3 = columns_N3.new_zeros(int(tokens.calls.max()) + 1, 3).index_add_(0, tokens.calls, columns_N3)
        means_C2 = sums_C3[:, :2] / sums_C3[:, 2:].clamp(min=1.0)
        return torch.cat([means_C2, sums_C3[:, 1:2]], 1)[tokens.calls]


def importance(log_ratios_N: Tensor, cap: float) -> Tensor:
    """min(trainer / sampler, cap): truncated importance sampling. Log ratios [log 3, log 0.5], cap 2: [2, 0.5].

    Of tokens: Yao et al. (2025), Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, the equation of
    "truncated importance sampling". Of calls (sums of their tokens' log ratios): Liu et al. (2025), When Speed Kills
    Stability, sequence-level TIS. Truncation itself: Ionides (2008), Truncated Importance Sampling.
    """
    return log_ratios_N.clamp(max=20.0).exp().clamp(max=cap)


def inside(log_ratios_N: Tensor, low: float, high: float) -> Tensor:
    """True where trainer / sampler is in [low, high]. Log ratios [0, log 6, log 0.4] with 0.5 and 5: [True, False, False].

    Of tokens: IcePop, Ling Team (2025), Every Step Evolves (bounds 0.5 and 5), whose M(k) is k inside them and 0 outside: a
    token that stays in is also multiplied by its ratio, which no other cap cuts. Of calls, by the geometric mean of their
    tokens' ratios: Liu et al. (2025), When Speed Kills Stability, geometric sequence masking.
    """
    ratios_N = log_ratios_N.clamp(max=20.0).exp()
    return (ratios_N >= low) & (ratios_N <= high)


def off_policy(log_ratios_N: Tensor, advantages_N: Tensor, max_kl: float) -> Tensor:
    """True where a call drifted too far to be a bad example: A < 0 and mean log(sampler / policy) > max_kl.

    DeepSeek-AI (2025), DeepSeek-V3.2, off-policy sequence masking. log_ratios are a call's mean log(policy / sampler), at
    each of its tokens. [-0.3, -0.3, 0.1], A = [-1, 1, -1], max_kl 0.2: [True, False, False].
    """
    return (advantages_N < 0) & (-log_ratios_N > max_kl)


def corrections(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
    """(whether each token stays in, what its policy term is multiplied by); None where the loss asks for neither."""
    if loss.importance is None and loss.ratio_mask is None and loss.off_policy_kl is None:
        return None, None
    if loss.importance is not None and loss.name in CLIPPED and tokens.old_logprobs is None:
        raise EngineError(f"importance with the loss {loss.name!r} needs sequences with old_logprobs")
    with torch.no_grad():
        now_N = logprobs_N.detach()
        trainer_N = now_N if tokens.old_logprobs is None else tokens.old_logprobs
        gaps_N = trainer_N - tokens.sampler_logprobs
        means_N = sums_N = gaps_N
        if tokens.ratios is not None:
            means_N, sums_N = tokens.ratios[:, 1], tokens.ratios[:, 2]
        kept_N = None
        if loss.ratio_mask is not None:
            compared_N = gaps_N if loss.ratio_mask == "token" else means_N
            kept_N = inside(compared_N, loss.ratio_mask_low, loss.ratio_mask_high)
        if loss.off_policy_kl is not None:
            assert tokens.ratios is not None
            drifted_N = off_policy(drift(tokens), tokens.advantages, loss.off_policy_kl)
            kept_N = ~drifted_N if kept_N is None else kept_N & ~drifted_N
        factors_N = None
        if loss.importance is not None:
            factors_N = importance(gaps_N if loss.importance == "token" else sums_N, loss.importance_cap)
        elif multiplies(loss) and (tokens.old_logprobs is not None or loss.name not in CLIPPED):
            factors_N = importance(gaps_N, loss.ratio_mask_high)  # else it is the loss's own ratio
        return kept_N, factors_N


def multiplies(loss: Loss) -> bool:
    """True where the mask is IcePop's, which gives a token that stays in the weight of its ratio."""
    return loss.ratio_mask == "token"


def drift(tokens: Tokens) -> Tensor:
    """A call's mean log(policy / sampler): through the old policy where there is one."""
    assert tokens.ratios is not None
    if tokens.old_logprobs is None:
        return tokens.ratios[:, 0]
    return tokens.ratios[:, 0] + tokens.ratios[:, 1]


def known_tokens(batch: Sequence[TrainingSequence], device: str, *, calls: bool) -> Tokens:
    """Gathers the fields of the trained tokens, sequence by sequence; with `calls`, to which call each belongs."""

    def column(name: str, fallback: str | None = None) -> Tensor:
        values: list[float] = []
        for sequence in batch:
            listed = getattr(sequence, name)
            if listed is None:
                listed = getattr(sequence, fallback or name)
            values += [value for value, sampled in zip(listed, sequence.mask, strict=True) if sampled]
        return torch.tensor(values, dtype=torch.float32, device=device)

    def optional(name: str, fallback: str | None = None) -> Tensor | None:
        given = [getattr(sequence, name) is not None for sequence in batch]
        if not any(given):
            return None
        if not all(given) and fallback is None:
            missing = batch[given.index(False)]
            raise EngineError(f"a sequence of rollout {missing.rollout_id} has no {name}, while others have them")
        return column(name, fallback)

    return Tokens(
        column("logprobs"),
        column("advantages"),
        column("weights"),
        old_logprobs=optional("old_logprobs"),
        ref_logprobs=optional("ref_logprobs"),
        kl_weights=optional("kl_weights", "weights"),
        entropy_weights=optional("entropy_weights", "weights"),
        returns=optional("returns"),
        values=optional("values"),
        calls=_calls(batch, device) if calls else None,
    )


def _calls(batch: Sequence[TrainingSequence], device: str) -> Tensor:
    """The call of each trained token, counted over the batch."""
    found: list[int] = []
    count = 0
    for sequence in batch:
        owner = [-1] * len(sequence.tokens)
        for start, end in sequence.segments:
            owner[start:end] = [count] * (end - start)
            count += 1
        called = [call for call, sampled in zip(owner, sequence.mask, strict=True) if sampled]
        if -1 in called:
            raise EngineError(f"a trained token of rollout {sequence.rollout_id} is in no segment")
        found += called
    return torch.tensor(found, dtype=torch.int64, device=device)


def over_all_tokens(mask: Sequence[bool], ratios: Sequence[float], entropies: Sequence[float]) -> TokenNumbers:
    """The numbers of masked tokens at their places, and 1 and 0 at the others."""
    ratio, entropy = iter(ratios), iter(entropies)
    return TokenNumbers(
        [next(ratio) if trained else 1.0 for trained in mask], [next(entropy) if trained else 0.0 for trained in mask]
    )
