"""How old a rollout is, in training steps, whatever the numbers of its policy versions."""

from agentlightning.records import Resource, VersionSpan
from agentlightning.trainer.scheduler import PublishedVersions, Staleness
from agentlightning.training_types import Trajectory
from build import transition


def weights(*steps: int) -> PublishedVersions:
    """Versions from 1 on, of these steps, each published a second after the one before."""
    known = PublishedVersions()
    known.record(
        Resource(
            run_id="run",
            name="default",
            kind="policy",
            value={},
            version=version,
            step=step,
            created_ns=version * 10**9,
        )
        for version, step in enumerate(steps, 1)
    )
    return known


def rollout(name: str, *calls: list[int]) -> Trajectory:
    """A rollout whose calls have one token of each of these versions."""
    transitions = [
        transition(
            f"{name}/{number}",
            sampled_ids=[2] * len(versions),
            versions=[VersionSpan(version=one, start=at, end=at + 1) for at, one in enumerate(versions)],
        )
        for number, versions in enumerate(calls)
    ]
    return Trajectory(rollout_id=name, group_id="g", reward=1.0, transitions=transitions)


def test_a_rollout_is_as_old_as_its_oldest_token() -> None:
    staleness = Staleness(versions=weights(0, 1, 2, 3, 4), step=5, bound=2)
    assert staleness.of(rollout("fresh", [5])) == 0
    assert staleness.of(rollout("across two updates", [3, 4], [5])) == 2
    assert staleness.of(rollout("without a token")) == 0


def test_what_is_older_than_the_bound_leaves_its_group_and_is_counted() -> None:
    staleness = Staleness(versions=weights(0, 1, 2, 3), step=4, bound=1)
    first = [rollout("a", [4]), rollout("b", [3, 4]), rollout("c", [1])]
    groups, stale, metrics = staleness.sort([first, [rollout("d", [2])]])
    assert [[one.rollout_id for one in group] for group in groups] == [["a", "b"]]
    assert stale == ["c", "d"]
    assert metrics == {"staleness_mean": 0.5, "staleness_max": 1.0, "mixed_versions": 0.5, "stale": 2.0}


def test_versions_published_again_after_a_crash_count_by_their_step() -> None:
    staleness = Staleness(versions=weights(0, 1, 2, 1, 2), step=3, bound=1)
    assert [staleness.of(rollout("r", [version])) for version in (1, 2, 3, 4, 5)] == [2, 1, 0, 1, 0]


def test_what_began_before_the_oldest_weights_that_count_were_served_began_too_early() -> None:
    staleness = Staleness(versions=weights(0, 1, 2, 3), step=4, bound=1)  # those of step 2, served from second 3 on
    assert staleness.began_too_early(2_999_999_999)
    assert not staleness.began_too_early(3_000_000_000)
