"""The losses of tokens and of whole completions, as pure functions of tensors, with off-policy corrections.

A learner drives them and sums weight × value; where advantages and weights come from is not known here. Two policies are
compared: the sampler's, recorded with each token, and the trainer's: the old logprobs of before the step if there are any,
else the policy as it is now. Everything in corrections is a constant to the gradient. A call's statistics come from its own
tokens, so that a merged row and a row per call give the same numbers. Requires torch.

Preferences need no second kind of backward pass. With S the sum of a completion's logprobs, the gradient of a loss L is the
sum over completions of dL/dS times the gradient of S: a first pass without gradient gives every S, `coefficients` every
dL/dS, and a second pass is a token sum with these as weights. Both completions of a pair may so be in different
micro-batches, and the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from agentlightning.errors import ConfigError, EngineError, boundary
from agentlightning.runtime.code_loader import load_plugin, plugin_hash
from agentlightning.training_types import LOSSES, Loss, Preference, PreferenceLoss, TokenNumbers, TrainingSequence

CLIPPED = ("ppo_clip", "gspo", "cispo")
"""Losses whose ratio corrects for the sampler by itself."""
MAX_LOG_RATIO = 20.0
"""Of two policies at a token or call, either way, as in verl and OpenRLHF: exp of more overflows in a sum of float32, and
0 × infinity is a gradient that is no number."""


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

    def columns(self) -> dict[str, Tensor]:
        """The fields that are known, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def _bounded(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(log_ratios_N: Tensor) -> Tensor:
    """exp of the log ratio within ±20; without a gradient beyond. [0, log 2, 21]: [1, 2, exp(20)]."""
    return _bounded(log_ratios_N).exp()


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
    equation 10; dual clip, Ye et al. (2020), Mastering Complex Control in MOBA Games, equation 5.
    r = 1.5, A = 2, bounds 0.2 and 0.28: -min(3, 2.56) = -2.56. r = 5, A = -2: 10; with dual 3: 6.
    """
    ratios_N = ratio(logprobs_N - base_logprobs_N)
    clipped_N = ratios_N.clamp(1.0 - low, 1.0 + high)
    losses_N = -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)
    if dual is None:
        return losses_N
    return torch.where(advantages_N < 0, torch.minimum(losses_N, -dual * advantages_N), losses_N)


def gspo(logprobs_N: Tensor, call_means_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-min(s A, clip(s, 1 - low, 1 + high) A), with s = exp(mean of log(policy / base) over the call's tokens).

    Zheng et al. (2025), Group Sequence Policy Optimization, equations 5 to 7, in the form of GSPO-token (equations 13 and
    14): s is the call's ratio in value, and its gradient at a token is s times that of the token's logprob, so that the sum
    over a call of one advantage and weight is GSPO's own. Log ratios [0.2, 0.4], A = 1, bounds 0.5: -exp(0.3) = -1.350.
    """
    ratios_N = ratio(call_means_N + logprobs_N - logprobs_N.detach())
    clipped_N = ratios_N.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def cispo(logprobs_N: Tensor, base_logprobs_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """-clip(r, 1 - low, 1 + high) A log p, where the clipped ratio is a constant: every token keeps a gradient.

    MiniMax (2025), MiniMax-M1, equations 4 and 5; the paper leaves the lower side free (here low = 1).
    r = 1.5, log p = -0.5, A = 2, high 0.28: 1.28 x 2 x 0.5 = 1.28; its gradient is -2.56.
    """
    ratios_N = ratio(logprobs_N.detach() - base_logprobs_N)
    return -ratios_N.clamp(1.0 - low, 1.0 + high) * advantages_N * logprobs_N


def reinforce(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """-A log p, without a ratio to the sampler: right for one update on fresh samples.

    Williams (1992), Simple Statistical Gradient-Following Algorithms, equation 4 with a baseline inside A. With dropout it
    is the loss to take: a ratio to a sampler that has none would be noise. A = 2, log p = -0.5: 1.
    """
    return -advantages_N * logprobs_N


def sft(logprobs_N: Tensor) -> Tensor:
    """-logprob: the cross-entropy of the token that the demonstrator wrote."""
    return -logprobs_N


def plugin_loss(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> Tensor:
    """A user's ``name(logprobs, tokens, *, settings) -> Tensor``, a value for each of N tokens, which may be a part of a
    call: whole-call means are in ``tokens.ratios``.

    ConfigError where it returns anything else, or what has no gradient; AgentError where it raises.
    """
    what = f"loss {loss.name!r}"
    function = load_plugin("loss", loss.name, LOSSES)
    if loss.code_hash is not None and plugin_hash("loss", loss.name) != loss.code_hash:
        raise ConfigError(
            f"{what}: its file was changed after the trainer had loaded it; resume the run with one version"
        )
    # Copies: what a loss does to its arguments must not reach weights, masks and KL.
    own = replace(tokens, **{name: column.clone() for name, column in tokens.columns().items()})
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
    log_ratios_N = _bounded(logprobs_N - sampler_logprobs_N)
    return log_ratios_N.exp() - 1.0 - log_ratios_N


def kl_to_reference(estimator: Literal["k1", "k2", "k3"], logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) from the policy's own tokens, with d = log(policy / reference).

    k1 = d; k2 = d²/2; k3 = exp(-d) - 1 + d. Schulman (2020), Approximating KL Divergence; k3 in the loss is GRPO's
    convention (Shao et al., 2024, DeepSeekMath, equation 4), whose gradient in the mean is that of KL(reference || policy);
    k2's is that of the KL itself. The gradient of a plain k1 is 0 in the mean, so k1 has that of k2 (Tang and Munos, 2025,
    On a Few Pitfalls in KL Divergence Gradient Estimation for RL; "k1+" in verl). d = log 2: 0.693, 0.240, 0.193.
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


def needs_calls(loss: Loss) -> bool:
    """True where the loss of a token depends on the other tokens of its call."""
    whole = "call" in (loss.importance, loss.ratio_mask) or loss.off_policy_kl is not None
    return loss.name == "gspo" or loss.is_plugin or whole


def call_ratios(logprobs_N: Tensor, tokens: Tokens) -> Tensor:
    """[N, 3], for each token of its call: mean log(policy / base), mean log(trainer / sampler), and the latter's sum.

    The tokens must hold their calls whole. Two calls of 2 and 1 tokens with log(policy / base) = [0.2, 0.4 | -0.1]:
    means [0.3, 0.3, -0.1].
    """
    if tokens.calls is None:
        raise EngineError("this loss compares whole calls, so tokens need calls: the segments of their sequences")
    with torch.no_grad():
        now_N = logprobs_N.detach()
        gaps_N2 = torch.stack([now_N - tokens.base_logprobs, _trainer(now_N, tokens) - tokens.sampler_logprobs], 1)
        columns_N3 = torch.cat([gaps_N2, torch.ones_like(gaps_N2[:, :1])], 1)
        sums_C3 = columns_N3.new_zeros(int(tokens.calls.max()) + 1, 3).index_add_(0, tokens.calls, columns_N3)
        means_C2 = sums_C3[:, :2] / sums_C3[:, 2:].clamp(min=1.0)
        return torch.cat([means_C2, sums_C3[:, 1:2]], 1)[tokens.calls]


def _trainer(now_N: Tensor, tokens: Tokens) -> Tensor:
    return now_N if tokens.old_logprobs is None else tokens.old_logprobs


def importance(log_ratios_N: Tensor, cap: float) -> Tensor:
    """min(trainer / sampler, cap): truncated importance sampling. Log ratios [log 3, log 0.5], cap 2: [2, 0.5].

    Of tokens: Yao et al. (2025), Your Efficient RL Framework Secretly Brings You Off-Policy RL Training. Of calls (sums of
    their tokens' log ratios): Liu et al. (2025), When Speed Kills Stability, sequence-level TIS. Truncation itself: Ionides
    (2008), Truncated Importance Sampling.
    """
    return ratio(log_ratios_N).clamp(max=cap)


def inside(log_ratios_N: Tensor, low: float, high: float) -> Tensor:
    """True where trainer / sampler is in [low, high]. Log ratios [0, log 6, log 0.4] with 0.5 and 5: [True, False, False].

    Of tokens: IcePop, Ling Team (2025), Every Step Evolves (bounds 0.5 and 5): a token that stays in is also multiplied by
    its ratio. Of calls, by the geometric mean of their tokens' ratios: Liu et al. (2025), When Speed Kills Stability,
    geometric sequence masking.
    """
    ratios_N = ratio(log_ratios_N)
    return (ratios_N >= low) & (ratios_N <= high)


def off_policy(log_ratios_N: Tensor, advantages_N: Tensor, max_kl: float) -> Tensor:
    """True where a call drifted too far to be a bad example: A < 0 and mean log(sampler / policy) > max_kl.

    DeepSeek-AI (2025), DeepSeek-V3.2, off-policy sequence masking. log_ratios are a call's mean log(policy / sampler), at
    each of its tokens. [-0.3, -0.3, 0.1], A = [-1, 1, -1], max_kl 0.2: [True, False, False].
    """
    return (advantages_N < 0) & (-log_ratios_N > max_kl)


def corrections(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
    """(whether each token stays in, what its policy term is multiplied by); None where the loss asks for neither."""
    if loss.importance is not None and loss.name in CLIPPED and tokens.old_logprobs is None:
        raise EngineError(f"importance with the loss {loss.name!r} needs sequences with old_logprobs")
    with torch.no_grad():
        gaps_N = _trainer(logprobs_N.detach(), tokens) - tokens.sampler_logprobs
        means_N = sums_N = gaps_N
        if tokens.ratios is not None:
            means_N, sums_N = tokens.ratios[:, 1], tokens.ratios[:, 2]
        kept_N = None
        if loss.ratio_mask is not None:
            compared_N = gaps_N if loss.ratio_mask == "token" else means_N
            kept_N = inside(compared_N, loss.ratio_mask_low, loss.ratio_mask_high)
        if loss.off_policy_kl is not None:
            assert tokens.ratios is not None
            drift_N = tokens.ratios[:, 0] + (0.0 if tokens.old_logprobs is None else tokens.ratios[:, 1])
            drifted_N = off_policy(drift_N, tokens.advantages, loss.off_policy_kl)
            kept_N = ~drifted_N if kept_N is None else kept_N & ~drifted_N
        factors_N = None
        if loss.importance is not None:
            factors_N = importance(gaps_N if loss.importance == "token" else sums_N, loss.importance_cap)
        elif loss.ratio_mask == "token" and (tokens.old_logprobs is not None or loss.name not in CLIPPED):
            factors_N = importance(gaps_N, loss.ratio_mask_high)  # IcePop's; else it is the loss's own ratio
        return kept_N, factors_N


def token_loss(loss: Loss, log_distributions_NV: Tensor, targets_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(SUM over tokens of weight × (policy term - entropy + KL, each with its coefficient), totals for `summary`).

    A loss that compares whole calls finds them in tokens.ratios, else works them out here, where calls must be whole.
    """
    return sampled_token_loss(loss, *sampled_numbers(loss, log_distributions_NV, targets_N), tokens)


def sampled_numbers(loss: Loss, log_distributions_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens and entropies of their distributions, these with a gradient if the loss has an
    entropy term."""
    logprobs_N = log_distributions_NV.gather(1, targets_N[:, None])[:, 0]
    with torch.set_grad_enabled(loss.entropy != 0 and torch.is_grad_enabled()):
        return logprobs_N, entropy(log_distributions_NV)


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
        zero = total.new_zeros(())
        report = [
            total.detach(),
            (ratios_N - 1.0).abs().max(),
            clipped_N.sum().float(),
            kl_k3(logprobs_N, tokens.sampler_logprobs).sum(),
            entropies_N.detach().sum(),
            logprobs_N.sum(),
            zero if kept_N is None else (~kept_N).sum().float(),
            zero if factors_N is None else factors_N.sum(),
            divergences_N.detach().sum(),
        ]
        return total, torch.stack(report).double()


def _policy_term(loss: Loss, logprobs_N: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of each token with its corrections, and what these were."""
    kept_N, factors_N = corrections(loss, logprobs_N, tokens)
    base_N, advantages_N, bounds = tokens.base_logprobs, tokens.advantages, (loss.clip_low, loss.clip_high)
    if kept_N is not None:  # before any ratio is taken: one that overflows would give 0 × infinity
        logprobs_N = torch.where(kept_N, logprobs_N, base_N)
    if loss.name == "ppo_clip":
        losses_N = ppo_clip(logprobs_N, base_N, advantages_N, *bounds, loss.dual_clip)
    elif loss.name == "gspo":
        assert tokens.ratios is not None
        losses_N = gspo(logprobs_N, tokens.ratios[:, 0], advantages_N, *bounds)
    elif loss.name == "cispo":
        losses_N = cispo(logprobs_N, base_N, advantages_N, *bounds)
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
    ratios_N = ratio(log_ratios_N)
    above_N, below_N = ratios_N > 1.0 + loss.clip_high, ratios_N < 1.0 - loss.clip_low
    if loss.name == "cispo":
        return ratios_N, above_N | below_N
    # Clipped means: the gradient is cut, which depends on the sign of the advantage.
    clipped_N = torch.where(tokens.advantages >= 0, above_N, below_N)
    if loss.name == "ppo_clip" and loss.dual_clip is not None:
        clipped_N = clipped_N | ((tokens.advantages < 0) & (ratios_N > loss.dual_clip))
    return ratios_N, clipped_N


def summary(loss: Loss, reports: list[Tensor], tokens: int) -> dict[str, float]:
    """Metrics of one forward_backward from the reports of its parts; those of the ratio only where the loss has one."""
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


def known_tokens(batch: Sequence[TrainingSequence], device: str, *, calls: bool) -> Tokens:
    """The fields of the trained tokens, sequence by sequence; with `calls`, to which call each belongs."""

    def column(name: str, fallback: str = "") -> Tensor:
        values: list[float] = []
        for sequence in batch:
            listed = getattr(sequence, name)
            listed = getattr(sequence, fallback) if listed is None else listed
            values += [value for value, sampled in zip(listed, sequence.mask, strict=True) if sampled]
        return torch.tensor(values, dtype=torch.float32, device=device)

    def optional(name: str, fallback: str = "") -> Tensor | None:
        given = [getattr(sequence, name) is not None for sequence in batch]
        if not any(given):
            return None
        if not all(given) and not fallback:
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
    given, uncertain = iter(ratios), iter(entropies)
    return TokenNumbers(
        [next(given) if trained else 1.0 for trained in mask],
        [next(uncertain) if trained else 0.0 for trained in mask],
    )


def dpo(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)), with log(policy / reference) of each completion.

    Rafailov et al. (2023), Direct Preference Optimization, equation 7. chosen 1, rejected -1, beta 0.5:
    -log sigmoid(1) = 0.3133.
    """
    return -F.logsigmoid(beta * (chosen_P - rejected_P))


def kto(
    log_ratios_A: Tensor, wanted_A: Tensor, baseline: Tensor, beta: float, chosen: float, rejected: float
) -> Tensor:
    """lambda_D (1 - sigmoid(beta (h - z))) of a completion that is wanted, lambda_U (1 - sigmoid(beta (z - h))) of another.

    h = log(policy / reference) of the completion, z >= 0 the baseline, a constant. Ethayarajh et al. (2024), KTO: Model
    Alignment as Prospect Theoretic Optimization, equations 7 and 8 (lambda_y - v: the loss as in TRL, never negative).
    h = 1, z = 0, beta 1, wanted: 1 - 0.7311 = 0.2689.
    """
    away_A = beta * (log_ratios_A - baseline)
    return torch.where(wanted_A, chosen * (1.0 - torch.sigmoid(away_A)), rejected * (1.0 - torch.sigmoid(-away_A)))


def kto_baseline(mismatched_M: Tensor) -> Tensor:
    """max(0, mean of log(policy / reference) of completions beside prompts of others): estimates KL(policy || reference).

    One number per completion, the sum over its rows, as h is. Ethayarajh et al. (2024), section 4.1. [0.5, -0.1]: 0.2;
    [-1, 0]: 0; none given: 0.
    """
    if not len(mismatched_M):
        return mismatched_M.new_zeros(())
    return mismatched_M.detach().mean().clamp(min=0.0)


def preference_loss(
    loss: PreferenceLoss, examples: Sequence[Preference], log_ratios_A: Tensor, mismatched_M: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """(SUM over examples of weight × loss, metrics), from log(policy / reference) of every completion.

    Completions are in the order of the examples, chosen before rejected. Metrics: margin (mean beta × (chosen - rejected)),
    accuracy (share of pairs with a margin above 0), for dpo; baseline and margin (of wanted against others) for kto.
    """
    check_preferences(loss, examples)
    weights_E = log_ratios_A.new_tensor([example.weight for example in examples])
    if loss.name == "dpo":
        chosen_P, rejected_P = log_ratios_A.view(-1, 2).unbind(1)
        losses_E = dpo(chosen_P, rejected_P, loss.beta)
        margins_P = loss.beta * (chosen_P - rejected_P).detach()
        metrics = {"margin": float(margins_P.mean()), "accuracy": float((margins_P > 0).float().mean())}
    else:
        wanted_A = torch.tensor([bool(example.chosen) for example in examples], device=log_ratios_A.device)
        baseline = kto_baseline(mismatched_M)
        losses_E = kto(log_ratios_A, wanted_A, baseline, loss.beta, loss.chosen_weight, loss.rejected_weight)
        metrics = {"baseline": float(baseline)}
        if bool(wanted_A.any()) and not bool(wanted_A.all()):
            rewards_A = loss.beta * log_ratios_A.detach()
            metrics["margin"] = float(rewards_A[wanted_A].mean() - rewards_A[~wanted_A].mean())
    total = (weights_E * losses_E).sum()
    return total, metrics | {"loss": float(total.detach()), "examples": float(len(examples))}


def coefficients(
    loss: PreferenceLoss, examples: Sequence[Preference], log_ratios_A: Tensor, mismatched_M: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """(dL/dS of each completion, metrics): the weights of its tokens' logprobs in the second pass."""
    with torch.enable_grad():
        free_A = log_ratios_A.detach().requires_grad_()
        total, metrics = preference_loss(loss, examples, free_A, mismatched_M)
        (gradient_A,) = torch.autograd.grad(total, free_A)
    return gradient_A, metrics


def check_preferences(loss: PreferenceLoss, examples: Sequence[Preference]) -> None:
    """EngineError unless every example has what the loss compares, with reference logprobs on every row."""
    wanted, count = ("a chosen and a rejected", 2) if loss.name == "dpo" else ("either a chosen or a rejected", 1)
    for example in examples:
        if (kinds := bool(example.chosen) + bool(example.rejected)) != count:
            raise EngineError(f"{loss.name} takes {wanted} completion in each example, got {kinds} of the two")
        for sequence in (*example.chosen, *example.rejected):
            if sequence.ref_logprobs is None:
                raise EngineError(
                    f"{loss.name} needs ref_logprobs, and a row of rollout {sequence.rollout_id} has none"
                )
