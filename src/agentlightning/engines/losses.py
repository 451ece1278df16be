"""The losses of a sampled token, as pure functions of tensors.

A learner drives them; every one gives a value per token, and the learner sums weight × value. Refuses to know where
advantages and weights come from: every normalisation is already in them. Requires torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning.types import Loss


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of N sampled tokens; every field is a float32 tensor of shape [N]."""

    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def ppo_clip(logprobs_N: Tensor, sampler_logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprob - sampler's logprob).

    Schulman et al. (2017), Proximal Policy Optimization Algorithms, equation 7; with two bounds, DAPO (Yu et al., 2025),
    equation 10. The old policy is the sampler itself, so that r corrects for stale weights and for numerics alike.
    r = 1.5, A = 2, bounds 0.2 and 0.28: -min(3, 2.56) = -2.56.
    """
    ratios_N = (logprobs_N - sampler_logprobs_N).exp()
    clipped_N = ratios_N.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def reinforce(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """-A log p: the plain policy gradient, without a ratio to the sampler; right for one update on fresh samples.

    Williams (1992), Simple Statistical Gradient-Following Algorithms, equation 4 with a baseline inside A. With dropout in
    the learner it is the loss to take: a ratio to a sampler that has none would be noise. A = 2, log p = -0.5: 1.
    """
    return -advantages_N * logprobs_N


def sft(logprobs_N: Tensor) -> Tensor:
    """-logprob: the cross-entropy of the token that the demonstrator wrote."""
    return -logprobs_N


def entropy(log_distributions_NV: Tensor) -> Tensor:
    """-Σ p log p in nats, of log-probabilities over the vocabulary. Uniform over 4 tokens: log 4 = 1.386."""
    return -(log_distributions_NV.exp() * log_distributions_NV.clamp(min=-1e30)).sum(-1)


def kl_k3(logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """r - 1 - log r: an unbiased, never negative estimate of KL(sampler || policy) from the sampler's tokens.

    Schulman (2020), Approximating KL Divergence, estimator k3. r = 2: 2 - 1 - 0.693 = 0.307.
    """
    log_ratios_N = logprobs_N - sampler_logprobs_N
    return log_ratios_N.exp() - 1.0 - log_ratios_N


def token_loss(loss: Loss, log_distributions_NV: Tensor, targets_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(SUM over tokens of weight × (loss - entropy coefficient × entropy), totals to report as `summary` wants them)."""
    logprobs_N = log_distributions_NV.gather(1, targets_N[:, None])[:, 0]
    if loss.name == "ppo_clip":
        losses_N = ppo_clip(logprobs_N, tokens.sampler_logprobs, tokens.advantages, loss.clip_low, loss.clip_high)
    elif loss.name == "reinforce":
        losses_N = reinforce(logprobs_N, tokens.advantages)
    else:
        losses_N = sft(logprobs_N)
    with torch.set_grad_enabled(loss.entropy != 0 and torch.is_grad_enabled()):
        entropies_N = entropy(log_distributions_NV)
    if loss.entropy:
        losses_N = losses_N - loss.entropy * entropies_N
    total = (tokens.weights * losses_N).sum()
    with torch.no_grad():
        ratios_N = (logprobs_N - tokens.sampler_logprobs).exp()
        # Clipped means: the gradient is cut, which depends on the sign of the advantage.
        clipped_N = torch.where(tokens.advantages >= 0, ratios_N > 1.0 + loss.clip_high, ratios_N < 1.0 - loss.clip_low)
        report = torch.stack(
            [
                total.detach(),
                (ratios_N - 1.0).abs().max(),
                clipped_N.sum().float(),
                kl_k3(logprobs_N, tokens.sampler_logprobs).sum(),
                entropies_N.detach().sum(),
                logprobs_N.sum(),
            ]
        ).double()
    return total, report


def summary(loss: Loss, reports: list[Tensor], tokens: int) -> dict[str, float]:
    """Metrics of one forward_backward from the reports of its parts. Those of the sampler's ratio only where it counts."""
    if not reports:
        return {"loss": 0.0, "tokens": 0.0}
    table = torch.stack(reports)
    total, clipped, kl, entropies, logprobs = (float(table[:, i].sum()) for i in (0, 2, 3, 4, 5))
    metrics = {"loss": total, "tokens": float(tokens), "entropy": entropies / tokens, "nll": -logprobs / tokens}
    if loss.name != "sft":
        metrics |= {"ratio_max": float(table[:, 1].max()), "kl": kl / tokens}
    if loss.name == "ppo_clip":
        metrics["clip_share"] = clipped / tokens
    return metrics
