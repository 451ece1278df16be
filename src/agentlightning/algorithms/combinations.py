"""Combinations of LightningRL's settings: which go together, and what stands for one that is not given.

LightningRL asks before anything starts. What an engine can do, and what its loss would ignore, the engine's own check knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from agentlightning.adapters.sequences import Aggregation
from agentlightning.algorithms.advantage import ADVANTAGES, WHITENED
from agentlightning.algorithms.credit import find_rule
from agentlightning.algorithms.plugins import FunctionKind, plugin_settings
from agentlightning.algorithms.rollout_tree import RolloutTree
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithms.lightning_rl import LightningRL

LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")
"""Losses of samples: sft is one of demonstrations."""
GAE = "gae"
"""The advantage that asks an engine for a critic's values."""
TREE = "tree"
"""The credit rule of rollouts that are sampled as trees."""
ALONE = (GAE, "reinforce", "reinforce_pp")
"""Advantages that do not compare the rollouts of a group, so that a group may be one rollout."""
CLIPS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"ppo_clip": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}
)
"""clip_low and clip_high of each loss that has them, where none are given: DAPO (Yu et al. 2025); GSPO (Zheng et al. 2025),
section 5.1; MiniMax-M1 (2025) without a lower bound, with DAPO's upper one, since the paper gives none."""

AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType({"gspo": "sequence_mean", "dr_grpo": "fixed_length"})
"""Aggregations that belong to a loss or an advantage: GSPO (Zheng et al. 2025), equation 5, a mean over sequences; Dr. GRPO
(Liu et al. 2025), section 3.2, a constant in place of each completion's length."""


def loss_aggregation(given: str | None, loss: str, advantage: str) -> str:
    """The aggregation of the loss: the one that is given, else that of a paper."""
    return given or AGGREGATIONS.get(loss) or AGGREGATIONS.get(advantage) or "token_mean"


def check_combinations(settings: LightningRL) -> None:
    """ConfigError, one sentence, for settings that do not go together, or one without effect beside the others."""
    _check_plugins(settings)
    if settings.group_size == 1 and settings.advantage in ADVANTAGES and settings.advantage not in ALONE:
        raise ConfigError(
            "algorithm.group_size: expected a whole number of at least 2 with advantage = "
            f"{settings.advantage!r}, got 1"
        )
    _check_tree(settings)
    _check_credit(settings)
    if settings.advantage != GAE and settings.critic is not None:
        raise ConfigError(f"algorithm.critic: has no effect with advantage = {settings.advantage!r}; expected 'gae'")
    _check_rewards(settings)
    _check_aggregations(settings)
    _check_loss(settings)


def _check_plugins(settings: LightningRL) -> None:
    parts: tuple[tuple[FunctionKind, str, tuple[str, ...], Mapping[str, Any] | None], ...] = (
        ("advantage", settings.advantage, (*ADVANTAGES, GAE), settings.advantage_settings),
        ("loss", settings.loss, LOSSES, settings.loss_settings),
        ("aggregation", settings.loss_aggregation, get_args(Aggregation), settings.aggregation_settings),
    )
    for kind, name, built_in, given in parts:
        if name not in built_in:
            plugin_settings(kind, name, given, built_in)
        elif given is not None:
            raise ConfigError(f"algorithm.{kind}_settings: has no effect with {kind} = {name!r}, which has none")


def _check_tree(settings: LightningRL) -> None:
    if settings.rollouts != "tree":
        if settings.tree is not None:
            raise ConfigError(f"algorithm.tree: has no effect with rollouts = {settings.rollouts!r}; expected 'tree'")
        if settings.credit == TREE:
            raise ConfigError("algorithm.credit: 'tree' is the credit of rollouts = 'tree', which brings it along")
        return
    if settings.credit not in ("uniform", TREE):
        raise ConfigError(
            f"algorithm.credit: expected none with rollouts = 'tree', whose calls get the credit of their tree, got "
            f"{settings.credit!r}"
        )
    if settings.advantage not in ("grpo", "dr_grpo"):
        raise ConfigError(
            "algorithm.advantage: expected 'grpo' or 'dr_grpo' with rollouts = 'tree', which compares calls with their tree "
            f"and their group, got {settings.advantage!r}"
        )
    if settings.credit_settings:
        raise ConfigError(
            "algorithm.credit_settings: expected none with rollouts = 'tree', whose credit follows algorithm.normalize_std, "
            f"got {settings.credit_settings}"
        )
    (settings.tree or RolloutTree()).branches(settings.group_size)


def _check_credit(settings: LightningRL) -> None:
    find_rule(str(settings.credit)).settings(settings.credit_settings or {})
    if settings.advantage == GAE and settings.credit != "uniform":
        raise ConfigError(
            f"algorithm.credit: {settings.credit!r} has no effect with advantage = 'gae', whose critic gives credit"
        )
    if settings.group_size == 1 and "fork_returns" in find_rule(str(settings.credit)).needs:
        raise ConfigError(
            "algorithm.group_size: expected a whole number of at least 2 with credit = 'forked', whose first state is worth "
            "the mean return of its group, got 1"
        )
    if not settings.normalize_std and settings.advantage not in ("grpo", GAE):
        raise ConfigError(
            f"algorithm.normalize_std: has an effect with advantage = 'grpo' or 'gae' only, not with {settings.advantage!r}"
        )


def _check_rewards(settings: LightningRL) -> None:
    if settings.agent_reward_weights is not None:
        _check_agent_rewards(settings, settings.agent_reward_weights)
    if settings.dynamic_sampling and settings.advantage in (*WHITENED, GAE):
        raise ConfigError(
            f"algorithm.dynamic_sampling: has no effect with advantage = {settings.advantage!r}, which compares no group "
            "with itself alone, so that every group has a signal"
        )
    over_step = settings.advantage in WHITENED or (settings.advantage == GAE and settings.normalize_std)
    if settings.normalise_over == "informative" and over_step:
        raise ConfigError(
            f"algorithm.normalise_over: 'informative' has no effect with advantage = {settings.advantage!r}, which is "
            "normalised over the tokens of the whole step, so that every rollout has a signal"
        )
    if settings.missing_reward == "fill" and settings.fill_reward is None:
        raise ConfigError("algorithm.fill_reward: expected a number with missing_reward = 'fill'")
    if settings.missing_reward != "fill" and settings.fill_reward is not None:
        raise ConfigError(f"algorithm.fill_reward: has no effect with missing_reward = {settings.missing_reward!r}")


def _check_agent_rewards(settings: LightningRL, weights: Mapping[str, Mapping[str, float]]) -> None:
    if idle := [agent for agent, own in weights.items() if not own]:
        raise ConfigError(f"algorithm.agent_reward_weights.{idle[0]}: expected a weight of at least one reward")
    if not weights:
        raise ConfigError("algorithm.agent_reward_weights: expected at least one agent; leave it out")
    if needs := find_rule(str(settings.credit)).needs:
        raise ConfigError(
            f"algorithm.agent_reward_weights: conflicts with credit = {settings.credit!r}, which compares calls with "
            f"{', '.join(needs)}, made of one reward per rollout"
        )


def _check_aggregations(settings: LightningRL) -> None:
    if settings.kl_in_reward and settings.kl_estimator not in (None, "k1"):
        raise ConfigError(
            "algorithm.kl_estimator: expected 'k1', or none, with advantage = 'reinforce_pp', whose KL is a reward per "
            f"token, got {settings.kl_estimator!r}; to resume a run of an earlier version, which had it in the loss, take "
            "kl_estimator out of its config.json"
        )
    if settings.kl_in_reward and settings.kl_aggregation is not None:
        raise ConfigError(
            "algorithm.kl_aggregation: has no effect with advantage = 'reinforce_pp', whose KL is a reward per token"
        )
    for name, coefficient in (("kl_aggregation", settings.kl), ("entropy_aggregation", settings.entropy)):
        if getattr(settings, name) is not None and not coefficient:
            raise ConfigError(f"algorithm.{name}: has no effect with {name.partition('_')[0]} = 0")
    if settings.aggregation is None and settings.loss in AGGREGATIONS and settings.advantage in AGGREGATIONS:
        raise ConfigError(
            f"algorithm.aggregation: expected one, since loss = {settings.loss!r} comes with "
            f"{AGGREGATIONS[settings.loss]!r} and advantage = {settings.advantage!r} with "
            f"{AGGREGATIONS[settings.advantage]!r}"
        )
    counted = "fixed_length" in (settings.loss_aggregation, settings.kl_aggregation, settings.entropy_aggregation)
    if counted and settings.fixed_length is None:
        raise ConfigError(
            "algorithm.fixed_length: expected a number of tokens, which the aggregation 'fixed_length' divides by"
            + (f"; it comes with advantage = {settings.advantage!r}" if settings.aggregation is None else "")
        )
    if not counted and settings.fixed_length is not None:
        raise ConfigError("algorithm.fixed_length: has no effect without an aggregation 'fixed_length'")


def _check_loss(settings: LightningRL) -> None:
    """Checks what an engine's own check cannot see."""
    for name in ("clip_low", "clip_high"):
        if getattr(settings, name) is not None and settings.loss not in CLIPS:
            raise ConfigError(f"algorithm.{name}: has no effect with loss = {settings.loss!r}")
    if settings.loss in CLIPS or settings.loss not in LOSSES or settings.importance is not None:
        return
    for name, one in (("minibatches", settings.minibatches), ("epochs", settings.epochs)):
        if one != 1:
            raise ConfigError(
                f"algorithm.{name}: expected 1 with loss = {settings.loss!r} without importance, whose gradient holds for "
                f"fresh samples only, got {one}"
            )
    if settings.ratio == "old_policy" and settings.ratio_mask is None:
        raise ConfigError(
            f"algorithm.ratio: 'old_policy' has no effect with loss = {settings.loss!r}, which has no ratio"
        )
