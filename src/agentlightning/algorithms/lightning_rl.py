"""LightningRL: credit to each call, advantage within the group of the task, then any single-turn loss over tokens.

The trainer drives it: groups of trajectories in, a plan of weighted minibatches out. It knows nothing of engines, stores
or clocks; the same groups and seed give the same plan, so a step can be executed again after a crash.

Source: Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning", arXiv 2508.03680.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import NonNegativeFloat, PositiveInt

from agentlightning.adapters.sequences import Aggregation, merge, spread, token_weights, until_last_signal
from agentlightning.algorithms.advantage import ADVANTAGES, ALONE, WHITENED, PerToken, rewards_to_go, whiten_batch
from agentlightning.algorithms.credit import Evidence, Rule, find_rule
from agentlightning.algorithms.credit.rule import Credit, CreditRule
from agentlightning.algorithms.credit.tree import Independent, RolloutTree, trees_of
from agentlightning.algorithms.critic import Gae, Values, estimates, explained
from agentlightning.algorithms.losses import (
    AGGREGATIONS,
    LOSSES,
    Cispo,
    FixedLength,
    Gspo,
    Importance,
    KlTerm,
    OffPolicyMask,
    OldPolicy,
    PpoClip,
    RatioMask,
    loss_of,
    takes_old_logprobs,
)
from agentlightning.algorithms.plugins import check_part, plugin_advantages, plugin_weights
from agentlightning.algorithms.rewards import (
    MaskTruncated,
    RewardPolicy,
    SoftPenalty,
    TrainTruncated,
    any_signal,
    step_stats,
    without_signal,
    without_truncated,
)
from agentlightning.algorithms.selection import (
    CallSignal,
    SideCalls,
    Signal,
    call_signals,
    own_credits,
    own_groups,
)
from agentlightning.algorithms.settings import NamedPart, Names, PartChoice, Shorthand, check_settings, name_of
from agentlightning.errors import ConfigError
from agentlightning.records import Outcome
from agentlightning.training_types import Loss, TrainingSequence, Trajectory

GAE = "gae"
TREE = "tree"
"""The credit rule of rollouts that are sampled as trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """The updates of one training step."""

    minibatches: list[list[TrainingSequence]]
    """One optimizer update each, epoch after epoch. The weights of the tokens that count in a minibatch sum to 1, except
    with fixed_length or a plug-in; rollouts without a signal may count and have no row."""
    loss: Loss
    outcomes: dict[str, Outcome]
    """trained, zero_variance if nothing could be learned from it, or invalid if its reward is not known; by rollout."""
    calls: list[CallSignal] = field(default_factory=list)
    """Signals of the usable rollouts' own calls, for the record of credit."""
    resample: list[str] = field(default_factory=list)
    """With dynamic sampling: the groups from which nothing is learned, to be replaced by new ones."""
    stats: dict[str, float] = field(default_factory=dict)
    """reward_mean, reward_std (sample, over rollouts), shares of groups: groups_with_signal (rewards differ), solved_groups
    and unsolved_groups (every rollout has the highest reward of all, or the lowest), turns (calls per rollout),
    tokens_sampled, tokens_trained (of rollouts with an advantage), sequences (rows of an epoch), zero_variance (share of
    rollouts), unrewarded (rollouts); with gae value_mean and explained_variance. All but unrewarded are of the policy's own
    calls and the rollouts that have any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningRL:
    """The algorithm's settings; `plan` is the algorithm."""

    agents: Names | None = None
    """Selects the calls that are trained on, by the agent's name, the model name it asks for, or a predicate
    ``file.py:name`` of a call; the other calls are context. None: all calls."""
    side_calls: SideCalls = "context"
    """Calls beside the task, such as for a title (no tools beside calls with tools, a system prompt of their own, quoted by
    no later prompt): context or train. One whose agent `agents` names is trained on."""
    group_size: PositiveInt = 8
    """Rollouts of one task that are compared with each other."""
    rollouts: Annotated[Independent | RolloutTree | str, PartChoice()] = "independent"
    """The sampling of a group's rollouts. tree: some are forked from others, share the calls before that place, and calls
    get the credit `tree`."""
    credit: Annotated[NamedPart | str | Rule | CreditRule, Shorthand("type")] = "uniform"
    """Credit rule: a name in `credit.CREDIT`, ``file.py:name``, or the rule or function itself; a table holds its
    settings."""
    advantage: Annotated[NamedPart | Gae | str, PartChoice()] = "grpo"
    """A name in `advantage.ADVANTAGES`, gae (a critic estimates what each call and token added), or a plug-in
    ``(groups, credits, *, settings)``; see `plugins.plugin_advantages`."""
    reward_weights: Mapping[str, float] | None = None
    """Weight of each reward by name: rollouts are rewarded by their weighted sum. None: by the one final reward."""
    dynamic_sampling: bool = False
    """Replace groups from which nothing is learned (Yu et al. 2025, "DAPO", section 3.2); rollouts whose advantages are all
    0 then count in no weight."""
    solved_bonus: NonNegativeFloat = 0.0
    """Adds solved_bonus × R to each advantage of a rollout: for rewards 0 and 1, that share of positive sample reinforcement
    (Zhu et al. 2025, arXiv 2506.01347, section 2), so that groups that are solved throughout are trained on, too; equally a
    baseline below the mean (Arnal et al. 2025, "Asymmetric REINFORCE", arXiv 2506.20520)."""
    loss: Annotated[PpoClip | Gspo | Cispo | NamedPart | str, PartChoice()] = "ppo_clip"
    """The loss of a token: ppo_clip, gspo, cispo, reinforce, or a plug-in ``(logprobs, tokens, *, settings)``, which the
    learner loads. reinforce has no ratio: it takes one update per step, or importance sampling."""
    correction: Annotated[OldPolicy | Importance | RatioMask | OffPolicyMask | str | None, PartChoice()] = None
    """Correction for samples of older weights and of other arithmetic. None: the loss's ratio to the recorded logprobs
    alone."""
    kl: Annotated[KlTerm | float, Shorthand("coefficient")] = 0.0
    """KL to the reference: its coefficient, or a table with its estimator."""
    entropy: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    aggregation: Annotated[FixedLength | NamedPart | str | None, PartChoice()] = None
    """Weights of tokens; see `adapters.sequences.token_weights`. None: token_mean, with gspo sequence_mean, as in its paper
    (equation 5). Or a plug-in ``(trajectories, *, settings)``."""
    minibatches: PositiveInt | None = None
    """Optimizer updates an epoch; fewer where each would not have two rollouts to learn from. None: 1, for tiny models 4
    (`trainer.defaults`)."""
    epochs: PositiveInt = 1
    """Passes of a step over its rollouts."""
    truncated: Annotated[TrainTruncated | MaskTruncated | SoftPenalty | str, PartChoice()] = "train"
    """Completions that ended at the limit of tokens: train (as any other), mask (they count in no loss and no weight, while
    their reward is compared as before: DAPO's overlong filtering, TRL's mask_truncated_completions), or soft_penalty."""

    def __post_init__(self) -> None:
        check_settings(self)
        _check(self)

    @property
    def rule(self) -> Rule:
        """The credit rule; of trees their own."""
        return find_rule(TREE if self.tree is not None else name_of(self.credit))

    @property
    def rule_settings(self) -> dict[str, Any]:
        """All settings of the credit rule. A tree's part of an advantage is divided by deviations if the group's part is."""
        if self.tree is not None:
            return {"divide": name_of(self.advantage) == "grpo"}
        return self.rule.settings(self.credit.settings if isinstance(self.credit, NamedPart) else {})

    @property
    def tree(self) -> RolloutTree | None:
        """The form of the trees; None where rollouts are independent."""
        return self.rollouts if isinstance(self.rollouts, RolloutTree) else None

    @property
    def critic(self) -> Gae | None:
        """The settings of the critic; None: there is none."""
        return self.advantage if isinstance(self.advantage, Gae) else None

    @property
    def kl_term(self) -> KlTerm:
        term = self.kl if isinstance(self.kl, KlTerm) else KlTerm(coefficient=self.kl)
        # As the authors of REINFORCE++-baseline run it.
        usual: Literal["k2", "k3"] = "k2" if name_of(self.advantage) == "reinforce_pp_baseline" else "k3"
        return term if term.estimator is not None else term.model_copy(update={"estimator": usual})

    @property
    def loss_terms(self) -> Loss:
        """The loss, as an engine takes it."""
        terms = loss_of(self.loss, self.correction, KlTerm() if self.kl_in_reward else self.kl_term, self.entropy)
        if self.critic is None:
            return terms
        return replace(terms, value=self.critic.backbone_grad_scale, value_clip=self.critic.clip)

    @property
    def old_logprobs(self) -> bool:
        """True where ratios are to the trainer's own logprobs of before the step."""
        return takes_old_logprobs(self.loss, self.correction)

    @property
    def loss_aggregation(self) -> str:
        """The name of the aggregation, of the default one, too."""
        default = "sequence_mean" if isinstance(self.loss, Gspo) else "token_mean"
        return default if self.aggregation is None else name_of(self.aggregation)

    @property
    def needs_reference(self) -> bool:
        """True where an engine must keep a frozen reference."""
        return self.kl_term.coefficient > 0

    @property
    def kl_in_reward(self) -> bool:
        """True where tokens are rewarded with -kl × log(policy / reference), which `plan` then needs."""
        return self.needs_reference and name_of(self.advantage) == "reinforce_pp"

    @property
    def critic_learning_rate(self) -> float | None:
        """The learning rate of the value head that an engine must keep; None: it needs none."""
        return None if self.critic is None else self.critic.learning_rate

    @property
    def call_gamma(self) -> float:
        """Discount from call to call: the critic's, or the credit rule's setting gamma."""
        if self.critic is not None:
            return self.critic.call_gamma
        gamma = self.rule_settings.get("gamma")
        return float(gamma) if isinstance(gamma, int | float) else 1.0

    @property
    def reads_steps(self) -> bool:
        """True where step rewards may make a difference to what is learned, as they may to any code of the user's own."""
        own = type(self) is not LightningRL or name_of(self.advantage) not in ADVANTAGES  # gae reads them, too
        return own or self.rule.reads_steps

    @property
    def reward_policy(self) -> RewardPolicy:
        """The rules by which the rollouts' rewards are settled."""
        penalty = self.truncated if isinstance(self.truncated, SoftPenalty) else None
        return RewardPolicy(weights=self.reward_weights or {}, length_penalty=penalty)

    def plan(
        self,
        groups: Sequence[Sequence[Trajectory]],
        seed: int,
        evidence: Evidence | None = None,
        values: Values | None = None,
        reference: Values | None = None,
    ) -> UpdatePlan:
        """The updates for these groups. `seed` decides which rollouts share a minibatch, and nothing else. `evidence` is
        what the credit rule asks for (`rule.needs`); `values` are the critic's, for gae; `reference` are the reference's
        logprobs of sampled tokens, for a KL in the reward."""
        evidence = evidence or Evidence()
        if evidence.history:
            evidence = replace(evidence, history=self.settled(evidence.history))
        usable, outcomes, counts = self._usable(groups, evidence)
        if isinstance(self.truncated, MaskTruncated):
            usable = [[without_truncated(one) for one in group] for group in usable]
        outcomes |= {one.rollout_id: "zero_variance" for group in usable for one in group}
        signals, signal_stats = self._signals(usable, evidence, values, reference)
        trajectories = [trajectory for group in own_groups(usable) for trajectory in group]
        outcomes |= {
            one.rollout_id: "trained" if any_signal(one, signals[one.rollout_id].advantages) else "zero_variance"
            for one in trajectories
        }
        trained = [trajectory for trajectory in trajectories if outcomes[trajectory.rollout_id] == "trained"]
        updates = minibatches(self, trajectories, signals, {one.rollout_id for one in trained}, seed)
        rows = sum(map(len, updates)) / self.epochs
        return UpdatePlan(
            minibatches=updates,
            loss=self.loss_terms,
            outcomes=outcomes,
            calls=call_signals(trajectories, signals),
            resample=without_signal(groups, outcomes) if self.dynamic_sampling else [],
            stats=step_stats(own_groups(usable), trained) | counts | signal_stats | {"sequences": rows},
        )

    def settled(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """The groups with the rewards that are learned from, without the rollouts whose reward is not known."""
        return self.reward_policy.settle(groups)[0]

    def learned_groups(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """The groups that `plan` learns from, before a judge is asked."""
        return self._usable(groups, Evidence())[0]

    def advantages(self, group: Sequence[Trajectory]) -> list[list[float]]:
        """One number per trajectory of a group on its own and transition; for every advantage but gae."""
        found = self._advantages([group], Evidence())
        return [
            [one for one in found[each.rollout_id].advantages if isinstance(one, float)]
            if each.rollout_id in found
            else []
            for each in group
        ]

    def _usable(
        self, groups: Sequence[Sequence[Trajectory]], evidence: Evidence
    ) -> tuple[list[list[Trajectory]], dict[str, Outcome], dict[str, float]]:
        """Groups with known rewards; the others' outcomes, and how many they are."""
        settled, unknown = self.reward_policy.settle(groups)
        if "scores" in self.rule.needs:
            unknown |= {one.rollout_id for group in settled for one in group} - set(evidence.scores)
        kept = [[one for one in group if one.rollout_id not in unknown] for group in settled]
        outcomes: dict[str, Outcome] = dict.fromkeys(unknown, "invalid")
        return [*filter(None, kept)], outcomes, {"unrewarded": float(len(unknown))} if unknown else {}

    def _signals(
        self,
        groups: Sequence[Sequence[Trajectory]],
        evidence: Evidence,
        values: Values | None,
        reference: Values | None,
    ) -> tuple[dict[str, Signal], dict[str, float]]:
        """Returns the training signal of each rollout, and metrics of what another model said of it."""
        if self.critic is None:
            penalties = self._penalties(groups, reference)
            found = self._advantages(groups, evidence, penalties)
            flat = [
                number
                for trajectory in (one for group in own_groups(groups) for one in group if penalties)
                for call, numbers in zip(trajectory.transitions, penalties[trajectory.rollout_id], strict=True)
                for number in compress(numbers, call.mask)
            ]
            stats = {"ref_kl": statistics.fmean(flat) / self.kl_term.coefficient} if flat else {}
            return found, stats
        if values is None:
            raise ValueError("values: gae needs the critic's value of every sampled token")
        groups = own_groups(groups)
        trajectories = [trajectory for group in groups for trajectory in group]
        estimated = estimates(trajectories, values, self.critic)
        signals = {}
        for trajectory, one in zip(trajectories, estimated, strict=True):
            solved = self.solved_bonus * trajectory.reward
            advantages = one.by_token([[number + solved for number in call] for call in one.advantages])
            others: dict[str, Sequence[PerToken]] = {"returns": one.by_token(one.returns)}
            if self.critic.clip is not None:
                others["values"] = one.by_token(one.values)
            signals[trajectory.rollout_id] = Signal(
                advantages=advantages,
                others=others,
                credit=Credit(values=one.rewards),
            )
        return signals, explained(estimated)

    def _penalties(
        self, groups: Sequence[Sequence[Trajectory]], reference: Values | None
    ) -> dict[str, list[list[float]]]:
        """kl × log(policy that sampled / reference) of each sampled token of own calls; empty if the KL is not in the
        reward."""
        if not self.kl_in_reward:
            return {}
        if reference is None:
            raise ValueError("reference: a KL in the reward needs the reference's logprob of every sampled token")
        scale = self.kl_term.coefficient
        return {
            trajectory.rollout_id: [
                [scale * (now - ref) for now, ref in zip(call.logprobs, reference[call.call_id], strict=True)]
                for call in trajectory.transitions
            ]
            for group in own_groups(groups)
            for trajectory in group
        }

    def _advantages(
        self,
        groups: Sequence[Sequence[Trajectory]],
        evidence: Evidence,
        penalties: Mapping[str, Sequence[Sequence[float]]] = MappingProxyType({}),
    ) -> dict[str, Signal]:
        """Returns for each rollout one advantage per transition, or with penalties one per sampled token."""
        credits = self.rule.credits(groups, evidence, self.rule_settings)
        groups, credits = own_groups(groups), own_credits(groups, credits)
        trajectories = [trajectory for group in groups for trajectory in group]
        if isinstance(self.advantage, NamedPart) and self.advantage.type not in ADVANTAGES:
            values = plugin_advantages(self.advantage, groups, credits)
        else:
            within = [self._within(group, rollouts) for group, rollouts in zip(groups, credits, strict=True)]
            numbers = [row for rows in within for row in rows]
            values = [[*row] for row in numbers]
        if penalties:
            values = rewards_to_go(numbers, [penalties[trajectory.rollout_id] for trajectory in trajectories])
        flat = [credit for rollouts in credits for credit in rollouts]
        if name_of(self.advantage) in WHITENED:
            left_out = [credit.left_out for credit in flat]
            if self.dynamic_sampling and name_of(self.advantage) not in ALONE:  # its groups count nowhere
                signal = [any(map(any, rows)) for rows in within for _ in rows]
                left_out = [out if kept else [True] * len(out) for out, kept in zip(left_out, signal, strict=True)]
            values = _whitened(trajectories, values, left_out)
        return {
            trajectory.rollout_id: Signal(advantages=self._with_bonus(trajectory, credit, row), credit=credit)
            for trajectory, credit, row in zip(trajectories, flat, values, strict=True)
        }

    def _within(self, group: Sequence[Trajectory], credits: Sequence[Credit]) -> list[list[float]]:
        if not group:
            return []
        scores = [
            trajectory.reward if credit.score is None else credit.score
            for trajectory, credit in zip(group, credits, strict=True)
        ]
        shares = None
        if any(credit.shares is not None for credit in credits):
            shares = [[1.0] * len(credit.values) if credit.shares is None else credit.shares for credit in credits]
        return ADVANTAGES[name_of(self.advantage)]([credit.values for credit in credits], scores, shares)

    def _with_bonus(self, trajectory: Trajectory, credit: Credit, values: Sequence[PerToken]) -> list[PerToken]:
        solved = self.solved_bonus * trajectory.reward
        return [
            [number + extra + solved for number in value] if isinstance(value, list) else value + extra + solved
            for value, extra in zip(values, credit.bonus or [0.0] * len(values), strict=True)
        ]


def _check(settings: LightningRL) -> None:
    """ConfigError for settings that do not go together."""
    advantage, credit = name_of(settings.advantage), name_of(settings.credit)
    check_part("advantage", settings.advantage, ADVANTAGES)
    check_part("loss", settings.loss, LOSSES)
    check_part("aggregation", settings.aggregation, AGGREGATIONS)
    settings.rule_settings  # noqa: B018  an unknown setting is found here
    if settings.group_size == 1 and advantage in ADVANTAGES and advantage not in ALONE:
        raise ConfigError(
            f"algorithm.group_size: expected a whole number of at least 2 with advantage = {advantage!r}, got 1"
        )
    if settings.critic is not None and credit != "uniform":
        raise ConfigError(
            f"algorithm.credit: expected none with advantage = 'gae', whose critic is one, got {credit!r}"
        )
    if settings.tree is not None:
        if credit not in ("uniform", TREE) or advantage not in ("grpo", "dr_grpo"):
            raise ConfigError(
                "algorithm.rollouts: 'tree' brings its credit along, which compares calls with their tree and their group: "
                f"expected no credit and an advantage of 'grpo' or 'dr_grpo', got {credit!r} and {advantage!r}"
            )
        settings.tree.branches(settings.group_size)
    elif credit == TREE:
        raise ConfigError("algorithm.credit: 'tree' is the credit of rollouts = 'tree', which brings it along")
    if name_of(settings.loss) == "reinforce" and not isinstance(settings.correction, Importance):
        for name in ("minibatches", "epochs"):
            if getattr(settings, name) not in (None, 1):
                raise ConfigError(
                    f"algorithm.{name}: expected 1 with loss = 'reinforce' without importance sampling, whose gradient "
                    f"holds for fresh samples only, got {getattr(settings, name)}"
                )


def _whitened(
    trajectories: Sequence[Trajectory], values: Sequence[Sequence[PerToken]], left_out: Sequence[Sequence[bool]]
) -> list[list[PerToken]]:
    """`whiten_batch` over the tokens that are trained; forced ones are in no statistics."""
    masks = [[call.mask for call in one.transitions] for one in trajectories]
    trained: list[list[PerToken]] = [
        [
            [*compress(value, mask)] if isinstance(value, list) else value
            for value, mask in zip(row, of_row, strict=True)
        ]
        for row, of_row in zip(values, masks, strict=True)
    ]
    white = whiten_batch(trained, [[sum(mask) for mask in of_row] for of_row in masks], left_out)
    return [
        [spread(value, mask) if isinstance(value, list) else value for value, mask in zip(row, of_row, strict=True)]
        for row, of_row in zip(white, masks, strict=True)
    ]


def minibatches(
    settings: LightningRL,
    trajectories: Sequence[Trajectory],
    signals: Mapping[str, Signal],
    trained: Collection[str],
    seed: int,
) -> list[list[TrainingSequence]]:
    """One minibatch per update, at most `settings.minibatches` an epoch; a rollout is never split.

    Those `trained` (ids) and the others, which count in the weights and have no gradient, are both dealt out at random and
    evenly, so that all updates of a step weigh alike: of 32 rollouts, 8 of them trained, in four minibatches, 2 of these and
    6 others each. There are as many updates as have at least two trained rollouts each, so that none rests on one alone.
    With dynamic sampling the others were replaced, and count nowhere; a KL or entropy term has a gradient in all of them.
    """
    everywhere = bool(settings.loss_terms.kl or settings.entropy or settings.critic)
    whole = everywhere or settings.loss_terms.is_plugin  # which may have a gradient where the advantage is 0
    counted = [one for one in trajectories if any(call.trained_tokens for call in one.transitions)]
    if settings.dynamic_sampling:
        counted = [one for one in counted if one.rollout_id in trained]
    informative = sum(one.rollout_id in trained for one in counted) or (len(counted) if everywhere else 0)
    parts = min(settings.minibatches or 1, max(1, informative // 2)) if informative else 0
    dice = random.Random(seed)
    trees = trees_of(counted) if settings.tree is not None else {}
    found = []
    for _ in range(settings.epochs):
        dice.shuffle(counted)
        if trees:  # side by side, since an engine may compute once what those of one minibatch begin with
            places = {
                number: place for place, number in enumerate(dict.fromkeys(trees[one.rollout_id] for one in counted))
            }
            counted.sort(key=lambda one: places[trees[one.rollout_id]])
        kinds = [[one for one in counted if (one.rollout_id in trained) is kind] for kind in (True, False)]
        if trees and everywhere:
            kinds = [counted]
        for part in range(parts):
            share = [one for kind in kinds for one in kind[part * len(kind) // parts : (part + 1) * len(kind) // parts]]
            if rows := _minibatch(settings, share, signals, None if everywhere else trained):
                rows = rows if whole else [*filter(None, map(until_last_signal, rows))]
                found.append(rows)
    return found


def _weights(settings: LightningRL, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[PerToken]]:
    own, name = settings.aggregation, settings.loss_aggregation
    if isinstance(own, NamedPart) and name not in AGGREGATIONS:
        return plugin_weights(own, trajectories)
    length = own.length if isinstance(own, FixedLength) else None
    return token_weights(trajectories, cast(Aggregation, name), length)


def _minibatch(
    settings: LightningRL,
    trajectories: Sequence[Trajectory],
    signals: Mapping[str, Signal],
    only: Collection[str] | None,
) -> list[TrainingSequence]:
    """The rows of the rollouts `only` (None: of all), with weights that count all."""
    weights = _weights(settings, trajectories)
    found: list[TrainingSequence] = []
    for place, trajectory in enumerate(trajectories):
        if only is not None and trajectory.rollout_id not in only:
            continue
        signal = signals[trajectory.rollout_id]
        rows = merge(
            trajectory.rollout_id,
            trajectory.transitions,
            signal.advantages,
            weights[place],
            signal.others,
        )
        found += [row for row in rows if any(row.mask)]
    return found
