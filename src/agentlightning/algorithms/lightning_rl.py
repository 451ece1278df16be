"""LightningRL: credit to each call, advantage within the group of the task, then any single-turn loss over tokens.

The trainer drives it: groups of trajectories in, a plan of weighted minibatches out. It knows nothing of engines, stores
or clocks; the same groups and seed give the same plan, so a step can be executed again after a crash.

Source: Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning", arXiv 2508.03680.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from agentlightning.adapters.sequences import Aggregation, spread
from agentlightning.algorithms.advantage import ADVANTAGES, WHITENED, PerToken, rewards_to_go, whiten_batch
from agentlightning.algorithms.agent_rewards import AgentRewards
from agentlightning.algorithms.combinations import CLIPS, GAE, LOSSES, TREE, check_combinations, loss_aggregation
from agentlightning.algorithms.credit import Evidence, Rule, find_rule, path_of
from agentlightning.algorithms.credit.rule import Credit, CreditRule
from agentlightning.algorithms.critic import Critic, Values, estimates, explained
from agentlightning.algorithms.plugins import plugin_advantages, plugin_settings
from agentlightning.algorithms.rewards import MissingReward, RewardPolicy
from agentlightning.algorithms.rollout_tree import RolloutTree
from agentlightning.algorithms.selection import own_credits, own_groups
from agentlightning.algorithms.settings import CodeName, Names, UnitInterval, check_settings, code_name
from agentlightning.algorithms.step_stats import any_signal, step_stats, without_signal
from agentlightning.algorithms.updates import CallSignal, Signal, call_signals, minibatches
from agentlightning.errors import RewardError
from agentlightning.records import Outcome
from agentlightning.runtime.code_loader import plugin_hash
from agentlightning.training_types import Loss, TrainingSequence, Trajectory


def _rule_name(credit: object) -> str:
    name = path_of(credit) if isinstance(credit, Rule) else code_name(credit)
    if not isinstance(name, str):
        raise ValueError("expected the name of a rule")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """The updates of one training step."""

    minibatches: list[list[TrainingSequence]]
    """One optimizer update each, epoch after epoch. The weights of the tokens that count in a minibatch sum to 1, except
    with fixed_length or a plug-in; rollouts without a signal, and calls after a row's last signal, may count and have no
    row (`normalise_over`). A rollout is never split."""
    loss: Loss
    outcomes: dict[str, Outcome]
    """Outcome of each rollout: trained, zero_variance where nothing could be learned from it, or invalid by a policy of the
    settings."""
    calls: list[CallSignal] = field(default_factory=list)
    """Signals of the usable rollouts' own calls, for the record of credit."""
    resample: list[str] = field(default_factory=list)
    """With dynamic sampling: the groups from which nothing is learned, to be replaced by new ones."""
    stats: dict[str, float] = field(default_factory=dict)
    """reward_mean, reward_std (sample, over rollouts), shares of groups: groups_with_signal (rewards differ), solved_groups
    and unsolved_groups (every rollout has the highest reward of all, or the lowest), turns (calls per rollout),
    tokens_sampled, tokens_trained (of rollouts with an advantage; KL and entropy may train others, too), sequences (rows of
    an epoch), zero_variance (share of rollouts); where there are any: unrewarded and filled (rollouts), incomplete_groups;
    with gae value_mean and explained_variance; agents/NAME/reward_mean
    (with agent_reward_weights). All but the two counts of rollouts are of the policy's own calls and the
    rollouts that have any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningRL:
    """The algorithm's settings; `plan` is the algorithm."""

    agents: Names | None = None
    """Selects the calls that are trained on, by the agent's name, the model name it asks for, or a predicate
    ``file.py:name`` of a call; the other calls are context. None: all calls."""
    group_size: PositiveInt = 8
    """Rollouts of one task that are compared with each other."""
    credit: Annotated[str | Rule | CreditRule, BeforeValidator(_rule_name)] = "uniform"
    """Credit rule: a name in `credit.CREDIT`, ``file.py:name`` of a custom rule, or the rule or function itself."""
    credit_settings: Mapping[str, Any] | None = None
    """The rule's own settings."""
    rollouts: Literal["independent", "tree"] = "independent"
    """The way in which the rollouts of a group are sampled. tree: some begin it, the others are forked from them, share the
    calls before that place, and calls get the credit `tree`."""
    tree: RolloutTree | None = None
    """The form of the trees. None: the defaults of `RolloutTree` with rollouts = "tree"; otherwise there are none."""
    advantage: CodeName = "grpo"
    """A name in `advantage.ADVANTAGES`, gae (a critic says what each call and token added), or a plug-in
    ``(groups, credits, *, settings)``; see `plugins.plugin_advantages`."""
    advantage_settings: Mapping[str, Any] | None = None
    """A plug-in's own settings."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (grpo), or normalise them over the step (gae)."""
    critic: Critic | None = None
    """Settings of gae. None: the defaults of `Critic` with gae; without gae it has none."""
    reward_weights: Mapping[str, float] | None = None
    """Weight of each reward by name: rollouts are rewarded by their weighted sum. None: by the one final reward."""
    agent_reward_weights: Mapping[str, Mapping[str, float]] | None = None
    """By agent, the weights of the rewards that make its own return, as `reward_weights` does for rollouts: white =
    {reward: 1}, black = {reward: -1} for both sides of a game that one policy plays. Each agent is compared with itself; see
    `agent_rewards.AgentRewards`. Agents that have none get the rollout's reward."""
    missing_reward: MissingReward = "drop"
    """Treatment of a rollout with a reward that is missing, late or no finite number: drop, fill (`fill_reward`)
    or fail."""
    fill_reward: float | None = None
    incomplete_groups: Literal["train", "drop", "fail"] = "train"
    """Treatment of a group with fewer than group_size usable rollouts."""
    dynamic_sampling: bool = False
    """Make up for groups from which nothing is learned (Yu et al. 2025, "DAPO", section 3.2)."""
    solved_bonus: NonNegativeFloat = 0.0
    """Adds solved_bonus × R to each advantage of a rollout: for rewards 0 and 1, that share of positive sample reinforcement
    (Zhu et al. 2025, arXiv 2506.01347, section 2), so that groups that are solved throughout are trained on, too; equally a
    baseline below the mean (Arnal et al. 2025, "Asymmetric REINFORCE", arXiv 2506.20520)."""
    loss: CodeName = "ppo_clip"
    """The loss of a token: a name in `LOSSES`, see docs/losses.md, or a plug-in ``(logprobs, tokens, *, settings)``, which
    the learner loads. reinforce has no ratio: it takes one update per step, or `importance`."""
    loss_settings: Mapping[str, Any] | None = None
    """A plug-in's own settings."""
    ratio: Literal["rollout", "old_policy"] = "rollout"
    """Denominator of the loss's ratio: the recorded logprobs, or the trainer's own of before the step's first update,
    one forward pass more; importance then corrects for the sampler."""
    clip_low: UnitInterval | None = None
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. None: as in `CLIPS`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    importance: Literal["token", "call"] | None = None
    importance_cap: PositiveFloat = 2.0
    ratio_mask: Literal["token", "call"] | None = None
    ratio_mask_low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    ratio_mask_high: Annotated[float, Field(gt=1)] = 5.0
    off_policy_kl: NonNegativeFloat | None = None
    """These seven, and the next two: as in `training_types.Loss`."""
    kl: NonNegativeFloat = 0.0
    """Coefficient of the KL to the reference: a term of the loss; with reinforce_pp, as in its paper, a reward per token."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """None: k3, as in GRPO; k1 in the reward, which takes no other."""
    kl_aggregation: Aggregation | None = None
    """Loss aggregation of the KL term. None: that of the loss."""
    entropy: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    entropy_aggregation: Aggregation | None = None
    """Loss aggregation of the entropy bonus. None: that of the loss."""
    aggregation: CodeName | None = None
    """Loss aggregation mode; see `adapters.sequences.token_weights`. None: as in `AGGREGATIONS`, else token_mean. Or a
    plug-in ``(trajectories, *, settings)``; see `plugins.plugin_weights`."""
    aggregation_settings: Mapping[str, Any] | None = None
    """A plug-in's own settings."""
    fixed_length: PositiveInt | None = None
    """Tokens that a rollout counts for under an aggregation of that name."""
    normalise_over: Literal["sampled", "informative"] | None = None
    """Rollouts that count in the weights: all that were sampled for the step, as in verl and TRL, or those whose advantages
    are not all 0, as in DAPO. None: sampled, and informative with dynamic_sampling, which replaces the others."""
    minibatches: PositiveInt = 4
    """Optimizer updates an epoch; fewer where there are fewer rollouts to learn from. A rollout is never split."""
    epochs: PositiveInt = 1
    """Passes of a step over its rollouts."""
    merge: bool = True
    """Merge calls whose prompts continue each other into one row; False: one row per call. The gradient is the same."""

    def __post_init__(self) -> None:
        check_settings(self)
        check_combinations(self)
        if self.rollouts == "tree" and self.tree is None:
            object.__setattr__(self, "tree", RolloutTree())
        if self.tree is not None:
            object.__setattr__(self, "credit", TREE)
        if self.advantage == GAE and self.critic is None:
            object.__setattr__(self, "critic", Critic())

    @property
    def loss_terms(self) -> Loss:
        """The loss, as an engine takes it."""
        plain = Loss()
        low, high = CLIPS.get(self.loss, (plain.clip_low, plain.clip_high))
        return Loss(
            name=self.loss,
            settings={} if self.loss in LOSSES else plugin_settings("loss", self.loss, self.loss_settings),
            code_hash=None if self.loss in LOSSES else plugin_hash("loss", self.loss),
            clip_low=low if self.clip_low is None else self.clip_low,
            clip_high=high if self.clip_high is None else self.clip_high,
            dual_clip=self.dual_clip,
            importance=self.importance,
            importance_cap=self.importance_cap,
            ratio_mask=self.ratio_mask,
            ratio_mask_low=self.ratio_mask_low,
            ratio_mask_high=self.ratio_mask_high,
            off_policy_kl=self.off_policy_kl,
            kl=0.0 if self.kl_in_reward else self.kl,
            kl_estimator=plain.kl_estimator if self.kl_in_reward else self.kl_estimator or plain.kl_estimator,
            entropy=self.entropy,
            value=None if self.critic is None else self.critic.backbone_grad_scale,
            value_clip=None if self.critic is None else self.critic.clip,
        )

    @property
    def loss_aggregation(self) -> str:
        """The aggregation of the loss where none is given, too."""
        return loss_aggregation(self.aggregation, self.loss, self.advantage)

    @property
    def needs_reference(self) -> bool:
        """True where an engine must keep a frozen reference."""
        return self.kl > 0

    @property
    def kl_in_reward(self) -> bool:
        """True where tokens are rewarded with -kl × log(policy / reference), which `plan` then needs."""
        return self.kl > 0 and self.advantage == "reinforce_pp"

    @property
    def critic_learning_rate(self) -> float | None:
        """The learning rate of the value head that an engine must keep; None: it needs none."""
        return None if self.critic is None else self.critic.learning_rate

    @property
    def counts_informative_only(self) -> bool:
        """True where rollouts whose advantages are all 0 count in no weight."""
        return self.dynamic_sampling if self.normalise_over is None else self.normalise_over == "informative"

    @property
    def rule_settings(self) -> dict[str, Any]:
        """All settings of the credit rule, its defaults among them. A tree's part of an advantage is divided by deviations
        where the group's part is."""
        if self.tree is not None:
            return {"normalize_std": self.advantage == "grpo" and self.normalize_std}
        return find_rule(str(self.credit)).settings(self.credit_settings or {})

    @property
    def call_gamma(self) -> float:
        """Discount from call to call: the critic's, or the credit rule's where it has a setting gamma that discounts the
        rewards by which rollouts are compared."""
        if self.critic is not None:
            return self.critic.call_gamma
        gamma = self.rule_settings.get("gamma") if find_rule(str(self.credit)).discounts_rollouts else None
        return float(gamma) if isinstance(gamma, int | float) else 1.0

    @property
    def reads_steps(self) -> bool:
        """True where step rewards may make a difference to what is learned, as they may to any code of the user's own."""
        own = type(self) is not LightningRL or self.advantage not in ADVANTAGES  # gae reads them, too
        return own or find_rule(str(self.credit)).reads_steps

    def plan(
        self,
        groups: Sequence[Sequence[Trajectory]],
        seed: int,
        evidence: Evidence | None = None,
        values: Values | None = None,
        reference: Values | None = None,
    ) -> UpdatePlan:
        """The updates for these groups. `seed` decides which rollouts share a minibatch, and nothing else.

        A rollout whose advantages are all 0 is zero_variance: it counts in the weights as `normalise_over` says, and only a
        KL or entropy term has a gradient in it. `evidence` is what the credit rule asks for (`rule.needs`): a judge's
        scores, earlier groups. `values` are the critic's, for gae; `reference` are the reference's logprobs of sampled
        tokens, for a KL in the reward.
        """
        evidence = evidence or Evidence()
        if evidence.history:
            evidence = replace(evidence, history=self.settled(evidence.history))
        usable, outcomes, counts = self._usable(groups, evidence)
        outcomes |= {one.rollout_id: "zero_variance" for group in usable for one in group}
        signals, signal_stats = self._agent_rewards().signals(
            usable, lambda part: self._signals(part, evidence, values, reference)
        )
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
        return self._rewards().settle(groups).groups

    def learned_groups(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Those of the settled groups that `plan` learns from, before a judge is asked."""
        return self._usable(groups, Evidence())[0]

    def advantages(self, group: Sequence[Trajectory]) -> list[list[float]]:
        """One number per trajectory of a group on its own and transition; for every advantage but gae."""
        found, _ = self._agent_rewards().signals([group], lambda part: (self._advantages(part, Evidence()), {}))
        return [
            [one for one in found[each.rollout_id].advantages if isinstance(one, float)]
            if each.rollout_id in found
            else []
            for each in group
        ]

    def _usable(
        self, groups: Sequence[Sequence[Trajectory]], evidence: Evidence
    ) -> tuple[list[list[Trajectory]], dict[str, Outcome], dict[str, float]]:
        """Groups with known rewards and as many rollouts as the settings ask for; the others' outcomes, and how many
        they are."""
        settled = self._rewards().settle(groups)
        unknown = set(settled.dropped) | self._agent_rewards().unknown(settled.groups)
        if "scores" in find_rule(str(self.credit)).needs:
            unscored = {one.rollout_id for group in settled.groups for one in group} - set(evidence.scores)
            if unscored and self.missing_reward != "drop":
                raise RewardError(
                    f"rollout {min(unscored)}: the judge gave no score; only missing_reward = 'drop' allows that"
                )
            unknown |= unscored
        kept, short = [], 0
        for group in settled.groups:
            members = [trajectory for trajectory in group if trajectory.rollout_id not in unknown]
            if len(members) < self.group_size and self.incomplete_groups != "train":
                short += 1
                if self.incomplete_groups == "fail":
                    raise RewardError(
                        f"algorithm.incomplete_groups: a group has {len(members)} of {self.group_size} usable rollouts"
                    )
                members = []
            if members:
                kept.append(members)
        usable = {trajectory.rollout_id for group in kept for trajectory in group}
        outcomes: dict[str, Outcome] = {
            trajectory.rollout_id: "invalid"
            for group in groups
            for trajectory in group
            if trajectory.rollout_id not in usable
        }
        counts = {"unrewarded": len(unknown), "filled": settled.filled, "incomplete_groups": short}
        return kept, outcomes, {name: float(count) for name, count in counts.items() if count}

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
            stats = {"ref_kl": statistics.fmean(flat) / self.kl} if flat else {}
            return found, stats
        if values is None:
            raise ValueError("values: gae needs the critic's value of every sampled token")
        groups = own_groups(groups)
        trajectories = [trajectory for group in groups for trajectory in group]
        estimated = estimates(trajectories, values, self.critic, self.normalize_std)
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
        """kl × log(policy / reference) of each sampled token of the policy's own calls, the policy being the one that
        sampled it; empty where the KL is not in the reward."""
        if not self.kl_in_reward:
            return {}
        if reference is None:
            raise ValueError("reference: a KL in the reward needs the reference's logprob of every sampled token")
        return {
            trajectory.rollout_id: [
                [self.kl * (now - ref) for now, ref in zip(call.logprobs, reference[call.call_id], strict=True)]
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
        rule = find_rule(str(self.credit))
        credits = rule.credits(groups, evidence, self.rule_settings)
        groups, credits = own_groups(groups), own_credits(groups, credits)
        trajectories = [trajectory for group in groups for trajectory in group]
        if self.advantage in ADVANTAGES:
            within = [self._within(group, rollouts) for group, rollouts in zip(groups, credits, strict=True)]
            numbers = [row for rows in within for row in rows]
            values: list[list[PerToken]] = [[*row] for row in numbers]
        else:
            values = plugin_advantages(self.advantage, self.advantage_settings, groups, credits)
        if penalties:
            values = rewards_to_go(numbers, [penalties[trajectory.rollout_id] for trajectory in trajectories])
        flat = [credit for rollouts in credits for credit in rollouts]
        if self.advantage in WHITENED:
            values = _whitened(trajectories, values, [credit.left_out for credit in flat])
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
        return ADVANTAGES[self.advantage]([credit.values for credit in credits], scores, self.normalize_std, shares)

    def _with_bonus(self, trajectory: Trajectory, credit: Credit, values: Sequence[PerToken]) -> list[PerToken]:
        solved = self.solved_bonus * trajectory.reward
        return [
            [number + extra + solved for number in value] if isinstance(value, list) else value + extra + solved
            for value, extra in zip(values, credit.bonus or [0.0] * len(values), strict=True)
        ]

    def _agent_rewards(self) -> AgentRewards:
        return AgentRewards(self.agent_reward_weights or {}, self._rewards())

    def _rewards(self) -> RewardPolicy:
        return RewardPolicy(weights=self.reward_weights or {}, missing=self.missing_reward, fill=self.fill_reward)


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
