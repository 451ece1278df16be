"""Selection: which calls of a rollout a policy is trained on, by what return each of its agents; the others are context.

Made of calls by `Selection`; LightningRL takes its own part once credit has been given: a credit rule sees whole rollouts,
so that what one agent earned is told from what the others did. Advantages and everything after them are over own calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentlightning.adapters.sequences import PerToken
from agentlightning.algorithms.credit.rule import Credit
from agentlightning.algorithms.rewards import RewardPolicy
from agentlightning.errors import ConfigError, boundary
from agentlightning.records import Call
from agentlightning.runtime.code_loader import load_function
from agentlightning.training_types import Trajectory, Transition

Predicate = Callable[[Call], bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """The calls of one policy that are trained on: made by an agent of these names, or such that a predicate says yes."""

    policy: str
    names: frozenset[str] | None = None
    """None: all of the policy's calls."""
    predicates: tuple[Predicate, ...] = ()

    def __call__(self, call: Call) -> bool:
        """A name is that of the agent, where the call has one, the model name that was asked for, or the policy's alias."""
        if call.policy != self.policy:
            return False
        if self.names is None:
            return True
        return bool(self.names & {call.agent, call.model, call.policy}) or any(one(call) for one in self.predicates)


def selection(policy: str, agents: Sequence[str] | None) -> Selection:
    """`agents` of a policy, parsed: names, and predicates ``file.py:name`` over a `records.Call`.

    ConfigError where a predicate cannot be loaded.
    """
    if agents is None:
        return Selection(policy)
    predicates = tuple(_predicate(one) for one in agents if is_predicate(one))
    return Selection(policy, frozenset(one for one in agents if not is_predicate(one)), predicates)


def is_predicate(agent: str) -> bool:
    """True where an entry of `agents` names a function, not an agent."""
    return ".py:" in agent


def own_groups(groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """The groups without the calls that are context, and without rollouts that have no others."""
    return [[_own(trajectory) for trajectory in group if _acts(trajectory)] for group in groups]


def own_credits(groups: Sequence[Sequence[Trajectory]], credits: Sequence[Sequence[Credit]]) -> list[list[Credit]]:
    """The credit of `own_groups`: of calls (context, own, own) with [0.2, 0.5, 0.3] remains [0.5, 0.3]."""
    return [
        [
            _own_credit(trajectory, credit)
            for trajectory, credit in zip(group, of_group, strict=True)
            if _acts(trajectory)
        ]
        for group, of_group in zip(groups, credits, strict=True)
    ]


def _acts(trajectory: Trajectory) -> bool:
    return any(transition.trained for transition in trajectory.transitions)


def _own(trajectory: Trajectory) -> Trajectory:
    """Moves the step rewards of context to the own call before it, which it follows from; nothing owns what came first."""
    if all(transition.trained for transition in trajectory.transitions):
        return trajectory
    own = []
    for transition in trajectory.transitions:
        if transition.trained:
            own.append(transition)
        elif own and transition.reward:
            own[-1] = replace(own[-1], reward=own[-1].reward + transition.reward)
    return replace(trajectory, transitions=own)


def _own_credit(trajectory: Trajectory, credit: Credit) -> Credit:
    trained = [transition.trained for transition in trajectory.transitions]
    if all(trained):
        return credit

    def own(numbers: list[float]) -> list[float]:
        return [number for number, kept in zip(numbers, trained, strict=True) if kept]

    return replace(
        credit,
        values=own(credit.values),
        shares=None if credit.shares is None else own(credit.shares),
        bonus=None if credit.bonus is None else own(credit.bonus),
    )


def _predicate(spec: str) -> Predicate:
    function = load_function(spec, ("call",), "agents predicate")

    def predicate(call: Call) -> bool:
        with boundary(f"agents predicate {spec!r}"):
            selected = function(call)
        if not isinstance(selected, bool):
            raise ConfigError(f"agents predicate {spec!r}: expected true or false, got {type(selected).__name__}")
        return selected

    return predicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The training signal of one rollout; every list has one entry per transition."""

    advantages: Sequence[PerToken]
    credit: Credit
    """The credit that the advantages were made of."""
    others: Mapping[str, Sequence[PerToken]] = field(default_factory=dict)
    """Further columns of `training_types.TrainingSequence`, such as a critic's returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSignal:
    """The training signal of one call of a usable rollout."""

    rollout_id: str
    reward: float
    """The rollout's."""
    call: Transition
    credit: float
    advantages: PerToken
    share: float = 1.0
    """The share of the group's baseline that the credit was compared with."""
    bonus: float = 0.0
    """The part of the advantages that the credit rule added as it is."""
    score: float | None = None
    """The number by which the rollout was compared with the others of its group. None: its reward."""
    returns: PerToken | None = None
    """The critic's targets."""


def call_signals(trajectories: Sequence[Trajectory], signals: Mapping[str, Signal]) -> list[CallSignal]:
    """The signals of all calls of these rollouts."""
    return [
        CallSignal(
            rollout_id=one.rollout_id,
            reward=one.reward,
            call=call,
            credit=credit,
            advantages=advantages,
            share=share,
            bonus=bonus,
            score=signal.credit.score,
            returns=returns,
        )
        for one in trajectories
        if (signal := signals[one.rollout_id])
        for call, credit, share, bonus, advantages, returns in zip(
            one.transitions,
            signal.credit.values,
            signal.credit.shares or [1.0] * len(one.transitions),
            signal.credit.bonus or [0.0] * len(one.transitions),
            signal.advantages,
            signal.others.get("returns", [None] * len(one.transitions)),
            strict=True,
        )
    ]


Signals = tuple[dict[str, Signal], dict[str, float]]
Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class AgentRewards:
    """The weights by which the rewards of a rollout make the return of each agent."""

    weights: Mapping[str, Mapping[str, float]]
    """By agent; a call is of the agent whose name it has, else of the one whose name it asked for as its model. Calls of
    others keep the rollout's own reward."""
    policy: RewardPolicy
    """That of rollouts."""

    def unknown(self, groups: Groups) -> set[str]:
        """The rollouts that have not all rewards of all agents."""
        return {rollout_id for agent in self.weights for rollout_id in self._rewards(agent).settle(groups)[1]}

    def signals(self, groups: Groups, signals_of: Callable[[Groups], Signals]) -> Signals:
        """The signal of every own call, from one round of `signals_of` for each agent, and the means of their metrics.

        Liu et al. 2025, "SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning via Multi-Agent Multi-Turn Reinforcement
        Learning" (arXiv 2506.24119), role-conditioned advantage estimation: a baseline for each role; here it is the mean
        of the role's returns in the group in place of a moving average of them. Two games of one task that white won and
        lost (1 and -1), black = {reward: -1}, dr_grpo: white's calls get [1, -1], black's [-1, 1].
        """
        if not self.weights:
            return signals_of(groups)
        names = [*self.weights, None] if _has_others(groups, self.weights) else [*self.weights]
        parts = {agent: signals_of(self._part(groups, agent)) for agent in names}
        joined = {
            one.rollout_id: _joined(one, [self._of(call) for call in one.transitions], parts)
            for group in own_groups(groups)
            for one in group
        }
        stats = {name for _, found in parts.values() for name in found}
        means = {
            name: statistics.fmean(found[name] for _, found in parts.values() if name in found)
            for name in sorted(stats)
        }
        return joined, means | self._means(groups)

    def _rewards(self, agent: str) -> RewardPolicy:
        return replace(self.policy, weights=self.weights[agent])

    def _part(self, groups: Groups, agent: str | None) -> list[list[Trajectory]]:
        """The groups as one agent is learned from: its own return, and the calls of all others as context."""
        rewarded = groups if agent is None else self._rewards(agent).settle(groups)[0]
        return [
            [
                replace(
                    one,
                    transitions=[
                        replace(call, trained=call.trained and self._of(call) == agent) for call in one.transitions
                    ],
                )
                for one in group
            ]
            for group in rewarded
        ]

    def _of(self, call: Transition) -> str | None:
        """The agent of a call; None where it is none of those that have weights."""
        return next((name for name in (call.agent, call.model) if name in self.weights), None)

    def _means(self, groups: Groups) -> dict[str, float]:
        means = {}
        for agent in self.weights:
            rewards = [one.reward for group in own_groups(self._part(groups, agent)) for one in group]
            if rewards:
                means[f"agents/{agent}/reward_mean"] = statistics.fmean(rewards)
        return means


def _has_others(groups: Groups, weights: Mapping[str, object]) -> bool:
    return any(
        call.trained and call.agent not in weights and call.model not in weights
        for group in groups
        for one in group
        for call in one.transitions
    )


def _joined(trajectory: Trajectory, agents: Sequence[str | None], parts: Mapping[str | None, Signals]) -> Signal:
    """The signal of a rollout whose own calls are of these agents, call by call from that of its agent."""
    given = {agent: parts[agent][0][trajectory.rollout_id] for agent in set(agents)}
    places: dict[str | None, int] = dict.fromkeys(given, 0)
    picked = []
    for agent in agents:
        picked.append((given[agent], places[agent]))
        places[agent] += 1
    first = next(iter(given.values()))
    return Signal(
        advantages=[one.advantages[place] for one, place in picked],
        others={name: [one.others[name][place] for one, place in picked] for name in first.others},
        credit=Credit(
            values=[one.credit.values[place] for one, place in picked],
            shares=[1.0 if one.credit.shares is None else one.credit.shares[place] for one, place in picked],
            bonus=[0.0 if one.credit.bonus is None else one.credit.bonus[place] for one, place in picked],
        ),
    )
