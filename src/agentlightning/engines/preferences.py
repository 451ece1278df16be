"""The losses of preferences, as pure functions of how much more likely a completion became than under the reference.

A learner drives them; a completion is all trained tokens of its rows, however many calls it took. They are functions of sums
over tokens, not sums over tokens themselves, and refuse to know where pairs and labels come from. Requires torch.

A learner needs no second kind of backward pass for them. With S the sum of a completion's logprobs, the gradient of a loss L
is the sum over completions of dL/dS times the gradient of S: so a first pass without gradient gives every S, `coefficients`
gives every dL/dS, and a second pass is a token sum with these as weights. Both completions of a pair may so be in different
micro-batches, and the gradient is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from agentlightning.errors import EngineError
from agentlightning.training_types import Preference, PreferenceLoss


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

    Ethayarajh et al. (2024), section 4.1. [0.5, -0.1]: 0.2; [-1, 0]: 0; none given: 0.
    """
    if not len(mismatched_M):
        return mismatched_M.new_zeros(())
    return mismatched_M.detach().mean().clamp(min=0.0)


def preference_loss(
    loss: PreferenceLoss, examples: Sequence[Preference], log_ratios_A: Tensor, mismatched_M: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """(SUM over examples of weight × loss, metrics), from log(policy / reference) of every completion.

    Completions are in the order of the examples, chosen before rejected; one that an example does not have is left out.
    Metrics: margin (mean beta × (chosen - rejected)), accuracy (share of pairs with a margin above 0), for dpo; baseline and
    margin (of wanted against others) for kto.
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
    """(dL/dS of each completion, metrics): what its tokens' logprobs are weighted by in the second pass."""
    with torch.enable_grad():
        free_A = log_ratios_A.detach().requires_grad_()
        total, metrics = preference_loss(loss, examples, free_A, mismatched_M)
        (gradient_A,) = torch.autograd.grad(total, free_A)
    return gradient_A, metrics


def check_preferences(loss: PreferenceLoss, examples: Sequence[Preference]) -> None:
    """EngineError unless every example has what the loss compares, with reference logprobs on every row."""
    for example in examples:
        kinds = bool(example.chosen) + bool(example.rejected)
        if kinds != (2 if loss.name == "dpo" else 1):
            expected = (
                "a chosen and a rejected answer" if loss.name == "dpo" else "an answer that is chosen or rejected"
            )
            raise EngineError(f"{loss.name} takes {expected} in each example, got {kinds} of the two")
        for sequence in (*example.chosen, *example.rejected):
            if sequence.ref_logprobs is None:
                raise EngineError(
                    f"{loss.name} needs ref_logprobs, and a row of rollout {sequence.rollout_id} has none"
                )
