"""The losses of a sampled token, as pure functions of tensors.

A learner drives them; every one gives a value per token, and the learner sums weight × value. Refuses to know where
advantages and weights come from: every normalisation is already in them. Requires torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agentlightning.engines.corrections import Tokens, call_ratios, corrections, needs_calls
from agentlightning.engines.support import CLIPPED
from agentlightning.errors import ConfigError, EngineError, boundary
from agentlightning.runtime.code_loader import load_plugin, plugin_hash
from agentlightning.training_types import LOSSES, Loss


def ppo_clip(
    logprobs_N: Tensor,
    base_logprobs_N: Tensor,
    advantages_N: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprob - base logprob); where A < 0 at most -dual A.

    Schulman et al. (2017), Proximal Policy Optimization Algorithms, equation 7; with two bounds, DAPO (Yu et al., 2025),
    equation 10; dual clip, Ye et al. (2020), Mastering Complex Control in MOBA Games, equation 5. The base is the sampler
    itself, so that r corrects for stale weights and for numerics alike, or the trainer before the step.
    r = 1.5, A = 2, bounds 0.2 and 0.28: -min(3, 2.56) = -2.56. r = 5, A = -2: 10; with dual 3: 6.
    """
    ratios_N = (logprobs_N - base_logprobs_N).exp()
    clipped_N = ratios_N.clamp(1.0 - low, 1.0 + high)
    losses_N = -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)
    if dual is None:
        return losses_N
    return torch.where(advantages_N < 0, torch.minimum(losses_N, -dual * advantages_N), losses_N)


def gspo(logprobs_N: Tensor, call_means_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-min(s A, clip(s, 1 - low, 1 + high) A), with s = exp(mean of log(policy / base) over the call's tokens).

    Zheng et al. (2025), Group Sequence Policy Optimization, equations 5 to 7, in the form of GSPO-token (equations 13 and
    14): s is the call's ratio in value, and its gradient at a token is s times that of the token's logprob. With one
    advantage and one weight in a call the sum over the call's tokens is GSPO's own, value and gradient. The paper's
    bounds are 3e-4 and 4e-4. Log ratios [0.2, 0.4], A = 1, bounds 0.5: -exp(0.3) = -1.350 for both.
    """
    ratios_N = (call_means_N + logprobs_N - logprobs_N.detach()).exp()
    clipped_N = ratios_N.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def cispo(logprobs_N: Tensor, base_logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-clip(r, 1 - low, 1 + high) A log p, where the clipped ratio is a constant: every token keeps a gradient.

    MiniMax (2025), MiniMax-M1, equations 4 and 5; the paper leaves the lower side free (here low = 1).
    r = 1.5, log p = -0.5, A = 2, high 0.28: 1.28 x 2 x 0.5 = 1.28; its gradient is -2.56.
    """
    ratios_N = (logprobs_N.detach() - base_logprobs_N).exp()
    return -ratios_N.clamp(1.0 - low, 1.0 + high) * advantages_N * logprobs_N


def reinforce(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """-A log p: the plain policy gradient, without a ratio to the sampler; right for one update on fresh samples.

    Williams (1992), Simple Statistical Gradient-Following Algorithms, equation 4 with a baseline inside A. With dropout in
    the learner it is the loss to take: a ratio to a sampler that has none would be noise. A = 2, log p = -0.5: 1.
    """
    return -advantages_N * logprobs_N


def sft(logprobs_N: Tensor) -> Tensor:
    """-logprob: the cross-entropy of the token that the demonstrator wrote."""
    return -logprobs_N


def plugin_loss(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> Tensor:
    """A loss of the user's own: ``name(logprobs, tokens, *, settings) -> Tensor``, a value for each of N tokens, which may
    be a part of a call: whole-call means are in ``tokens.ratios``.

    Weights, masks, corrections, KL and entropy are applied to it as to the others. ConfigError where it returns anything
    else, or what has no gradient; AgentError where it raises.
    """
    what = f"loss {loss.name!r}"
    function = load_plugin("loss", loss.name, LOSSES)
    if loss.code_hash is not None and plugin_hash("loss", loss.name) != loss.code_hash:
        raise ConfigError(
            f"{what}: its file was changed after the trainer had loaded it; resume the run with one version"
        )
    # Copies: what a loss does to its arguments must not reach weights, masks and KL.
    own = replace(tokens, **{name: column.clone() for name, column in zip(*tokens.columns(), strict=True)})
    with boundary(what):
        found = function(logprobs_N.clone(), own, **loss.settings)
    if not isinstance(found, Tensor) or found.shape != logprobs_N.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"{what}: expected a tensor of shape {tuple(logprobs_N.shape)}, a value per token, got {got}")
    if logprobs_N.requires_grad and not found.requires_grad:
        raise ConfigError(f"{what}: what it returned has no gradient; expected it to be computed from logprobs")
    if not bool(found.isfinite().all()):
        raise ConfigError(f"{what}: expected finite numbers, got {float(found.detach()[~found.isfinite()][0])}")
    return found


def entropy(log_distributions_NV: Tensor) -> Tensor:
    """-Σ p log p in nats, of log-probabilities over the vocabulary. Uniform over 4 tokens: log 4 = 1.386."""
    return -(log_distributions_NV.exp() * log_distributions_NV.clamp(min=-1e30)).sum(-1)


def kl_k3(logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """r - 1 - log r: an unbiased, never negative estimate of KL(sampler || policy) from the sampler's tokens.

    Schulman (2020), Approximating KL Divergence, estimator k3. r = 2: 2 - 1 - 0.693 = 0.307.
    """
    log_ratios_N = logprobs_N - sampler_logprobs_N
    return log_ratios_N.exp() - 1.0 - log_ratios_N


def kl_to_reference(estimator: Literal["k1", "k2", "k3"], logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) from the policy's own tokens, with d = log(policy / reference).

    k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d. Schulman (2020), Approximating KL Divergence; k3 in the loss is GRPO's
    convention (Shao et al., 2024, DeepSeekMath, equation 4). It estimates the KL, and in the mean its gradient is that of
    the other direction, KL(reference || policy); k2's is that of the KL itself. The gradient of k1 as it stands is 0 in the
    mean, so that it would be a setting without effect: k1 has the gradient of k2, d times that of log p, which is what k1
    subtracted from the reward gives (Tang and Munos, 2025, On a Few Pitfalls in KL Divergence Gradient Estimation for RL;
    "k1+" in verl).
    d = log 2: 0.693, 0.240, 0.193.
    """
    if estimator == "k3":
        return kl_k3(ref_logprobs_N, logprobs_N)
    differences_N = logprobs_N - ref_logprobs_N
    squares_N = 0.5 * differences_N.square()
    if estimator == "k2":
        return squares_N
    return squares_N - squares_N.detach() + differences_N.detach()


def value_loss(values_N: Tensor, returns_N: Tensor, old_values_N: Tensor | None, clip: float | None) -> Tensor:
    """½ (V - R)², or with a clip ½ max((V - R)², (clamp(V, V_old ± clip) - R)²): no gain from moving further in one step.

    Schulman et al. (2017), Proximal Policy Optimization Algorithms, equation 9 (L^VF), with the clip of the authors' code
    (baselines, ppo2). V = 1, R = 0, V_old = 0.2, clip 0.5: ½ max(1, 0.49) = 0.5. V = 1, R = 2: ½ max(1, 1.69) = 0.845.
    """
    losses_N = (values_N - returns_N).square()
    if clip is not None and old_values_N is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        losses_N = torch.maximum(losses_N, (near_N - returns_N).square())
    return 0.5 * losses_N


def token_loss(loss: Loss, log_distributions_NV: Tensor, targets_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(SUM over tokens of weight × (policy term - entropy + KL, each with its coefficient), totals to report).

    `summary` takes the totals. A loss that compares whole calls finds them in tokens.ratios, else works them out here,
    where calls must be whole.
    """
    return sampled_token_loss(loss, *sampled_numbers(loss, log_distributions_NV, targets_N), tokens)


def sampled_numbers(loss: Loss, log_distributions_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens and entropies of their distributions, which have a gradient where the loss
    is about them."""
    logprobs_N = log_distributions_NV.gather(1, targets_N[:, None])[:, 0]
    with torch.set_grad_enabled(loss.entropy != 0 and torch.is_grad_enabled()):
        entropies_N = entropy(log_distributions_NV)
    return logprobs_N, entropies_N


def sampled_token_loss(loss: Loss, logprobs_N: Tensor, entropies_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """`token_loss` from the log-probabilities of the sampled tokens and the entropies of their distributions."""
    if needs_calls(loss) and tokens.ratios is None:
        tokens = replace(tokens, ratios=call_ratios(logprobs_N, tokens))
    losses_N, kept_N, factors_N = _policy_term(loss, logprobs_N, tokens)
    extra: Tensor | float = 0.0
    if loss.entropy and tokens.entropy_weights is None:
        losses_N = losses_N - loss.entropy * entropies_N
    elif loss.entropy and tokens.entropy_weights is not None:
        extra = -loss.entropy * (tokens.entropy_weights * entropies_N).sum()
    divergences_N = torch.zeros_like(logprobs_N)
    if loss.kl:
        if tokens.ref_logprobs is None:
            raise EngineError("loss.kl needs sequences with ref_logprobs; ask the engine for reference_logprobs first")
        divergences_N = kl_to_reference(loss.kl_estimator, logprobs_N, tokens.ref_logprobs)
        weights_N = tokens.weights if tokens.kl_weights is None else tokens.kl_weights
        extra = extra + loss.kl * (weights_N * divergences_N).sum()
    total = (tokens.weights * losses_N).sum() + extra
    with torch.no_grad():
        ratios_N, clipped_N = _ratios(loss, logprobs_N, tokens)
        nothing = total.new_zeros(())
        report = torch.stack(
            [
                total.detach(),
                (ratios_N - 1.0).abs().max(),
                clipped_N.sum().float(),
                kl_k3(logprobs_N, tokens.sampler_logprobs).sum(),
                entropies_N.detach().sum(),
                logprobs_N.sum(),
                nothing if kept_N is None else (~kept_N).sum().float(),
                nothing if factors_N is None else factors_N.sum(),
                divergences_N.detach().sum(),
            ]
        ).double()
    return total, report


def _policy_term(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of each token with its corrections, and what these were."""
    kept_N, factors_N = corrections(loss, logprobs_N, tokens)
    base_N, advantages_N = tokens.base_logprobs, tokens.advantages
    if kept_N is not None:  # before any ratio is taken: one that overflows would give 0 × infinity
        logprobs_N = torch.where(kept_N, logprobs_N, base_N)
    if loss.name == "ppo_clip":
        losses_N = ppo_clip(logprobs_N, base_N, advantages_N, loss.clip_low, loss.clip_high, loss.dual_clip)
    elif loss.name == "gspo":
        assert tokens.ratios is not None
        losses_N = gspo(logprobs_N, tokens.ratios[:, 0], advantages_N, loss.clip_low, loss.clip_high)
    elif loss.name == "cispo":
        losses_N = cispo(logprobs_N, base_N, advantages_N, loss.clip_low, loss.clip_high)
    elif loss.name == "reinforce":
        losses_N = reinforce(logprobs_N, advantages_N)
    elif loss.is_plugin:
        losses_N = plugin_loss(loss, logprobs_N, tokens)
    else:
        losses_N = sft(logprobs_N)
    if factors_N is not None:
        losses_N = losses_N * factors_N
    if kept_N is not None:
        losses_N = torch.where(kept_N, losses_N, 0.0)
    return losses_N, kept_N, factors_N


def _ratios(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The ratio that the loss is about, and whether it was cut."""
    log_ratios_N = logprobs_N - tokens.base_logprobs
    if loss.name == "gspo":
        assert tokens.ratios is not None
        log_ratios_N = tokens.ratios[:, 0]
    ratios_N = log_ratios_N.exp()
    above_N, below_N = ratios_N > 1.0 + loss.clip_high, ratios_N < 1.0 - loss.clip_low
    if loss.name == "cispo":
        return ratios_N, above_N | below_N
    # Clipped means: the gradient is cut, which depends on the sign of the advantage.
    clipped_N = torch.where(tokens.advantages >= 0, above_N, below_N)
    if loss.name == "ppo_clip" and loss.dual_clip is not None:
        clipped_N = clipped_N | ((tokens.advantages < 0) & (ratios_N > loss.dual_clip))
    return ratios_N, clipped_N


def summary(loss: Loss, reports: list[Tensor], tokens: int) -> dict[str, float]:
    """Metrics of one forward_backward from the reports of its parts. Those of the sampler's ratio only where it counts."""
    if not reports:
        return {"loss": 0.0, "tokens": 0.0}
    table = torch.stack(reports)
    total, clipped, kl, entropies, logprobs = (float(table[:, i].sum()) for i in (0, 2, 3, 4, 5))
    metrics = {"loss": total, "tokens": float(tokens), "entropy": entropies / tokens, "nll": -logprobs / tokens}
    if loss.name != "sft":
        metrics |= {"ratio_max": float(table[:, 1].max()), "kl": kl / tokens}
    if loss.name in CLIPPED:
        metrics["clip_share"] = clipped / tokens
    if loss.ratio_mask is not None or loss.off_policy_kl is not None:
        metrics["masked_share"] = float(table[:, 6].sum()) / tokens
    if loss.importance is not None:
        metrics["importance"] = float(table[:, 7].sum()) / tokens
    if loss.kl:
        metrics["ref_kl"] = float(table[:, 8].sum()) / tokens
    return metrics
