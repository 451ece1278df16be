"""Held-out values over plain numbers agree with the engine's losses over tensors, which are held against TRL."""

from __future__ import annotations

import pytest
import torch

from agentlightning.algorithms.offline import preference_values
from agentlightning.engines.preferences import preference_loss
from agentlightning.training_types import Preference, PreferenceLoss, TrainingSequence

CHOSEN = [0.7, -1.5, 30.0]
REJECTED = [-0.2, 0.4, -60.0]
MISMATCHED = [0.5, 0.3]


def row() -> TrainingSequence:
    return TrainingSequence(
        rollout_id="r",
        tokens=[1, 2],
        mask=[False, True],
        logprobs=[0.0, 0.0],
        advantages=[0.0, 0.0],
        weights=[0.0, 0.0],
        segments=[],
        ref_logprobs=[0.0, 0.0],
    )


def test_dpo_agrees_with_the_engines_loss() -> None:
    loss = PreferenceLoss(name="dpo", beta=0.3)
    examples = [Preference(chosen=[row()], rejected=[row()], weight=1 / 3)] * 3
    ratios_A = torch.tensor([value for pair in zip(CHOSEN, REJECTED, strict=True) for value in pair])
    _, expected = preference_loss(loss, examples, ratios_A, torch.tensor([]))
    found = preference_values(loss, CHOSEN, REJECTED)
    for name in ("loss", "margin", "accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("mismatched", [MISMATCHED, [-1.0], []])
def test_kto_agrees_with_the_engines_loss(mismatched: list[float]) -> None:
    loss = PreferenceLoss(name="kto", beta=0.3, chosen_weight=2.0, rejected_weight=1.5)
    examples = [Preference(chosen=[row()], weight=1 / 6)] * 3 + [Preference(rejected=[row()], weight=1 / 6)] * 3
    _, expected = preference_loss(loss, examples, torch.tensor(CHOSEN + REJECTED), torch.tensor(mismatched))
    found = preference_values(loss, CHOSEN, REJECTED, mismatched)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["margin"] == pytest.approx(expected["margin"], abs=1e-5)


def test_answers_of_one_kind_have_a_loss_and_no_margin() -> None:
    loss = PreferenceLoss(name="kto", beta=1.0)
    assert preference_values(loss, [0.0], []) == {"loss": 0.5}
