"""Call statistics, importance weights, masks, KL: worked by hand, exact under merging, and each with its kill switch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from loss_cases import CASES, NOW, OLD, SAMPLER, tokens, value_and_gradient

from agentlightning.engines import losses
from agentlightning.engines.losses import Tokens
from agentlightning.errors import EngineError
from agentlightning.training_types import Loss


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def two_calls(log_ratios: list[float], **changes: Any) -> Tokens:
    """Tokens of a call of two and a call of one, whose sampler's logprobs are the log ratios below zero."""
    fields: dict[str, Any] = {"calls": torch.tensor([0, 0, 1]), **changes}
    return Tokens(-torch.tensor(log_ratios), torch.ones(3), torch.ones(3), **fields)


def test_a_call_s_ratio_is_the_mean_of_its_tokens_and_its_product_the_sum() -> None:
    """With old logprobs the policy is compared with them, and they with the sampler."""
    found = losses.call_ratios(torch.zeros(3), two_calls([0.2, 0.4, -0.1]))
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.3, 0.6], [0.3, 0.3, 0.6], [-0.1, -0.1, -0.1]]))
    found = losses.call_ratios(torch.zeros(3), two_calls([0.2, 0.4, -0.1], old_logprobs=t(-0.1, -0.1, 0.0)))
    torch.testing.assert_close(found, torch.tensor([[0.1, 0.2, 0.4], [0.1, 0.2, 0.4], [0.0, -0.1, -0.1]]))


def test_gspo_s_gradient_is_that_of_the_sequence_ratio_itself() -> None:
    """Over a call of n tokens, sum of -s A is n times the paper's -s A, with s differentiated as it is written."""
    now = torch.tensor([-0.5, -1.0, -0.2], requires_grad=True)
    sampler = t(-0.6, -0.8, -0.3)
    (ratio := ((now - sampler).mean()).exp()).backward()
    means = (now.detach() - sampler).mean().expand(3)
    found = torch.autograd.grad(losses.gspo(now, means, t(1.0, 1.0, 1.0), 0.5, 0.5).sum(), now)[0]
    assert now.grad is not None
    torch.testing.assert_close(found, -3 * now.grad)
    assert ratio.item() > 0


@pytest.mark.parametrize("cuts", [(0, 4, 7, 9), (0, 2, 5, 9)], ids=["a row a call", "pieces that cut a call"])
@pytest.mark.parametrize("case", CASES)
def test_a_row_of_merged_calls_gives_the_loss_and_gradient_of_its_parts(case: str, cuts: tuple[int, ...]) -> None:
    loss, optional = CASES[case]
    known = tokens(optional)
    whole, gradient = value_and_gradient(loss, known)
    if cuts[1] == 2:  # parts of calls are given the ratios of the whole ones
        known = replace(known, ratios=losses.call_ratios(torch.tensor(NOW), known))
    found = []
    for start, end in pairwise(cuts):
        part = Tokens(**{name: column[start:end] for name, column in known.columns().items()})
        found.append(value_and_gradient(loss, part, NOW[start:end]))
    assert whole == pytest.approx(sum(total for total, _ in found), abs=1e-6)
    assert gradient == pytest.approx([g for _, part in found for g in part], abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (Loss(name="gspo"), "segments"),
        (Loss(kl=0.1), "ref_logprobs"),
        # On a ratio to the sampler an importance weight would count twice.
        *((Loss(name=name, importance="token"), "needs sequences with old_logprobs") for name in losses.CLIPPED),
    ],
)
def test_a_loss_without_what_it_compares_is_refused(loss: Loss, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        value_and_gradient(loss, tokens() if loss.importance else replace(tokens(), calls=None))


SWITCHES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {"clip_high": 9.0}),
    ("ppo_clip", {"clip_low": 0.99}),
    ("ppo_clip_dual", {"dual_clip": None}),
    ("ppo_clip_old_importance_token", {"importance": None}),
    ("ppo_clip_old_importance_token", {"importance": "call"}),
    ("ppo_clip_old_importance_token", {"importance_cap": 9.0}),
    ("ppo_clip_old_importance_call", {"importance_cap": 9.0}),
    ("ppo_clip_old_icepop", {"ratio_mask": None}),
    ("ppo_clip_mask_call", {"ratio_mask": None}),
    ("ppo_clip_mask_call", {"ratio_mask_high": 1.1}),
    ("ppo_clip_mask_call", {"ratio_mask_low": 0.6}),
    ("ppo_clip_mask_call", {"ratio_mask": "token"}),
    ("reinforce_importance_token", {"importance": None}),
    ("gspo", {"name": "ppo_clip"}),
    ("gspo", {"clip_low": 0.99, "clip_high": 9.0}),
    ("cispo", {"clip_low": 1.0, "clip_high": 9.0}),
    ("cispo", {"name": "reinforce"}),
    ("off_policy", {"off_policy_kl": None}),
    ("kl_k1", {"kl": 0.0}),
    ("kl_k2", {"kl": 0.0}),
    ("kl_k3", {"kl": 0.0}),
    ("kl_k3", {"kl_estimator": "k2"}),
]


@pytest.mark.parametrize(("case", "without"), SWITCHES)
def test_each_effect_changes_the_gradient_of_the_nine_tokens(case: str, without: dict[str, Any]) -> None:
    """The kill switch: were the effect left out of the code, its loss would be the one without it."""
    loss, optional = CASES[case]
    _, gradient = value_and_gradient(loss, tokens(optional))
    _, plain = value_and_gradient(replace(loss, **without), tokens(optional))
    assert max(abs(a - b) for a, b in zip(gradient, plain, strict=True)) > 1e-3


def test_icepop_multiplies_by_the_ratio_inside_its_bounds_and_nothing_cuts_it() -> None:
    """Ling Team (2025): M(k) = k inside [0.5, 5], else 0. k = [1, 3, 6, 0.4], A = 1, log p = -1: losses [1, 3, 0, 0]."""
    now = t(-1.0, -1.0, -1.0, -1.0)
    known = Tokens(now - torch.log(t(1.0, 3.0, 6.0, 0.4)), torch.ones(4), torch.ones(4))
    kept, factors = losses.corrections(Loss(name="reinforce", ratio_mask="token"), now, known)
    assert kept is not None
    assert factors is not None
    torch.testing.assert_close(torch.where(kept, factors * losses.reinforce(now, t(1.0)), 0.0), t(1.0, 3.0, 0.0, 0.0))


def test_icepop_under_a_loss_whose_ratio_is_the_samplers_does_not_multiply_twice() -> None:
    known = Tokens(-t(0.0, math.log(1.1)), torch.ones(2), torch.ones(2))
    assert losses.corrections(Loss(ratio_mask="token"), torch.zeros(2), known)[1] is None
    with_old = replace(known, old_logprobs=torch.zeros(2))
    factors = losses.corrections(Loss(ratio_mask="token"), torch.zeros(2), with_old)[1]
    assert factors is not None
    torch.testing.assert_close(factors, t(1.0, 1.1))


def test_drift_is_counted_from_the_sampler_also_where_there_are_old_logprobs() -> None:
    """Policy 0, old 0 and -0.2, sampler 0.4: both drifted by 0.4, whatever was known before the step."""
    for old in (0.0, -0.2):
        known = Tokens(t(0.4), -torch.ones(1), torch.ones(1), old_logprobs=t(old), calls=torch.arange(1))
        known = replace(known, ratios=losses.call_ratios(torch.zeros(1), known))
        kept, _ = losses.corrections(Loss(off_policy_kl=0.3), torch.zeros(1), known)
        assert kept is not None
        assert kept.tolist() == [False]


def test_a_masked_token_whose_ratio_overflows_has_no_gradient_and_no_nan() -> None:
    known = replace(tokens(), sampler_logprobs=torch.tensor([*SAMPLER[:-1], -300.0]))
    loss = Loss(ratio_mask="token")
    total, gradient = value_and_gradient(loss, known)
    assert math.isfinite(total)
    assert gradient[-1] == 0.0


def test_kl_and_entropy_have_weights_of_their_own_and_no_correction_touches_them() -> None:
    loss = Loss(ratio_mask="token", ratio_mask_low=0.999, ratio_mask_high=1.001, kl=0.1, entropy=0.2)
    everything_masked, gradient = value_and_gradient(loss, tokens(("ref_logprobs",)))
    assert any(gradient)
    nothing = torch.zeros(9)
    none = tokens(("ref_logprobs",), kl_weights=nothing, entropy_weights=nothing)
    assert value_and_gradient(loss, none) == (0.0, [0.0] * 9)
    twice = tokens(("ref_logprobs",), kl_weights=nothing + 2, entropy_weights=nothing + 2)
    assert value_and_gradient(loss, twice)[0] == pytest.approx(2 * everything_masked, rel=1e-5)


def test_metrics_name_the_masked_share_the_mean_weight_and_the_kl() -> None:
    known = tokens(("old_logprobs", "ref_logprobs"))
    now = torch.tensor(NOW)
    distributions = torch.stack([now, torch.log1p(-now.exp())], 1)
    metrics: dict[str, float] = {}
    mask = Loss(ratio_mask="token", ratio_mask_low=0.8, ratio_mask_high=1.25, kl=0.1)
    for loss in (mask, Loss(importance="token")):
        _, report = losses.token_loss(loss, distributions, torch.zeros(9, dtype=torch.int64), known)
        metrics |= losses.summary(loss, [report], 9)
    ratios = [math.exp(old - sampler) for old, sampler in zip(OLD, SAMPLER, strict=True)]
    assert metrics["masked_share"] == pytest.approx(sum(not 0.8 <= r <= 1.25 for r in ratios) / 9)
    assert metrics["importance"] == pytest.approx(sum(min(r, 2.0) for r in ratios) / 9)
    assert metrics["ref_kl"] > 0
    assert not {"masked_share", "importance", "ref_kl"} & losses.summary(Loss(), [report], 9).keys()


def test_a_call_is_masked_by_the_mean_of_its_log_ratios_not_by_their_sum() -> None:
    """Log ratios [0.3, 0.3, 0.3 | 0.5]: the first call's product is 2.5, its geometric mean 1.35; the second's is 1.65."""
    known = Tokens(-t(0.3, 0.3, 0.3, 0.5), torch.ones(4), torch.ones(4), calls=torch.tensor([0, 0, 0, 1]))
    known = replace(known, ratios=losses.call_ratios(torch.zeros(4), known))
    kept, _ = losses.corrections(Loss(ratio_mask="call", ratio_mask_high=1.5), torch.zeros(4), known)
    assert kept is not None
    assert kept.tolist() == [True, True, True, False]


def test_two_masks_leave_out_what_either_does() -> None:
    """Log(policy / sampler) [-0.5, 0.9, -0.1] in calls of one, all bad examples: drifted, out of bounds, neither."""
    known = Tokens(-t(-0.5, 0.9, -0.1), -torch.ones(3), torch.ones(3), calls=torch.arange(3))
    known = replace(known, ratios=losses.call_ratios(torch.zeros(3), known))
    loss = Loss(ratio_mask="token", ratio_mask_high=2.0, off_policy_kl=0.3)
    kept, _ = losses.corrections(loss, torch.zeros(3), known)
    assert kept is not None
    assert kept.tolist() == [False, False, True]
