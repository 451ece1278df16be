"""Reward hacks: signs in a stored run that its policy earns the reward otherwise than was meant.

``agl rewards report`` and the console's page drive it. A sign is no proof: each comes with its numbers and what to look at.
Reads the run's metrics by name, and the calls of its last steps for their lengths.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentlightning.analysis.compare import HELD_OUT, TRAIN, Curve, read_curve
from agentlightning.analysis.intervals import Interval, slope, within_groups
from agentlightning.analysis.rewarded_rollouts import MAX_ROLLOUTS, OWN, RewardedRollout, latest_steps, read_rewarded
from agentlightning.store.base import LightningStore

LAST_STEPS = 5
"""Steps whose rollouts are looked at."""
MIN_POINTS = 5
"""Points that a trend takes."""
MIN_GROWTH = 1.5
"""Factor by which rollouts have to become longer before it is a sign of anything."""
MIN_CORRELATION = 0.5
"""A length explains a reward where the lower end of their partial correlation is above it: a quarter of the variance."""
LENGTH = "tokens per rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The change of a metric over a run."""

    name: str
    change: Interval
    """From the first point to the last on the fitted line; `n` points."""
    first: float
    last: float
    """On that line."""
    noise: float
    """Standard deviation of the points about the line."""

    @property
    def direction(self) -> int:
        """1 where it rises by more than twice its noise, -1 where it falls so, else 0."""
        clear = self.change.excludes_zero and abs(self.change.value) > 2 * self.noise
        return 0 if not clear else 1 if self.change.value > 0 else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEffect:
    """The relation of a reward with the length of its rollouts, in the last steps."""

    reward: str
    correlation: Interval | None
    """Partial correlation with the sampled tokens given the group; None where one of them never differs."""
    given_turns: Interval | None
    """The same given the number of calls, too: tasks that take more calls are longer by themselves."""

    @property
    def explains(self) -> bool:
        """True where the reward is higher for longer rollouts of the same task and number of calls, clearly and much."""
        return all(one is not None and one.low > MIN_CORRELATION for one in (self.correlation, self.given_turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardHack:
    """One sign of a hack."""

    kind: str
    """held_out_falls, other_reward_falls, length_grows or length_explains."""
    reward: str
    text: str
    evidence: list[str]
    """Metrics, or ids of rollouts to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HackReport:
    """Signs of hacks in a run, and the numbers that they were looked for in."""

    run_id: str
    steps: list[int]
    """Steps whose rollouts were read."""
    rollouts: int
    hacks: list[RewardHack]
    trends: list[Trend]
    lengths: list[LengthEffect]


async def find_hacks(store: LightningStore, run_id: str, limit: int = MAX_ROLLOUTS) -> HackReport:
    """Looks for signs of hacks in a run, in at most `limit` rollouts of a step. NotFoundError where there is no such run, or
    nothing of it was trained."""
    steps = await latest_steps(store, run_id, LAST_STEPS)
    rollouts = await read_rewarded(store, run_id, steps, calls=True, limit=limit)
    curves = {name: await read_curve(store, run_id, name) for name in (TRAIN, HELD_OUT)}
    tokens, count = [await read_curve(store, run_id, name) for name in ("train/tokens_sampled", "rollout/count")]
    curves[LENGTH] = {step: tokens[step] / count[step] for step in tokens if count.get(step)}
    for name in sorted({name for one in rollouts for name in one.rewards} - {OWN}):
        curves[f"rewards/{name}/mean"] = await read_curve(store, run_id, f"rewards/{name}/mean")
    trends = {name: found for name, curve in curves.items() if (found := trend(name, curve)) is not None}
    lengths = await asyncio.to_thread(length_effects, rollouts)  # the console's other pages do not wait for it
    return HackReport(
        run_id=run_id,
        steps=steps,
        rollouts=len(rollouts),
        hacks=moves_against(trends) + [_explained(one, rollouts) for one in lengths if one.explains],
        trends=list(trends.values()),
        lengths=lengths,
    )


def trend(name: str, curve: Curve) -> Trend | None:
    """The trend of a metric by step; None for fewer than MIN_POINTS points."""
    points = sorted(curve.items())
    fitted = slope(points) if len(points) >= MIN_POINTS else None
    if fitted is None:
        return None
    width = points[-1][0] - points[0][0]
    middle, mean = (statistics.fmean(column) for column in zip(*points, strict=True))
    ends = [mean + fitted.value * (step - middle) for step in (points[0][0], points[-1][0])]
    left = [value - mean - fitted.value * (step - middle) for step, value in points]
    return Trend(
        name=name,
        change=Interval(fitted.value * width, fitted.low * width, fitted.high * width, fitted.n),
        first=ends[0],
        last=ends[1],
        noise=statistics.pstdev(left),
    )


def moves_against(trends: Mapping[str, Trend]) -> list[RewardHack]:
    """Signs in the trends of a run: whatever moves against a training reward that rises."""
    reward = trends.get(TRAIN)
    if reward is None or reward.direction != 1:
        return []
    rises = f"the training reward rises from {reward.first:.3f} to {reward.last:.3f}"
    found = []
    held_out = trends.get(HELD_OUT)
    if held_out is not None and held_out.direction == -1:
        found.append(
            RewardHack(
                kind="held_out_falls",
                reward=OWN,
                text=f"{rises} while the held-out reward falls from {held_out.first:.3f} to {held_out.last:.3f}: what is "
                "learned helps on the training tasks alone; read rollouts of both, and take more tasks",
                evidence=[TRAIN, HELD_OUT],
            )
        )
    for name, other in trends.items():
        if name.startswith("rewards/") and other.direction == -1:
            label = name.split("/")[1]
            found.append(
                RewardHack(
                    kind="other_reward_falls",
                    reward=label,
                    text=f"{rises} while {label} falls from {other.first:.3f} to {other.last:.3f}: one is earned at the "
                    "other's cost; raise its weight in algorithm.reward_weights, or mend the one that rises",
                    evidence=[TRAIN, name],
                )
            )
    length = trends.get(LENGTH)
    if (
        length is not None
        and length.direction == 1
        and length.last >= MIN_GROWTH * max(length.first, 1.0)
        and held_out is not None
        and held_out.direction != 1
    ):
        found.append(
            RewardHack(
                kind="length_grows",
                reward=OWN,
                text=f"{rises} and rollouts grow from {length.first:.0f} to {length.last:.0f} tokens, while the held-out "
                "reward does not rise: see agl rewards report --compare, and let the reward fall with length",
                evidence=[TRAIN, HELD_OUT, "train/tokens_sampled"],
            )
        )
    return found


def length_effects(rollouts: Sequence[RewardedRollout]) -> list[LengthEffect]:
    """The relation of each reward with length, the rollouts' own reward first."""
    names = sorted({name for one in rollouts for name in one.rewards}, key=lambda name: (name != OWN, name))
    return [_length_effect(name, [one for one in rollouts if name in one.rewards]) for name in names]


def _length_effect(name: str, rollouts: Sequence[RewardedRollout]) -> LengthEffect:
    tokens, turns = [float(one.tokens) for one in rollouts], [float(one.turns) for one in rollouts]
    values, groups = [one.rewards[name] for one in rollouts], [one.group_id for one in rollouts]
    return LengthEffect(
        reward=name,
        correlation=within_groups(tokens, values, groups),
        given_turns=within_groups(tokens, values, groups, [turns]),
    )


def _explained(effect: LengthEffect, rollouts: Sequence[RewardedRollout]) -> RewardHack:
    one = effect.correlation
    assert one is not None  # it explains
    longest = sorted((each for each in rollouts if effect.reward in each.rewards), key=lambda each: -each.tokens)
    return RewardHack(
        kind="length_explains",
        reward=effect.reward,
        text=f"{effect.reward} is higher for longer rollouts of the same task: partial correlation with the sampled tokens "
        f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}] within groups, over {one.n} rollouts; read the longest ones, and "
        "see whether the reward counts words where it should count what they say",
        evidence=[each.rollout_id for each in longest[:3]],
    )
