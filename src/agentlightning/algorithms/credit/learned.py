"""Learned credit: a linear head that explains the reward as a sum over calls is fitted to the stored trajectories.

Return decomposition by least squares: Efroni, Merlis & Mannor 2021, "Reinforcement Learning with Trajectory Feedback"
(arXiv 2008.06036), section 3: ŵ = (ΦᵀΦ + λI)^-1 Φᵀ R, where a row of Φ is the sum of the features of a trajectory's
calls. As in Arjona-Medina et al. 2019, "RUDDER" (arXiv 1806.07857), section 3, a call's credit is the change of the
predicted return from before the call to the prompt of the next one; what the head leaves unexplained is spread evenly, so
that a rollout's credits add up to its reward. Everything is relative to the group. The head is fitted to the groups of each
step, without state or randomness: a step that is executed again gets the same credit.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from agentlightning.algorithms.credit.keys import places, prompt_key
from agentlightning.algorithms.credit.rule import Credit, Evidence, credit_rule
from agentlightning.errors import AgentError, MissingExtraError, boundary
from agentlightning.runtime.code_loader import load_function
from agentlightning.training_types import Trajectory, Transition

if TYPE_CHECKING:
    import numpy

RIDGE = 1.0
"""λ of the regression."""
COLUMNS = 4096
"""Features of the head: others are hashed to them."""
Features = tuple[Any, Any]
"""A call's features, sparse: columns and values, as arrays. A column may stand there more than once."""

Part = tuple[bytes, Sequence[int], float]
"""A name, ids, and the value that each of them has as a feature of that name."""


@credit_rule("learned", each="step", reads_steps=False)
def learned(
    groups: Sequence[Sequence[Trajectory]],
    evidence: Evidence,
    *,
    features: str | None = None,
) -> list[list[Credit]]:
    """The head's score of a call, less its average over the group's calls in that state, plus an equal part of the rest.

    The credits of a rollout add up to R - mean R. A call is described by its completion and the tokens
    of it, in its place (agent or number) and in its state (its prompt; relative to the other calls in that state), and by
    what the next prompt adds, all hashed to COLUMNS. `features` names a function ``file.py:name`` from a transition to
    {name: number} in their stead.

    Two one-call rollouts with rewards 1 and 0 and one feature each, ridge → 0: the head says 0.5 and -0.5.
    """
    described = _describe(groups, features)
    scores = described.scores(_fit(groups, described))
    return [_redistribute(group, rows) for group, rows in zip(groups, scores, strict=True)]


@dataclass(frozen=True, slots=True)
class _Described:
    """The features of all calls, by group, rollout and call: those taken as they are, those relative to the call's state."""

    plain: list[list[list[Features]]]
    relative: list[list[list[Features]]]
    states: list[list[list[Hashable]]]
    means: dict[Hashable, Any]
    """The mean relative features of each state that several calls were made in, dense."""

    def row(self, group: int, rollout: int, into: Any) -> None:
        """Add the features of a rollout's calls to a row of Φ."""
        for call, plain in enumerate(self.plain[group][rollout]):
            _add(into, plain)
            mean = self.means.get(self.states[group][rollout][call])
            if mean is not None:
                _add(into, self.relative[group][rollout][call])
                into -= mean

    def scores(self, head: Any) -> list[list[list[float]]]:
        usual = {state: float(mean @ head) for state, mean in self.means.items()}

        def of(group: int, rollout: int, call: int) -> float:
            total = _dot(self.plain[group][rollout][call], head)
            state = self.states[group][rollout][call]
            if state in usual:
                total += _dot(self.relative[group][rollout][call], head) - usual[state]
            return total

        return [
            [[of(group, rollout, call) for call in range(len(calls))] for rollout, calls in enumerate(rollouts)]
            for group, rollouts in enumerate(self.plain)
        ]


def _redistribute(group: Sequence[Trajectory], scores: Sequence[Sequence[float]]) -> list[Credit]:
    by_place: defaultdict[Hashable, list[float]] = defaultdict(list)
    for trajectory, numbers in zip(group, scores, strict=True):
        for place, number in zip(places(trajectory), numbers, strict=True):
            by_place[place].append(number)
    usual = {place: statistics.fmean(sorted(numbers)) for place, numbers in by_place.items()}
    mean = statistics.mean(trajectory.reward for trajectory in group)
    credits = []
    for trajectory, numbers in zip(group, scores, strict=True):
        values = [number - usual[place] for place, number in zip(places(trajectory), numbers, strict=True)]
        left = (trajectory.reward - mean - math.fsum(values)) / len(values)
        credits.append(Credit(values=[value + left for value in values], shares=[0.0] * len(values)))
    return credits


def _fit(groups: Sequence[Sequence[Trajectory]], described: _Described) -> numpy.ndarray[Any, Any]:
    """The head's weights; O(rollouts² × columns), or O(columns² × rollouts) where that is less."""
    numpy = _numpy()
    sums = numpy.zeros((sum(map(len, groups)), COLUMNS))
    rewards = numpy.zeros(len(sums))
    start = 0
    for number, group in enumerate(groups):
        if not group:
            continue
        rows = slice(start, start + len(group))
        for index, trajectory in enumerate(group):
            rewards[start + index] = trajectory.reward
            described.row(number, index, sums[start + index])
        sums[rows] -= sums[rows].mean(axis=0)
        rewards[rows] -= rewards[rows].mean()
        start += len(group)
    if len(sums) <= COLUMNS:
        gram = sums @ sums.T + RIDGE * numpy.eye(len(sums))
        return sums.T @ numpy.linalg.solve(gram, rewards)  # type: ignore[no-any-return]
    return numpy.linalg.solve(sums.T @ sums + RIDGE * numpy.eye(COLUMNS), sums.T @ rewards)  # type: ignore[no-any-return]


def _describe(groups: Sequence[Sequence[Trajectory]], spec: str | None) -> _Described:
    if spec is not None:
        plain = [[_own_features(spec, trajectory) for trajectory in group] for group in groups]
        stateless: list[list[list[Hashable]]] = [[[None for _ in calls] for calls in group] for group in plain]
        return _Described(plain, plain, stateless, {})
    plain = [[_in_place(trajectory) for trajectory in group] for group in groups]
    relative = [[[_in_state(one) for one in rollout.transitions] for rollout in group] for group in groups]
    states = [[[prompt_key(one) for one in rollout.transitions] for rollout in group] for group in groups]
    members: defaultdict[Hashable, list[Features]] = defaultdict(list)
    for known, found in zip(states, relative, strict=True):
        for keys, calls in zip(known, found, strict=True):
            for key, call in zip(keys, calls, strict=True):
                members[key].append(call)
    numpy = _numpy()
    means = {}
    for state, calls in members.items():
        if len(calls) > 1:
            means[state] = numpy.zeros(COLUMNS)
            for call in calls:
                _add(means[state], call)
            means[state] /= len(calls)
    return _Described(plain, relative, states, means)


def _own_features(spec: str, trajectory: Trajectory) -> list[Features]:
    function = load_function(spec, ("transition",), "feature function")
    described = []
    for transition in trajectory.transitions:
        with boundary(f"feature function {spec!r}"):
            named: Mapping[str, float] = function(transition)
            if not all(math.isfinite(value) for value in named.values()):
                raise AgentError(f"feature function {spec!r}: expected finite numbers, got {dict(named)!r:.80}")
            parts = [(f"own {name}".encode(), [0], float(value)) for name, value in named.items()]
            described.append(_hashed(parts))
    return described


def _in_place(trajectory: Trajectory) -> list[Features]:
    """The completion of each call, and what the next prompt shows in its place."""
    described = []
    following: list[Transition | None] = [*trajectory.transitions[1:], None]
    for place, transition, after in zip(places(trajectory), trajectory.transitions, following, strict=True):
        where = repr(place).encode()
        parts = _answer(where, transition)
        if after is not None:
            shown = _shown(transition, after)
            parts += [(b"all shown" + where + array("q", shown).tobytes(), [0], 1.0), _tokens(b"shown" + where, shown)]
        described.append(_hashed(parts))
    return described


def _shown(transition: Transition, after: Transition) -> list[int]:
    """The part of the next prompt that was not known before: what was known is credited to the call that brought it up."""
    if after.parent is not None and after.parent.call_id == transition.call_id:
        return after.suffix_ids
    known = {*transition.prompt_ids, *transition.sampled_ids}
    return [token for token in after.prompt_ids if token not in known]


def _in_state(transition: Transition) -> Features:
    return _hashed(_answer(b"state" + repr(prompt_key(transition)).encode(), transition))


def _answer(where: bytes, transition: Transition) -> list[Part]:
    whole = b"answer" + where + array("q", transition.sampled_ids).tobytes()
    return [(whole, [0], 1.0), _tokens(b"token" + where, transition.sampled_ids)]


def _tokens(name: bytes, ids: Sequence[int]) -> Part:
    """A bag of tokens of length 1."""
    tokens = sorted(set(ids))
    return name, tokens, 1.0 / math.sqrt(max(1, len(tokens)))


def _hashed(parts: Sequence[Part]) -> Features:
    """Feature hashing with signs (Weinberger et al. 2009): features that share a column cancel on average. A part's name is
    hashed once, and its ids are mixed with that (splitmix64, Steele et al. 2014)."""
    numpy = _numpy()
    where, what = [], []
    for name, ids, value in parts:
        seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        mixed = numpy.array(ids, dtype=numpy.uint64) + numpy.uint64(1)
        mixed = mixed * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(seed)
        mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> numpy.uint64(31))
        where.append((mixed >> numpy.uint64(1)) % numpy.uint64(COLUMNS))
        what.append(numpy.where(mixed & numpy.uint64(1), value, -value))
    if not where:
        return numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0)
    return numpy.concatenate(where).astype(numpy.int64), numpy.concatenate(what)


def _add(row: Any, features: Features) -> None:
    _numpy().add.at(row, features[0], features[1])


def _dot(features: Features, head: Any) -> float:
    return math.fsum((head[features[0]] * features[1]).tolist())


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as cause:
        raise MissingExtraError("numpy", "train") from cause
    return numpy
