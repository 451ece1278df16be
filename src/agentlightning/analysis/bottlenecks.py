"""Bottlenecks: where the time of a run's steps goes, what bounds it, what to change and what that is worth at most.

A rule whose metrics are absent finds nothing. Every gain is the share of the time per rollout that the change saves at most,
if nothing else bounds the run before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agentlightning.errors import InputError
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run

LATEST = 10
"""Steps that are averaged."""
MAX_STEPS = 1000
STEP_S = "time/step_s"
PHASES = ("collect", "prepare", "update", "publish", "record")
MIN_COLLECT_SHARE = 0.3
"""Below it rollouts bound nothing, whatever takes their time."""
MIN_PART = 0.4
"""Share of a rollout's time from which a part of it is told."""
MIN_GAIN = 0.1
FULL = 0.75
"""Share of slots in use from which workers, or a sampler, count as full."""
STRAGGLING = 3.0
"""Duration of the longest rollout, in means of all, from which the others wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A part of a whole: a phase of the step, a part of a rollout, or the share of the step in which something was busy."""

    name: str
    share: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One thing that bounds a run."""

    name: str
    """A name of RULES."""
    text: str
    """The fact, with its arithmetic."""
    change: str
    """The remedy."""
    settings: tuple[str, ...]
    gain: float
    """Share of the time per rollout that it saves at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckReport:
    """The uses of time, on average over the latest steps, and what bounds them."""

    steps: int
    """Steps that were averaged; 0: nothing is known."""
    step_s: float
    phases: list[Lane]
    """Of the step, one after the other: their shares are 1 together."""
    rollout: list[Lane]
    """Of a rollout, from its queueing to its end."""
    busy: list[Lane]
    """Share of the step in which each part of the run was busy; side by side. Of workers, the share of their slots, which is
    divided among the model's calls, the agents' own code and rewards."""
    findings: list[Bottleneck]
    """The one that gains most first."""


@dataclass(frozen=True, slots=True)
class StepMeans:
    """Means over the latest steps. A number that is not known is NaN, with which every comparison is false."""

    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers.get(name, math.nan)

    def share(self, phase: str) -> float:
        """Of the step; 0 where the phase is not known."""
        return min(1.0, _or_zero(_ratio(self[f"time/{phase}_s"], self["time/step_s"])))

    def part(self, name: str) -> float:
        """Of a rollout's time under a worker."""
        return min(1.0, _ratio(self[f"rollout/{name}_s"], self["rollout/duration_s"]))

    def waits_for(self, name: str) -> bool:
        """True where the step waits for rollouts, and they mostly for this part of theirs."""
        return self.part(name) >= MIN_PART and self.share("collect") >= MIN_COLLECT_SHARE

    @property
    def waves(self) -> float:
        """Rollouts of a step that each slot of the workers runs, one after the other."""
        return _ratio(self["rollout/count"], self["workers/slots"])

    @property
    def workers_full(self) -> float:
        """Share of the workers' slots in use while the step collects."""
        return min(1.0, _ratio(self["workers/busy_share"], self.share("collect")))

    @property
    def sampler_fill(self) -> float:
        """Share of the sampler's slots in use while it has calls."""
        return min(1.0, _ratio(self["sampler/calls_mean"], self["sampler/slots"]))

    @property
    def sampler_calls(self) -> str:
        """Calls in the sampler and its slots, in words."""
        return f"{self['sampler/calls_mean']:.3g} calls of {self['sampler/slots']:.0f}"


async def read_bottlenecks(store: LightningStore, run_id: str, latest: int = LATEST) -> BottleneckReport:
    """The report on a run's latest steps. NotFoundError where there is no such run, InputError for more than MAX_STEPS."""
    if not 1 <= latest <= MAX_STEPS:
        raise InputError(f"steps: expected 1 to {MAX_STEPS}, got {latest}")
    await find_run(store, run_id)
    return find_bottlenecks(await read_latest_rows(store, run_id, latest), latest)


async def read_latest_rows(store: LightningStore, run_id: str, latest: int) -> list[dict[str, float]]:
    """At most the `latest` training steps, oldest first, with all of their metrics and their number as "step".

    Steps that a crash undid are left out, and evaluations: a row has the step's own time.
    """
    ends = (await store.series(run_id, [STEP_S], max_points=1)).get(STEP_S)
    if not ends:
        return []
    # Twice as many: some steps are evaluations only, and new ones arrive meanwhile.
    series = await store.series(run_id, None, max_points=2 * latest, after_step=ends[-1].step - latest)
    rows: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        for point in points:
            rows.setdefault(point.step, {"step": float(point.step)})[name] = point.value
    return [rows[step] for step in sorted(rows) if STEP_S in rows[step]][-latest:]


def find_bottlenecks(rows: Sequence[Mapping[str, object]], latest: int = LATEST) -> BottleneckReport:
    """Averages the latest of these rows, which are a step each, oldest first, and asks every rule."""
    used = [row for row in rows if _number(row.get("time/step_s")) > 0][-latest:]
    names = {name for row in used for name in row}
    means = StepMeans({name: _mean([_number(row[name]) for row in used if name in row]) for name in names})
    told = ((name, rule(means)) for name, rule in RULES.items())
    found = [Bottleneck(name, *finding) for name, finding in told if finding is not None and finding[-1] >= MIN_GAIN]
    return BottleneckReport(
        steps=len(used),
        step_s=_or_zero(means["time/step_s"]),
        phases=_phases(means) if used else [],
        rollout=_of_rollout(means),
        busy=_busy(means),
        findings=sorted(found, key=lambda finding: -finding.gain),
    )


Finding = tuple[str, str, tuple[str, ...], float] | None
"""Text, change, settings and gain of a bottleneck, if a rule finds it."""


def slow_tools(means: StepMeans) -> Finding:
    where = "lie before and between its model calls: tools and the agent's own code"
    change = "make the agent's tools faster, call independent ones together, or let agents run while the policy learns"
    return _slow_agents(means, "between_calls", where, change, ("trainer.max_staleness", "agent.concurrency"))


def slow_rewards(means: StepMeans) -> Finding:
    where = "come after its last model call: the agent's end and its reward function"
    change = (
        "make the reward function faster (a program that is started each time, a judge), or let agents run while the policy "
        "learns"
    )
    return _slow_agents(means, "after_calls", where, change, ("agent.reward", "trainer.max_staleness"))


def _slow_agents(means: StepMeans, name: str, where: str, change: str, settings: tuple[str, ...]) -> Finding:
    if not means.waits_for(name):
        return None
    part, collect = means.part(name), means.share("collect")
    busy = _ratio(means["sampler/busy_share"], collect)
    text = (
        f"a rollout takes {means['rollout/duration_s']:.3g} s, of which {means[f'rollout/{name}_s']:.3g} s ({part:.0%}) "
        f"{where}; the step waits for rollouts {collect:.0%} of its time, {collect:.0%} × {part:.0%} = {collect * part:.0%} "
        "of it for these" + (f"; the sampler has no call {1 - busy:.0%} of that time" if busy < 1 else "")
    )
    return text, change, settings, collect * part


def few_workers(means: StepMeans) -> Finding:
    """Workers are full and rollouts wait for them, while the sampler has room."""
    waves, full, collect, fill = means.waves, means.workers_full, means.share("collect"), means.sampler_fill
    if not (waves >= 2 and full >= FULL and collect >= MIN_COLLECT_SHARE) or fill >= FULL:
        return None
    factor = min(waves, 1 / fill if fill > 0 else math.inf)
    text = (
        f"workers run {means['workers/slots']:.0f} rollouts at a time, and a step has {means['rollout/count']:.0f}: "
        f"{waves:.1f} rounds, in which a rollout waits {_or_zero(means['rollout/queued_s']):.3g} s and runs "
        f"{_or_zero(means['rollout/duration_s']):.3g} s; workers are {full:.0%} busy while the step collects"
        + (f"; the sampler has {means.sampler_calls}" if fill > 0 else "")
        + f"; {factor:.1f} times the slots leave 1/{factor:.1f} of the {collect:.0%} that it waits"
    )
    change = "run more agents at a time: more workers, or more rollouts in each"
    return text, change, ("agent.workers", "agent.concurrency"), collect * (1 - 1 / factor)


def small_batch(means: StepMeans) -> Finding:
    """A step has so few rollouts that neither workers nor sampler are used."""
    known = {
        f"workers could run {means['workers/slots']:.0f} at a time": _ratio(1, means.waves),
        f"the sampler has {means.sampler_calls}": _ratio(1, means.sampler_fill),
    }
    rooms = {words: room for words, room in known.items() if room > 0}
    factor, count = min(rooms.values(), default=math.nan), means["rollout/count"]
    if not (factor >= 2 and count > 0):
        return None
    learning = means.share("update")
    text = (
        f"a step has {count:.0f} rollouts: {', and '.join(rooms)}; {factor:.1f} times as many take about as long to "
        f"collect, and only learning ({learning:.0%} of the step) takes longer: per rollout "
        f"{1 - learning:.0%} / {factor:.1f} + {learning:.0%} = {(1 - learning) / factor + learning:.0%} of the time"
    )
    change = "take more tasks, or more rollouts of a task, in each step"
    settings = "trainer.tasks_per_step", "algorithm.group_size"
    return text, change, settings, (1 - learning) * (1 - 1 / factor)


def sampler_full(means: StepMeans) -> Finding:
    """Rollouts wait for the sampler, all of whose slots are in use."""
    if not (means.waits_for("model") and means.sampler_fill >= FULL):
        return None
    part, idle = means.part("model"), 1 - means.workers_full
    text = ("" if math.isnan(idle) else f"workers idle {idle:.0%}, ") + (
        f"sampler full: {means.sampler_calls} at a time, and {part:.0%} of a rollout's "
        f"{means['rollout/duration_s']:.3g} s in model calls"
    )
    change = "sample more calls at a time where memory allows it, on a faster device or engine, or shorten completions"
    settings = "engine.max_num_seqs", "engine.sampler", "engine.device", "model.max_tokens"
    return text, change, settings, means.share("collect") * part * 0.5  # twice the speed


def slow_sampler(means: StepMeans) -> Finding:
    """Rollouts consist of model calls, and neither workers nor slots are to blame."""
    if not means.waits_for("model") or means.sampler_fill >= FULL:
        return None
    part, collect = means.part("model"), means.share("collect")
    text = (
        f"{part:.0%} of a rollout's {means['rollout/duration_s']:.3g} s are model calls, and the step waits for "
        f"rollouts {collect:.0%} of its time; twice the speed saves half of {collect:.0%} × {part:.0%}"
    )
    change = "sample on a faster device or engine, or shorten completions"
    return text, change, ("engine.sampler", "engine.device", "model.max_tokens"), collect * part * 0.5


def stragglers(means: StepMeans) -> Finding:
    mean, longest, collect = means["rollout/duration_s"], means["rollout/duration_max_s"], means.share("collect")
    waited = means["time/collect_s"]
    if not (longest >= STRAGGLING * mean > 0 and longest >= 0.5 * waited and collect >= MIN_COLLECT_SHARE):
        return None
    text = (
        f"the longest rollout takes {longest:.3g} s, the mean one {mean:.3g} s, and the step waits {waited:.3g} s for "
        f"all of them: without the longest ones up to 1 - {mean:.3g} / {longest:.3g} of the {collect:.0%} that it waits"
    )
    settings = "trainer.max_staleness", "trainer.batch_order"
    return text, "cancel or put off the slowest rollouts", settings, collect * (1 - mean / longest)


def learning_alone(means: StepMeans) -> Finding:
    """Sampling and learning take turns, and each waits for the other."""
    collect, update = means.share("collect"), means.share("update")
    if not min(collect, update) >= MIN_GAIN or not math.isnan(means["rollout/staleness_mean"]):
        return None
    text = (
        f"the learner idles while the step collects ({collect:.0%}), and agents and sampler idle while it learns "
        f"({update:.0%}): side by side they take the longer of the two"
    )
    return text, "let agents run while the policy learns", ("trainer.max_staleness",), min(collect, update)


def slow_learner(means: StepMeans) -> Finding:
    update = means.share("update")
    if not update >= 0.5:
        return None
    text = (
        f"updates take {update:.0%} of the step, {_or_zero(means['time/update_s']):.3g} s; twice the speed saves half"
    )
    change = "learn on a faster device, share what rows begin with, or take fewer passes over them"
    settings = "engine.device", "engine.packing", "engine.max_tokens_per_microbatch", "algorithm.epochs"
    return text, change, settings, 0.5 * update


_BY_WORK = slow_tools, slow_rewards, few_workers, small_batch, sampler_full, slow_sampler, stragglers
RULES: Mapping[str, Callable[[StepMeans], Finding]] = MappingProxyType(
    {rule.__name__: rule for rule in (*_BY_WORK, learning_alone, slow_learner)}
)


def _phases(means: StepMeans) -> list[Lane]:
    lanes = [
        Lane(name=phase, share=means.share(phase), seconds=_or_zero(means[f"time/{phase}_s"]))
        for phase in PHASES
        if not math.isnan(means[f"time/{phase}_s"])
    ]
    rest = max(0.0, 1.0 - sum(lane.share for lane in lanes))
    return [*lanes, Lane(name="other", share=rest, seconds=rest * means["time/step_s"])]


def _of_rollout(means: StepMeans) -> list[Lane]:
    names = "queued", "model", "between calls", "after calls"
    seconds = {name: means[f"rollout/{name.replace(' ', '_')}_s"] for name in names}
    known = {name: value for name, value in seconds.items() if not math.isnan(value)}
    total = sum(known.values())
    return [Lane(name=name, share=value / total if total else 0.0, seconds=value) for name, value in known.items()]


def _busy(means: StepMeans) -> list[Lane]:
    workers = means["workers/busy_share"]
    shares = {
        "sampler": means["sampler/busy_share"],
        "gateway": means["gateway/busy_share"],
        "workers": workers,
        "agents": workers * means.part("between_calls"),
        "reward": workers * means.part("after_calls"),
        "learner": _ratio(means["time/update_s"], means["time/step_s"]),
    }
    return [Lane(name=name, share=min(1.0, share)) for name, share in shares.items() if not math.isnan(share)]


def _number(value: object) -> float:
    """A metric that can be reckoned with: finite, not negative, and not beyond what is measured; else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        return math.nan
    return float(value)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else math.nan


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
