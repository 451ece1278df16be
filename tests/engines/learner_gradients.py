"""Gradients of learners, compared."""

from __future__ import annotations

import torch

from agentlightning.engines.local.learner import Learner


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Those that are accumulated, which are then forgotten."""
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
    learner.model.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5 * float(value.abs().max() + 1), msg=name)
