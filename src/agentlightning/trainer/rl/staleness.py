"""Staleness: how many training steps lie between the weights that sampled a rollout and those that it is to update.

The training loop keeps the `PublishedVersions`; a step asks which of its rollouts are too old. A rollout is as old as its
oldest token: where weights are exchanged while it runs, it has tokens of several versions. Versions are never compared with
each other: after a crash the same step is published again under a later number.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.records import Resource
from agentlightning.training_types import Trajectory


@dataclass(slots=True)
class PublishedVersions:
    """The training step that made each policy version, and the time since which it is served."""

    _by_version: dict[int, Resource] = field(default_factory=dict)

    def record(self, published: Iterable[Resource]) -> None:
        """Versions in the order in which they were published."""
        for resource in published:
            self._by_version.setdefault(resource.version, resource)

    def step_of(self, version: int) -> int:
        """The step that made a version; 0 for one that nobody published: the weights that a sampler starts with."""
        return self._by_version[version].step if version in self._by_version else 0

    def step_at(self, time_ns: int) -> int:
        """The step whose weights were served at a time; 0 before the first."""
        served = (one.step for one in reversed(self._by_version.values()) if one.created_ns <= time_ns)
        return next(served, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The bound of one training step: it learns from weights of `step - 1` and of up to `bound` steps before."""

    versions: PublishedVersions
    step: int
    bound: float
    policies: Collection[str] | None = None
    """Those whose weights are exchanged: others, opponents of the run, count versions of their own. None: all."""

    def of(self, trajectory: Trajectory) -> int:
        """Steps between the weights of its oldest token and those that it updates; 0 where it has no token.

        In step 5, which updates the weights of step 4, a rollout that began under the weights of step 2 has staleness 2.
        """
        return max((self.step - 1 - self.versions.step_of(one) for one in self._versions(trajectory)), default=0)

    def began_too_early(self, time_ns: int) -> bool:
        """True where a rollout that samples since then can only be too stale."""
        return self.step - 1 - self.versions.step_at(time_ns) > self.bound

    def sort(
        self, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[list[Trajectory]], list[str], dict[str, float]]:
        """The groups without what is too stale, the ids of that, and the metrics staleness_mean, staleness_max,
        mixed_versions (share of rollouts with tokens of several versions) and stale (rollouts left out)."""
        ages = {one.rollout_id: self.of(one) for group in groups for one in group}
        stale = [rollout_id for rollout_id, age in ages.items() if age > self.bound]
        fresh = [[one for one in group if ages[one.rollout_id] <= self.bound] for group in groups]
        kept = [age for age in ages.values() if age <= self.bound]
        mixed = [len(self._versions(one)) > 1 for group in fresh for one in group]
        return (
            [group for group in fresh if group],
            stale,
            {
                "staleness_mean": statistics.fmean(kept) if kept else 0.0,
                "staleness_max": float(max(kept, default=0)),
                "mixed_versions": statistics.fmean(mixed) if mixed else 0.0,
                "stale": float(len(stale)),
            },
        )

    def _versions(self, trajectory: Trajectory) -> set[int]:
        return {
            span.version
            for transition in trajectory.transitions
            if self.policies is None or transition.policy in self.policies
            for span in transition.versions
        }
