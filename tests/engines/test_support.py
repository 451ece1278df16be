"""What an engine refuses before a run begins, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning.engines.local.engine import LocalEngine
from agentlightning.engines.support import Support, check_loss, check_preference_loss
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, PreferenceLoss
from build import engine_setup

PLAIN = Support(engine="plain")
ALL = Support(
    engine="all",
    losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
    preferences=frozenset({"dpo", "kto"}),
    corrections=True,
    entropy=True,
    kl=True,
    reference=True,
    old_logprobs=True,
    values=True,
)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Loss(name="gspo"), "'plain' does not support the loss 'gspo'; expected one of ppo_clip, reinforce, sft"),
        (Loss(ratio_mask="token"), "importance, ratio_mask or off_policy_kl"),
        (Loss(off_policy_kl=0.1), "importance, ratio_mask or off_policy_kl"),
        (Loss(entropy=0.1), "entropy"),
        (Loss(kl=0.1), "a KL term"),
        (Loss(value=0.0), "a critic as configured"),
    ],
)
def test_an_engine_without_a_loss_or_a_term_says_what_it_has(loss: Loss, message: str) -> None:
    check_loss(ALL, loss)
    with pytest.raises(ConfigError, match=message):
        check_loss(PLAIN, loss)


def test_kl_needs_an_engine_that_keeps_a_reference() -> None:
    with pytest.raises(ConfigError, match="reference model as configured"):
        check_loss(replace(ALL, reference=False), Loss(kl=0.1))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Loss(name="reinforce", clip_high=0.3), "clip_low and clip_high have no effect with the loss 'reinforce'"),
        (Loss(name="gspo", dual_clip=3.0), "dual_clip has no effect with the loss 'gspo'"),
        (Loss(importance_cap=3.0), "importance_cap has no effect without importance"),
        (Loss(ratio_mask_high=3.0), "no effect without ratio_mask"),
        (Loss(name="reinforce", importance="token", ratio_mask="token"), "importance would count twice"),
        (Loss(kl_estimator="k1"), "kl_estimator has no effect with kl = 0"),
        (Loss(name="sft", ratio_mask="token"), "no meaning with the loss 'sft'"),
        (Loss(importance="token"), "needs old logprobs"),
        (Loss(dual_clip=1.1), "dual_clip: expected a number above 1 \\+ clip_high, got 1.1"),
        (Loss(value_clip=0.1), "value_clip has no effect without a value head"),
    ],
)
def test_a_setting_without_effect_is_an_error(loss: Loss, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loss(ALL, loss)


def test_importance_weights_on_a_clipped_loss_are_fine_with_old_logprobs_where_the_engine_takes_them() -> None:
    check_loss(ALL, Loss(importance="token"), old_logprobs=True)
    check_loss(ALL, Loss(name="reinforce", importance="call"))
    with pytest.raises(ConfigError, match="does not support old logprobs"):
        check_loss(PLAIN, Loss(), old_logprobs=True)


@pytest.mark.parametrize(
    ("support", "loss", "message"),
    [
        (PLAIN, PreferenceLoss(), "does not support the loss 'dpo'; expected none"),
        (replace(ALL, reference=False), PreferenceLoss(), "reference"),
        (ALL, PreferenceLoss(chosen_weight=2.0), "no effect with the loss 'dpo'"),
    ],
)
def test_a_preference_loss_is_checked_too(support: Support, loss: PreferenceLoss, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_preference_loss(support, loss)
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
