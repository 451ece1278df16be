"""Capabilities of an engine, as data: a setting that it would ignore or cannot carry out stops the run before it begins.

Engines declare a Support; the trainer calls `check_loss` or `check_preference_loss` with the algorithm's loss before
anything starts. Knows no engine and no algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Capabilities of one engine, as configured."""

    engine: str
    losses: frozenset[str] = frozenset({"ppo_clip", "reinforce", "sft"})
    preferences: frozenset[str] = field(default_factory=frozenset)
    corrections: bool = False
    """importance, ratio_mask and off_policy_kl."""
    entropy: bool = False
    kl: bool = False
    """A KL term in the loss, over ref_logprobs that sequences carry."""
    reference: bool = False
    """reference_logprobs: a frozen copy of the first weights."""
    old_logprobs: bool = False
    """Sequences with old_logprobs, to which ratios are then taken."""
    token_numbers: bool = False
    """token_numbers: the loss's ratio and the entropy at every token of the last forward_backward, for the record of
    credit."""
    plugin_losses: bool = False
    """Losses of the user's own, loaded where the weights are."""
    masks: bool = False
    """Log-probabilities under the grammars, penalties and cuts that sequences carry (`TrainingSequence.decodings`)."""
    images: bool = False
    """Calls with images, in its sampler and as sequences in its learner; gateways refuse them otherwise."""
    values: bool = False
    """A value head: `values`, and losses that train it."""
    serves: bool = False
    """Sampling alone, where `EngineSetup.learns` is False: the weights that it was made with, or after `load` and `publish`
    those of a saved folder."""


CLIPPED = ("ppo_clip", "gspo", "cispo")
"""Losses whose ratio corrects for the sampler by itself."""


def check_loss(support: Support, loss: Loss, *, old_logprobs: bool = False) -> None:
    """ConfigError, one sentence, where the engine cannot do it or where a setting would have no effect.

    Bounds of single settings are checked where those are made.

    old_logprobs: whether the trainer gives sequences the trainer's logprobs of before the step.
    """
    known = support.plugin_losses if loss.is_plugin else loss.name in support.losses
    _expect(known, support, f"the loss {loss.name!r}", f"{_list(support.losses)}")
    corrected = loss.importance is not None or loss.ratio_mask is not None or loss.off_policy_kl is not None
    _expect(support.corrections or not corrected, support, "importance, ratio_mask or off_policy_kl", "none of them")
    _expect(support.entropy or not loss.entropy, support, "an entropy bonus", "entropy = 0")
    _expect(support.kl or not loss.kl, support, "a KL term", "kl = 0")
    _expect(support.reference or not loss.kl, support, "a reference model as configured", "kl = 0, or a reference")
    _expect(support.old_logprobs or not old_logprobs, support, "old logprobs", "ratios to the sampler")
    _expect(support.values or loss.value is None, support, "a critic as configured", "an advantage other than 'gae'")
    for problem in _ignored(loss, old_logprobs):
        raise ConfigError(problem)


def check_preference_loss(support: Support, loss: PreferenceLoss) -> None:
    """ConfigError, one sentence, as check_loss."""
    _expect(loss.name in support.preferences, support, f"the loss {loss.name!r}", f"{_list(support.preferences)}")
    _expect(support.reference, support, "a reference model as configured", "a reference")
    if loss.name == "dpo" and (loss.chosen_weight, loss.rejected_weight) != (1.0, 1.0):
        raise ConfigError("chosen_weight and rejected_weight have no effect with the loss 'dpo'")


def _ignored(loss: Loss, old_logprobs: bool) -> list[str]:
    """Settings that would have no effect, or another than they say."""
    plain = Loss()
    found = []
    if loss.name not in CLIPPED and (loss.clip_low, loss.clip_high) != (plain.clip_low, plain.clip_high):
        found.append(f"clip_low and clip_high have no effect with the loss {loss.name!r}")
    if loss.dual_clip is not None and loss.name != "ppo_clip":
        found.append(f"dual_clip has no effect with the loss {loss.name!r}; expected ppo_clip")
    if loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        found.append(f"dual_clip: expected a number above 1 + clip_high, got {loss.dual_clip}")
    if loss.importance is None and loss.importance_cap != plain.importance_cap:
        found.append("importance_cap has no effect without importance")
    if loss.importance is not None and loss.ratio_mask == "token":
        found.append("importance would count twice with ratio_mask = 'token', which multiplies by the ratio itself")
    bounds = (loss.ratio_mask_low, loss.ratio_mask_high)
    if loss.ratio_mask is None and bounds != (plain.ratio_mask_low, plain.ratio_mask_high):
        found.append("ratio_mask_low and ratio_mask_high have no effect without ratio_mask")
    if not loss.kl and loss.kl_estimator != plain.kl_estimator:
        found.append("kl_estimator has no effect with kl = 0")
    if loss.name == "sft" and (loss.importance or loss.ratio_mask or loss.off_policy_kl is not None):
        found.append(
            "importance, ratio_mask and off_policy_kl have no meaning with the loss 'sft': nothing was sampled"
        )
    if loss.value is None and loss.value_clip is not None:
        found.append("value_clip has no effect without a value head")
    if loss.importance is not None and loss.name in CLIPPED and not old_logprobs:
        found.append(
            f"importance with the loss {loss.name!r} needs old logprobs, ratio = 'old_policy': its ratio to the sampler "
            "corrects already, and the weight would count twice"
        )
    return found


def _expect(holds: bool, support: Support, wanted: str, known: str) -> None:
    if not holds:
        raise ConfigError(f"the engine {support.engine!r} does not support {wanted}; expected {known}")


def _list(names: frozenset[str]) -> str:
    return "one of " + ", ".join(sorted(names)) if names else "none"
