"""Nine tokens of three calls, and what each loss is asked about them: shared by frozen numbers and by their references."""

from __future__ import annotations

from typing import Any

import torch

from agentlightning.engines import losses
from agentlightning.engines.losses import Tokens
from agentlightning.training_types import Loss

LENGTHS = (4, 3, 2)
NOW = [-0.5, -1.2, -2.0, -0.1, -0.9, -3.0, -0.7, -1.5, -0.3]
SAMPLER = [-0.6, -1.0, -2.9, -0.3, -0.8, -1.6, -0.75, -1.9, -0.8]
OLD = [-0.55, -1.1, -2.6, -0.2, -0.85, -2.1, -0.72, -1.7, -0.5]
REF = [-0.7, -1.3, -1.4, -0.2, -1.4, -2.2, -0.6, -1.0, -0.35]
CALL_ADVANTAGES = (1.5, -0.8, -1.1)
ADVANTAGES = [a for a, length in zip(CALL_ADVANTAGES, LENGTHS, strict=True) for _ in range(length)]

CASES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "ppo_clip": (Loss(), ()),
    "ppo_clip_dual": (Loss(dual_clip=1.45), ()),
    "ppo_clip_old_importance_token": (Loss(importance="token", importance_cap=1.2), ("old_logprobs",)),
    "ppo_clip_old_importance_call": (Loss(importance="call", importance_cap=1.5), ("old_logprobs",)),
    "ppo_clip_old_icepop": (
        Loss(ratio_mask="token", ratio_mask_low=0.7, ratio_mask_high=1.2),
        ("old_logprobs",),
    ),
    "ppo_clip_mask_call": (Loss(ratio_mask="call", ratio_mask_low=0.7, ratio_mask_high=1 / 0.7), ()),
    "reinforce_importance_token": (Loss(name="reinforce", importance="token", importance_cap=1.2), ()),
    "reinforce_importance_call": (Loss(name="reinforce", importance="call", importance_cap=1.2), ()),
    "gspo": (Loss(name="gspo", clip_low=0.3, clip_high=0.2), ()),
    "gspo_old": (Loss(name="gspo", clip_low=0.05, clip_high=0.1), ("old_logprobs",)),
    "cispo": (Loss(name="cispo"), ()),
    "cispo_free_below": (Loss(name="cispo", clip_low=1.0), ()),
    "off_policy": (Loss(off_policy_kl=0.3), ()),
    "kl_k1": (Loss(kl=0.1, kl_estimator="k1"), ("ref_logprobs",)),
    "kl_k2": (Loss(kl=0.1, kl_estimator="k2"), ("ref_logprobs",)),
    "kl_k3": (Loss(kl=0.1), ("ref_logprobs",)),
}

ANSWERS_NOW = [-4.0, -7.5, -3.2, -6.0]
ANSWERS_REF = [-5.0, -6.9, -3.0, -6.8]
"""Sums over four answers; in pairs the first two were chosen, and kto wanted the first and the third."""
WANTED = [True, False, True, False]
MISMATCHED_NOW = [-9.0, -8.0, -11.0, -7.0]
MISMATCHED_REF = [-9.5, -8.2, -11.1, -7.3]


def calls() -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def tokens(optional: tuple[str, ...] = (), **changes: Any) -> Tokens:
    """The nine tokens with weight 1."""
    known = {"old_logprobs": OLD, "ref_logprobs": REF}
    fields: dict[str, Any] = {name: torch.tensor(known[name]) for name in optional}
    fields = {"calls": calls(), **fields, **changes}
    return Tokens(torch.tensor(SAMPLER), torch.tensor(ADVANTAGES), torch.ones(9), **fields)


def value_and_gradient(loss: Loss, known: Tokens, logprobs: list[float] = NOW) -> tuple[float, list[float]]:
    """The sum over the tokens, and its gradient at each token's logprob: the vocabulary has two words."""
    now = torch.tensor(logprobs, requires_grad=True)
    distributions = torch.stack([now, torch.log1p(-now.exp())], 1)
    total, _ = losses.token_loss(loss, distributions, torch.zeros(len(logprobs), dtype=torch.int64), known)
    (gradient,) = torch.autograd.grad(total, now)
    return float(total.detach()), gradient.tolist()
