"""Losses against numbers worked by hand and against the formulas written out."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from agentlightning.engines import losses
from agentlightning.engines.losses import Tokens
from agentlightning.training_types import Loss


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


LOGS = torch.log(t(1.5, 1.5, 0.5, 0.5, 1.0))
UNIFORM = torch.full((1, 4), -math.log(4))
TWICE = t(math.log(0.5)), t(math.log(0.25))
WORKED: dict[str, tuple[torch.Tensor, list[float]]] = {
    "ppo_clip": (losses.ppo_clip(LOGS, 0 * LOGS, t(2, -2, 2, -2, 3), 0.2, 0.28), [-2.56, 3.0, -1.0, 1.6, -3.0]),
    "dual clip": (losses.ppo_clip(torch.log(t(5, 5, 2)), t(0, 0, 0), t(-2, 2, -2), 0.2, 0.28, 3.0), [6.0, -2.56, 4.0]),
    "gspo": (losses.gspo(t(0, 0), t(0.3, 0.3), t(1, 1), 0.5, 0.5), [-math.exp(0.3)] * 2),
    "cispo": (losses.cispo(t(-0.5), t(-0.5 - math.log(1.5)), t(2), 1.0, 0.28), [1.28]),
    "reinforce": (losses.reinforce(t(-0.5, -1, -2), t(2, -1, 0)), [1.0, -1.0, 0.0]),
    "entropy": (losses.entropy(UNIFORM), [math.log(4)]),
    "entropy of what is certain": (losses.entropy(torch.tensor([[0.0, -math.inf]])), [0.0]),
    "k3 to the sampler": (losses.kl_k3(torch.log(t(1, 2, 0.5)), t(0, 0, 0)), [0.0, 1 - math.log(2), math.log(2) - 0.5]),
    "k1": (losses.kl_to_reference("k1", *TWICE), [math.log(2)]),
    "k2": (losses.kl_to_reference("k2", *TWICE), [math.log(2) ** 2 / 2]),
    "k3": (losses.kl_to_reference("k3", *TWICE), [math.log(2) - 0.5]),
    "importance": (losses.importance(t(math.log(3), math.log(0.5), 500), 2.0), [2.0, 0.5, 2.0]),
    "inside": (losses.inside(torch.log(t(1, 6, 0.4, 5)), 0.5, 5.0001), [True, False, False, True]),
    "off_policy": (losses.off_policy(t(-0.3, -0.3, 0.1), t(-1, 1, -1), 0.2), [True, False, False]),
    "value": (losses.value_loss(t(1, 1), t(0, 2), t(0.2, 0.2), 0.5), [0.5, 0.5 * 1.69]),
    "value without a clip": (losses.value_loss(t(1), t(2), None, None), [0.5]),
    "dpo": (losses.dpo(t(1), t(-1), 0.5), [0.313262]),
    "kto": (losses.kto(t(1, 1), torch.tensor([True, False]), t(0), 1.0, 1.0, 2.0), [0.268941, 2 * 0.731059]),
    "kto's baseline": (losses.kto_baseline(t(0.5, -0.1))[None], [0.2]),
    "kto's baseline below 0": (losses.kto_baseline(t(-1, 0))[None], [0.0]),
    "kto's baseline of none": (losses.kto_baseline(t())[None], [0.0]),
}


@pytest.mark.parametrize("formula", WORKED)
def test_a_formula_gives_the_numbers_worked_by_hand(formula: str) -> None:
    found, expected = WORKED[formula]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_the_sum_and_its_gradient_agree_with_the_formula_written_out(entropy: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    sampler, advantages, weights = torch.randn(6) - 2, torch.randn(6), torch.rand(6)

    total, report = losses.token_loss(
        Loss(entropy=entropy), torch.log_softmax(logits, -1), targets, Tokens(sampler, advantages, weights)
    )
    (found,) = torch.autograd.grad(total, logits)

    expected = torch.zeros(())
    ratios = []
    for i in range(6):
        p = torch.softmax(logits[i], 0)
        ratio = p[targets[i]] / sampler[i].exp()
        ratios.append(float(ratio.detach()))
        bounded = torch.clip(ratio, 0.8, 1.28)
        objective = torch.min(ratio * advantages[i], bounded * advantages[i])
        expected = expected - weights[i] * (objective + entropy * -(p * p.log()).sum())
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(found, gradient)

    metrics = losses.summary(Loss(), [report], 6)
    assert metrics["tokens"] == 6
    assert metrics["loss"] == pytest.approx(float(expected.detach()))
    assert metrics["ratio_max"] == pytest.approx(max(abs(r - 1) for r in ratios), rel=1e-5)
    cut = [r > 1.28 if a > 0 else r < 0.8 for r, a in zip(ratios, advantages.tolist(), strict=True)]
    assert metrics["clip_share"] == pytest.approx(sum(cut) / 6)


@pytest.mark.parametrize(("estimator", "exact"), [("k1", "policy"), ("k2", "policy"), ("k3", "reference")])
def test_in_the_mean_k1_and_k2_have_the_gradient_of_the_kl_and_k3_that_of_the_other_direction(
    estimator: Literal["k1", "k2", "k3"], exact: str
) -> None:
    """All four actions of a policy, each weighed by its probability: the mean over fresh samples, exactly."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)
    now = torch.log_softmax(logits, 0)
    mean = (now.detach().exp() * losses.kl_to_reference(estimator, now, reference)).sum()
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    first, second = (now, reference) if exact == "policy" else (reference, now)
    (expected,) = torch.autograd.grad((first.exp() * (first - second)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    in_reward = -(now.detach().exp() * -(now.detach() - reference) * now).sum()  # REINFORCE with the reward -log ratio
    (of_reward,) = torch.autograd.grad(in_reward, logits, retain_graph=True)
    (kl,) = torch.autograd.grad((now.exp() * (now - reference)).sum(), logits)
    torch.testing.assert_close(of_reward, kl)


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "slope"),
    [  # by hand: -min(r A, clip(r) A) with r = exp(gap), within exp(±20)
        (19.0, -1.0, math.exp(19.0), math.exp(19.0)),
        (21.0, -1.0, math.exp(20.0), 0.0),
        (60.0, -1.0, math.exp(20.0), 0.0),
        (100.0, 1.0, -1.28, 0.0),
        (100.0, 0.0, 0.0, 0.0),
        (9998.0, 0.0, 0.0, 0.0),
        (-9998.0, 1.0, -math.exp(-20.0), 0.0),
    ],
)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_a_ratio_that_overflows_is_bounded_and_its_gradient_is_a_number(
    name: str, gap: float, advantage: float, value: float, slope: float
) -> None:
    distributions = torch.tensor([[-0.5, -1.0]]).requires_grad_()
    tokens = Tokens(t(-0.5 - gap), t(advantage), t(1.0), calls=torch.tensor([0]))
    total, report = losses.token_loss(Loss(name=name), distributions, torch.tensor([0]), tokens)
    (gradient,) = torch.autograd.grad(total, distributions)
    assert gradient.isfinite().all()
    assert all(map(math.isfinite, losses.summary(Loss(name=name), [report], 1).values()))
    if name == "ppo_clip":
        assert float(total.detach()) == pytest.approx(value, rel=1e-5)
        assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(("gap", "value", "slope"), [(-10.0, 22015.47, -22025.47), (-100.0, math.exp(20) - 21, 0.0)])
def test_k3_far_from_its_reference_is_a_number(gap: float, value: float, slope: float) -> None:
    now = t(gap).requires_grad_()
    found = losses.kl_to_reference("k3", now, t(0.0))
    found.backward()
    assert float(found.detach()) == pytest.approx(value, rel=1e-5)
    assert now.grad is not None
    assert float(now.grad) == pytest.approx(slope + (gap > -20), rel=1e-4)
