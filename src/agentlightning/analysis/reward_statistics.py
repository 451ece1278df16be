"""Reward statistics of a stored run: distributions, and signs that its policy earns the reward otherwise than was
meant. A sign is no proof: each comes with its numbers and what to look at. ``agl runs show --rewards`` and the
console's page drive it. Rollouts are read a step at a time, a bounded number of each."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.adapters.trajectories import JUDGE, final_rewards, named_rewards
from agentlightning.analysis.compare import HELD_OUT, TRAIN, Curve, read_curve
from agentlightning.analysis.intervals import Interval, slope, within_groups
from agentlightning.errors import NotFoundError
from agentlightning.records import Call, Reward, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import is_apart
from agentlightning.store.scan import by_attempt, find_run, read_rollouts

OWN = "reward"
"""Name of a rollout's own final reward."""
MAX_ROLLOUTS = 2000
"""Rollouts of a step that are looked at, the first ones."""
BINS = 20
LAST_STEPS = 5
"""Steps whose rollouts are searched for hacks."""
MIN_POINTS = 5
"""Points that a trend takes."""
MIN_GROWTH = 1.5
"""Factor by which rollouts have to become longer before it is a sign of anything."""
MIN_CORRELATION = 0.5
"""A length explains a reward where the lower end of their partial correlation is above it: a quarter of the variance."""
LENGTH = "tokens per rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRollout:
    """One finished training rollout and its rewards."""

    rollout_id: str
    group_id: str
    step: int
    rewards: dict[str, float]
    """Final rewards by name, what it was rescored with included; its own is OWN."""
    step_rewards: list[tuple[int, str, float]] = field(default_factory=list)
    """Place of the call from 1, name and value; only where calls were read."""
    turns: int
    """Model calls."""
    tokens: int = 0
    """Sampled tokens; only where calls were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDistribution:
    """The values of one reward in one step."""

    name: str
    step: int
    call: int | None
    """Place of the call from 1 that it was given to; None: it is a final reward."""
    n: int
    mean: float
    deviation: float
    """Sample deviation; 0 for one value."""
    quartiles: tuple[float, float, float, float, float]
    """Lowest, first quartile, median, third quartile, highest."""
    bins: list[int]
    """Counts in BINS equal parts from the lowest to the highest; all in the first where all are equal."""


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


async def read_rewarded(
    store: LightningStore, run_id: str, steps: Sequence[int], *, calls: bool = False, limit: int = MAX_ROLLOUTS
) -> list[RewardedRollout]:
    """The rollouts enqueued for these steps that succeeded, at most `limit` of a step; with `calls` with their calls.

    NotFoundError where there is none.
    """
    found: list[RewardedRollout] = []
    for step in steps:
        query = RolloutQuery(run_id=run_id, step=step, mode="train", states=["succeeded"], limit=limit)
        async for listed in read_rollouts(store, query):
            page = [one for one in listed if not is_apart(one)]
            ids = [rollout.id for rollout in page]
            rewards = by_attempt(await store.rewards(ids))
            calls_of = by_attempt(await store.calls(ids)) if calls else {}
            for rollout in page:
                key = rollout.id, rollout.attempt
                found.append(_rewarded(rollout, rewards[key], calls_of.get(key, [])))
    if not found:
        raise NotFoundError(f"{run_id}: no training rollout of step {', '.join(map(str, steps))} has succeeded")
    return found


async def latest_steps(store: LightningStore, run_id: str, count: int, spread: bool = False) -> list[int]:
    """The last steps of a run that were trained; with `spread`, as many over the whole run.

    NotFoundError where none was.
    """
    last = (await find_run(store, run_id)).summary.get("step")
    if not isinstance(last, int) or last < 1:
        raise NotFoundError(f"{run_id}: has no training step yet")
    if not spread or last <= count:
        return list(range(max(1, last - count + 1), last + 1))
    return sorted({1 + round(place * (last - 1) / (count - 1)) for place in range(count)})


def _rewarded(rollout: Rollout, rewards: Sequence[Reward], calls: Sequence[Call]) -> RewardedRollout:
    told = [reward for reward in rewards if reward.source != "rescored"]
    rescored = {reward.name for reward in rewards if reward.source == "rescored" and reward.call_id is None}
    named = final_rewards(told) | {name: value for name in rescored for value in named_rewards(rewards, name).values()}
    named |= {} if rollout.reward is None else {OWN: rollout.reward}
    own = [call for call in calls if call.agent != JUDGE]
    places = {call.id: place for place, call in enumerate(own, 1)}
    steps = [(places[one.call_id], one.name, one.value) for one in rewards if one.call_id and one.call_id in places]
    return RewardedRollout(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        step=rollout.step,
        rewards=named,
        step_rewards=steps,
        turns=len(own) if calls else rollout.calls,
        tokens=sum(len(call.sampled_ids) or int(call.usage.get("sampled_tokens") or 0) for call in own),
    )


def distributions(rollouts: Iterable[RewardedRollout]) -> list[RewardDistribution]:
    """One for each reward, step and place of a call, in this order; final rewards first."""
    values: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            values[name, rollout.step, 0].append(value)
        for place, name, value in rollout.step_rewards:
            values[name, rollout.step, place].append(value)
    order = sorted(values, key=lambda key: (key[2] > 0, key[0], key[1], key[2]))
    return [_distribution(name, step, place or None, values[name, step, place]) for name, step, place in order]


def _distribution(name: str, step: int, call: int | None, values: list[float]) -> RewardDistribution:
    low, high = min(values), max(values)
    several = len(values) > 1
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if several else values * 3
    bins = [0] * BINS
    for value in values:
        bins[min(BINS - 1, int((value - low) / (high - low) * BINS)) if high > low else 0] += 1
    return RewardDistribution(
        name=name,
        step=step,
        call=call,
        n=len(values),
        mean=statistics.fmean(values),
        deviation=statistics.stdev(values) if several else 0.0,
        quartiles=(low, first, middle, third, high),
        bins=bins,
    )


async def find_hacks(store: LightningStore, run_id: str, limit: int = MAX_ROLLOUTS) -> HackReport:
    """Looks for signs of hacks in a run, in at most `limit` rollouts of a step. NotFoundError where there is no such run, or
    nothing of it was trained."""
    steps = await latest_steps(store, run_id, LAST_STEPS)
    rollouts = await read_rewarded(store, run_id, steps, calls=True, limit=limit)
    others = [f"rewards/{name}/mean" for name in sorted({name for one in rollouts for name in one.rewards} - {OWN})]
    curves = {name: await read_curve(store, run_id, name) for name in (TRAIN, HELD_OUT, *others)}
    tokens, count = [await read_curve(store, run_id, name) for name in ("train/tokens_sampled", "rollout/count")]
    curves[LENGTH] = {step: tokens[step] / count[step] for step in tokens if count.get(step)}
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
    line = [mean + fitted.value * (step - middle) for step, _ in points]
    return Trend(
        name=name,
        change=Interval(fitted.value * width, fitted.low * width, fitted.high * width, fitted.n),
        first=line[0],
        last=line[-1],
        noise=statistics.pstdev([value - at for (_, value), at in zip(points, line, strict=True)]),
    )


def moves_against(trends: Mapping[str, Trend]) -> list[RewardHack]:
    """Signs in the trends of a run: whatever moves against a training reward that rises."""
    reward = trends.get(TRAIN)
    if reward is None or reward.direction != 1:
        return []
    rises = f"the training reward rises from {reward.first:.3f} to {reward.last:.3f}"
    found = []
    held_out, length = trends.get(HELD_OUT), trends.get(LENGTH)
    if held_out is not None and held_out.direction == -1:
        text = (
            f"{rises} while the held-out reward falls from {held_out.first:.3f} to {held_out.last:.3f}: what is learned "
            "helps on the training tasks alone; read rollouts of both, and take more tasks"
        )
        found.append(RewardHack(kind="held_out_falls", reward=OWN, text=text, evidence=[TRAIN, HELD_OUT]))
    for name, other in trends.items():
        if name.startswith("rewards/") and other.direction == -1:
            label = name.split("/")[1]
            text = (
                f"{rises} while {label} falls from {other.first:.3f} to {other.last:.3f}: one is earned at the other's "
                "cost; raise its weight in algorithm.reward_weights, or mend the one that rises"
            )
            found.append(RewardHack(kind="other_reward_falls", reward=label, text=text, evidence=[TRAIN, name]))
    longer = length is not None and length.direction == 1 and length.last >= MIN_GROWTH * max(length.first, 1.0)
    if length is not None and longer and held_out is not None and held_out.direction != 1:
        text = (
            f"{rises} and rollouts grow from {length.first:.0f} to {length.last:.0f} tokens, while the held-out reward "
            "does not rise: let the reward fall with length"
        )
        evidence = [TRAIN, HELD_OUT, "train/tokens_sampled"]
        found.append(RewardHack(kind="length_grows", reward=OWN, text=text, evidence=evidence))
    return found


def length_effects(rollouts: Sequence[RewardedRollout]) -> list[LengthEffect]:
    """The relation of each reward with length, the rollouts' own reward first."""
    found = []
    for name in sorted({name for one in rollouts for name in one.rewards}, key=lambda name: (name != OWN, name)):
        own = [one for one in rollouts if name in one.rewards]
        tokens, turns = [float(one.tokens) for one in own], [float(one.turns) for one in own]
        values, groups = [one.rewards[name] for one in own], [one.group_id for one in own]
        given_turns = within_groups(tokens, values, groups, [turns])
        alone = within_groups(tokens, values, groups)
        found.append(LengthEffect(reward=name, correlation=alone, given_turns=given_turns))
    return found


def _explained(effect: LengthEffect, rollouts: Sequence[RewardedRollout]) -> RewardHack:
    one = effect.correlation
    assert one is not None  # it explains
    longest = sorted((each for each in rollouts if effect.reward in each.rewards), key=lambda each: -each.tokens)
    text = (
        f"{effect.reward} is higher for longer rollouts of the same task: partial correlation with the sampled tokens "
        f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}] within groups, over {one.n} rollouts; read the longest ones, and "
        "see whether the reward counts words where it should count what they say"
    )
    evidence = [each.rollout_id for each in longest[:3]]
    return RewardHack(kind="length_explains", reward=effect.reward, text=text, evidence=evidence)
