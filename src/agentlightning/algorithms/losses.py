"""Loss settings: the loss of a token, its corrections, its KL term and its weights, as tables of `[algorithm]`.

LightningRL makes an engine's `Loss` of them. The formulas are those of engines/losses.py. Knows no engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from agentlightning.algorithms.plugins import plugin_settings
from agentlightning.algorithms.settings import AlgorithmPart, NamedPart, UnitInterval, name_of
from agentlightning.runtime.code_loader import plugin_hash
from agentlightning.training_types import Loss


class PpoClip(AlgorithmPart):
    """Clipped policy ratio (Schulman et al. 2017, arXiv 1707.06347, equation 7); bounds of DAPO (arXiv 2503.14476)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: UnitInterval = 0.2
    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """If the advantage is negative, a ratio above this has no gradient (Ye et al. 2020, arXiv 1912.09729). None: 3 as in
    verl, for tiny models none (`trainer.defaults`)."""

    @model_validator(mode="after")
    def _above_the_bound(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip: expected a number above 1 + clip_high, got {self.dual_clip}")
        return self


class Gspo(AlgorithmPart):
    """The ratio of a call, its tokens' geometric mean (Zheng et al. 2025, arXiv 2507.18071, bounds of section 5.1)."""

    type: Literal["gspo"] = "gspo"
    clip_low: UnitInterval = 3e-4
    clip_high: NonNegativeFloat = 4e-4


class Cispo(AlgorithmPart):
    """The clipped ratio as a weight (MiniMax-M1, 2025, arXiv 2506.13585), without a lower bound; the weight is at most 5, as
    in ScaleRL (Khatri et al. 2025, arXiv 2510.13786) and SkyRL: a tight bound would cut the rare tokens that it is for."""

    type: Literal["cispo"] = "cispo"
    clip_low: UnitInterval = 1.0
    clip_high: NonNegativeFloat = 4.0


class OldPolicy(AlgorithmPart):
    """Ratios to the trainer's own logprobs of before the step's first update, one forward pass more, not to the recorded."""

    type: Literal["old_policy"] = "old_policy"


class Importance(AlgorithmPart):
    """Truncated importance sampling: times min(trainer / sampler, cap). A loss with a ratio takes it to the old policy."""

    type: Literal["importance"] = "importance"
    level: Literal["token", "call"] = "token"
    cap: PositiveFloat = 2.0


class RatioMask(AlgorithmPart):
    """Leave out tokens, or calls by their geometric mean, whose ratio trainer / sampler is outside of the bounds; a token
    that stays in is multiplied by its ratio (IcePop), a call is not."""

    type: Literal["ratio_mask"] = "ratio_mask"
    level: Literal["token", "call"] = "token"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1)] = 5.0


class OffPolicyMask(AlgorithmPart):
    """Leave out calls of negative advantage that drifted: DeepSeek-AI (2025), DeepSeek-V3.2, off-policy sequence masking."""

    type: Literal["off_policy_mask"] = "off_policy_mask"
    max_kl: NonNegativeFloat
    """Mean log(sampler / policy) of a call that still counts."""


class KlTerm(AlgorithmPart):
    """The KL to the reference."""

    coefficient: NonNegativeFloat = 0.0
    """A term of the loss; with reinforce_pp, as in its paper, a reward per token."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Of the term. None: k3 as in GRPO, with reinforce_pp_baseline k2. In the reward it is k1."""


class FixedLength(AlgorithmPart):
    """A constant in place of each completion's length (Liu et al. 2025, "Dr. GRPO", arXiv 2503.20783, section 3.2)."""

    type: Literal["fixed_length"] = "fixed_length"
    length: PositiveInt
    """Tokens that a rollout counts for."""


LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")
"""Losses of samples: sft is one of demonstrations."""
AGGREGATIONS = ("token_mean", "sequence_mean", "rollout_mean", "fixed_length")

AnyLoss = PpoClip | Gspo | Cispo | NamedPart | str
Correction = OldPolicy | Importance | RatioMask | OffPolicyMask | str | None


def takes_old_logprobs(loss: AnyLoss, correction: Correction) -> bool:
    """True where ratios are to the trainer's own logprobs of before the step."""
    if name_of(loss) == "reinforce":  # it has no ratio
        return isinstance(correction, OldPolicy)
    # Of a plug-in nobody knows whether its ratio to the sampler would count twice.
    twice = (Importance, RatioMask) if isinstance(loss, NamedPart) else (Importance,)
    return isinstance(correction, (OldPolicy, *twice))


def loss_of(loss: AnyLoss, correction: Correction, kl: KlTerm, entropy: float) -> Loss:
    """The loss, as an engine takes it."""
    terms = Loss(
        kl=kl.coefficient,
        kl_estimator=(kl.coefficient and kl.estimator) or Loss().kl_estimator,
        entropy=entropy,
    )
    own: dict[str, Any] = {}
    if isinstance(loss, PpoClip | Gspo | Cispo):
        own = loss.model_dump(exclude={"type"}) | {"name": loss.type}
    elif isinstance(loss, NamedPart):
        own = {"name": loss.type}
        if loss.type not in LOSSES:
            settings = plugin_settings("loss", loss.type, loss.settings)
            own |= {"settings": settings, "code_hash": plugin_hash("loss", loss.type)}
    if isinstance(correction, Importance):
        own |= {"importance": correction.level, "importance_cap": correction.cap}
    if isinstance(correction, RatioMask):
        own |= {
            "ratio_mask": correction.level,
            "ratio_mask_low": correction.low,
            "ratio_mask_high": correction.high,
        }
    if isinstance(correction, OffPolicyMask):
        own["off_policy_kl"] = correction.max_kl
    return replace(terms, **own)
