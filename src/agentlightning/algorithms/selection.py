"""Selection: which calls of a rollout a policy is trained on, by what return each of its agents; the others are context.

Made of calls by `Selection`; LightningRL takes its own part once credit has been given: a credit rule sees whole rollouts,
so that what one agent earned is told from what the others did. Advantages and everything after them are over own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agentlightning.adapters.sequences import PerToken
from agentlightning.adapters.side_calls import side_calls
from agentlightning.algorithms.credit.rule import Credit
from agentlightning.errors import ConfigError, boundary
from agentlightning.records import Call
from agentlightning.runtime.code_loader import load_function
from agentlightning.store.scan import by_attempt
from agentlightning.training_types import Trajectory, Transition

Predicate = Callable[[Call], bool]
SideCalls = Literal["context", "train"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The calls of one policy that are trained on: made by an agent of these names, or such that a predicate says yes."""

    policy: str
    names: frozenset[str] | None = None
    """None: all of the policy's calls."""
    predicates: tuple[Predicate, ...] = ()
    side_calls: SideCalls = "context"
    """context: a call beside the task (`adapters.side_calls`) is trained on only where its agent is named, or a predicate
    says yes."""

    def ids(self, calls: Sequence[Call]) -> set[str]:
        """The ids of the calls that are trained on, among all calls of some attempts."""
        beside: set[str] = set()
        if self.side_calls == "context":
            for attempt in by_attempt(calls).values():
                beside |= side_calls(attempt).keys()
        return {call.id for call in calls if self(call) and (call.id not in beside or self._names(call))}

    def _names(self, call: Call) -> bool:
        """True where the call itself was chosen, and not all calls of its model."""
        return call.agent in (self.names or ()) or any(one(call) for one in self.predicates)

    def __call__(self, call: Call) -> bool:
        """A name is that of the agent, where the call has one, the model name that was asked for, or the policy's alias."""
        if call.policy != self.policy:
            return False
        if self.names is None:
            return True
        return bool(self.names & {call.agent, call.model, call.policy}) or any(one(call) for one in self.predicates)


def selection(policy: str, agents: Sequence[str] | None, side_calls: SideCalls = "context") -> Selection:
    """`agents` of a policy, parsed: names, and predicates ``file.py:name`` over a `records.Call`.

    ConfigError where a predicate cannot be loaded.
    """
    if agents is None:
        return Selection(policy, side_calls=side_calls)
    predicates = tuple(_predicate(one) for one in agents if is_predicate(one))
    return Selection(policy, frozenset(one for one in agents if not is_predicate(one)), predicates, side_calls)


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
