"""What an engine refuses before a run begins, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning.engines.base import Support, check_loss, check_preference_loss
from agentlightning.engines.local.engine import LocalEngine
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, PreferenceLoss
from build import engine_setup

PLAIN = Support(engine="plain")
ALL = Support(
    engine="all",
    losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
    preferences=frozenset({"dpo", "kto"}),
    terms=True,
    reference=True,
    values=True,
)
TERMS = "does not support plug-in losses, corrections, entropy or KL"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Loss(name="gspo"), "'plain' does not support the loss 'gspo'; expected one of ppo_clip, reinforce, sft"),
        (Loss(ratio_mask="token"), TERMS),
        (Loss(off_policy_kl=0.1), TERMS),
        (Loss(entropy=0.1), TERMS),
        (Loss(name="own.py:loss"), TERMS),
        (Loss(kl=0.1), TERMS),
        (Loss(value=0.0), "a critic as configured"),
    ],
)
def test_an_engine_without_a_loss_or_a_term_says_what_it_has(loss: Loss, message: str) -> None:
    check_loss(ALL, loss)
    with pytest.raises(ConfigError, match=message):
        check_loss(PLAIN, loss)


def test_old_logprobs_are_a_term_and_kl_needs_a_reference() -> None:
    check_loss(ALL, Loss(importance="token"), old_logprobs=True)
    with pytest.raises(ConfigError, match=TERMS):
        check_loss(PLAIN, Loss(), old_logprobs=True)
    with pytest.raises(ConfigError, match="reference model as configured"):
        check_loss(replace(ALL, reference=False), Loss(kl=0.1))


@pytest.mark.parametrize(
    ("support", "message"),
    [(PLAIN, "does not support the loss 'dpo'; expected none"), (replace(ALL, reference=False), "reference")],
)
def test_a_preference_loss_is_checked_too(support: Support, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_preference_loss(support, PreferenceLoss())
    check_preference_loss(ALL, PreferenceLoss(name="kto", chosen_weight=2.0))


def test_the_local_engine_declares_what_it_was_configured_with(tmp_path: Path) -> None:
    def support(**options: Any) -> Support:
        return LocalEngine(engine_setup(Path("unread"), tmp_path, **options)).support

    check_loss(support(), Loss())
    check_loss(support(reference=True), Loss(name="gspo", kl=0.1, off_policy_kl=0.1))
    check_preference_loss(support(reference=True), PreferenceLoss())
    with pytest.raises(ConfigError, match="'local' does not support a reference"):
        check_loss(support(), Loss(kl=0.1))
    with pytest.raises(ConfigError, match="'local' does not support the loss 'dpo'"):
        check_preference_loss(support(reference=True, dropout=0.1), PreferenceLoss())
