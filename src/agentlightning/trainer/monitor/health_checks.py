"""Health checks: problems that a run's metrics, queue and disk show, by name, with the settings to change.

`metric_logger.py` asks after every row and between rows, and ``agl runs show`` prints what holds. Pure: the same rows give
the same alarms, so a resumed run repeats none. It knows neither settings nor rollouts, and stops nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentlightning.records import JSON, Run
from agentlightning.trainer.monitor.metrics import NOT_NUMBERS, policy_of

MIN_SUCCESS = 0.03
"""Below this base success hardly a group has anything to compare: of groups of 8, (1 - 0.03)^8 = 0.78 have no success."""
MAX_SUCCESS = 0.98
MAX_REFUSED_SHARE = 0.01
EARLY = LATE = 5
"""Steps at the beginning, and steps at the end, that are averaged and compared."""
SHORT = 3
"""Steps that all have to show it, where a number speaks for itself."""
FLAT = 20
"""Steps in which the reward has to move."""
ACTIVE = "alarms"
"""Key of a run's summary: the text of each alarm that holds, by name."""
BEGUN = "alarms_begun"
"""Key of a run's summary: the alarms that began, each with its step, the latest MAX_BEGUN."""
MAX_BEGUN = 50
MIN_FREE_BYTES = 2**30
"""Free space of the run's folder: below it another checkpoint may not fit."""
WORKERLESS_S = 120.0
"""Seconds without any worker while rollouts wait: workers are restarted within a minute."""
QUEUED_S = 1800.0
SILENT_S = 1800.0
SILENT_TIMES = 10
"""A silence also has to be this many times the longest pause between two rows so far."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One problem of a run."""

    name: str
    """A name of HEALTH_CHECKS or of `load_alarms`; with several policies, after that of the policy and a slash."""
    text: str
    """The problem and the settings to change."""


@dataclass(frozen=True, slots=True)
class History:
    """One policy's numbers so far. A number that is not known yet is NaN, with which every comparison is false."""

    steps: Sequence[JSON]
    base: JSON
    """Its evaluations before training."""

    def values(self, name: str, per: str | None = None) -> list[float]:
        """One number per step that has it, divided by that of `per`; what is not a finite number is NaN."""
        rows = [row for row in self.steps if name in row and (per is None or row.get(per))]
        found = [_number(row[name]) / (1.0 if per is None else _number(row[per])) for row in rows]
        return [value if math.isfinite(value) else math.nan for value in found]

    def early(self, name: str, per: str | None = None) -> float:
        """Mean over the first EARLY steps, once there are LATE others."""
        values = self.values(name, per)
        return statistics.fmean(values[:EARLY]) if len(values) >= EARLY + LATE else math.nan

    def late(self, name: str, per: str | None = None) -> float:
        """Mean over the last LATE steps, once there are as many."""
        values = self.values(name, per)
        return statistics.fmean(values[-LATE:]) if len(values) >= LATE else math.nan

    def lasting(self, name: str, per: str | None = None) -> float:
        """The least of the last SHORT steps, once there are as many: what all of them reach."""
        values = self.values(name, per)[-SHORT:]
        return min(values) if len(values) == SHORT and not any(map(math.isnan, values)) else math.nan

    def last(self, name: str) -> float:
        return _number(self.steps[-1].get(name)) if self.steps else math.nan

    def reward_rose(self) -> bool:
        """True where the reward rose by a quarter of its spread: then a change was not for the worse."""
        rose = self.late("train/reward_mean") - self.early("train/reward_mean")
        spread = self.early("train/reward_std")
        return rose > (0.0 if math.isnan(spread) else 0.25 * spread)


HealthCheck = Callable[[History], str | None]
"""The warning; None where all is well or too little is known."""


def active_alarms(run: Run) -> dict[str, str]:
    """The alarms that hold after the run's last row, by name."""
    active = run.summary.get(ACTIVE)
    return {name: str(text) for name, text in active.items()} if isinstance(active, dict) else {}


def begun_alarms(run: Run) -> list[tuple[int, str, str]]:
    """The alarms that began so far, whether they still hold or not: step, name and text, in their order."""
    begun = run.summary.get(BEGUN)
    known = begun if isinstance(begun, list) else []
    return [(one["step"], one["name"], one["text"]) for one in known if isinstance(one.get("step"), int)]


def alarms(rows: Sequence[JSON], rules: Mapping[str, HealthCheck]) -> list[Alarm]:
    """Alarms after the last of these rows, in the order of the checks."""
    found = []
    for policy in sorted({policy_of(name) for row in rows for name in row}):
        own = [row if not policy else _of_policy(row, policy) for row in rows]
        before = [row for row in own if row["kind"] != "step" and row["step"] == 0]
        base = {name: value for row in before for name, value in row.items()}
        history = History([row for row in own if row["kind"] == "step"], base)
        told = ((name, rule(history)) for name, rule in rules.items())
        found += [Alarm(policy.removeprefix("policies/") + name, text) for name, text in told if text is not None]
    return found


def at_least(bound: float, name: str, text: str, per: str | None = None) -> HealthCheck:
    """Warns with `text`, which has a place for the number, where the last SHORT steps all reach the bound."""

    def check(history: History) -> str | None:
        value = history.lasting(name, per)
        return text.format(value) if value >= bound else None

    return check


def base_success_low(history: History) -> str | None:
    share, tasks = _base(history, "share_above_min"), _base(history, "tasks")
    if not share < MIN_SUCCESS or _all_good(history):
        return None
    told = "the held-out tasks" if math.isnan(tasks) else f"{tasks:.0f} held-out tasks"
    return (
        f"before training {share:.0%} of {told} earn more than the lowest reward; in most groups all rollouts fail "
        "alike, and nothing can be learned from them: begin with easier tasks, imitate a better model first (agl train "
        "--algorithm sft), reward partial success, or raise algorithm.group_size"
    )


def base_success_perfect(history: History) -> str | None:
    if not _all_good(history):
        return None
    return (
        f"before training all but {_base(history, 'share_below_max'):.0%} of the held-out tasks earn the highest reward: "
        "there is nothing to learn; take harder tasks, or a reward that tells good from better"
    )


def not_finite(history: History) -> str | None:
    row = history.steps[-1] if history.steps else {}
    bad = [name for name, value in row.items() if name not in NOT_NUMBERS and not math.isfinite(_number(value))]
    if not bad:
        return None
    return (
        f"{', '.join(sorted(bad))} of step {row['step']} is no finite number: lower trainer.learning_rate or "
        "trainer.grad_clip, take engine.dtype = 'float32', and go back to an earlier checkpoint"
    )


def updates_skipped(history: History) -> str | None:
    count = history.last("train/skipped_updates")
    if not count > 0:
        return None
    told = "1 update" if count == 1 else f"{count:.0f} updates"
    return (
        f"{told} of step {history.steps[-1]['step']} had a gradient that is not finite, and changed nothing: where it comes "
        "again, look for extreme rewards and log-probabilities (agl rollouts list RUN), lower trainer.learning_rate, or "
        "take engine.dtype = 'float32'"
    )


def processes_hung(history: History) -> str | None:
    count = history.last("processes/hung")
    if not count > 0:
        return None
    told = "1 process of the run hung and was" if count == 1 else f"{count:.0f} processes of the run hung and were"
    return (
        f"{told} killed and started again: the run's output and its logs folder say which; where they were only slow, raise "
        "trainer.hang_timeout_s"
    )


def calls_refused(history: History) -> str | None:
    share = history.last("rollout/refused_share")
    if not share > MAX_REFUSED_SHARE:
        return None
    return (
        f"{share:.1%} of step {history.steps[-1]['step']}'s rollouts ended because the gateway refused a model call; what "
        "is learned is biased towards those that got through: agl rollouts list RUN --state refused names the fields; leave "
        "them out of the agent's requests, or set agent.unsupported_params = 'drop'"
    )


def no_signal(history: History) -> str | None:
    share = history.lasting("train/zero_variance")
    if not share >= 0.95:
        return None
    if history.lasting("train/solved_groups") >= 0.5:
        why = "most tasks are solved by every rollout; end here, or take harder tasks"
    elif history.lasting("train/unsolved_groups") >= 0.5:
        why = (
            "most tasks are failed by every rollout; take easier tasks, reward partial success, raise "
            "algorithm.group_size; if they were solved before, lower trainer.learning_rate and go back to a checkpoint"
        )
    else:
        why = (
            "the rollouts of a task all earn the same; raise model.temperature or algorithm.group_size, take "
            "algorithm.dynamic_sampling = true, or a finer reward"
        )
    return f"nothing could be learned from {share:.0%} of the last {SHORT} steps' rollouts: {why}"


def entropy_gone(history: History) -> str | None:
    before, now = history.early("policy/entropy"), history.late("policy/entropy")
    if not now < 0.1 * before or history.late("train/solved_groups") >= 0.5:
        return None
    return (
        f"entropy fell from {before:.3g} to {now:.3g} nats per token while tasks are left unsolved: rollouts of a task "
        "become the same, and nothing new is tried; raise algorithm.loss.clip_high or algorithm.entropy (0.001 to 0.01), "
        "lower trainer.learning_rate, and go back to a checkpoint from before"
    )


def ratio_exploding(history: History) -> str | None:
    rows = [row for row in history.steps if "policy/kl" in row]
    grown = [_number(row["policy/kl"]) - _number(row.get("policy/sampler_gap", 0.0)) for row in rows]
    clipped, signs = history.lasting("policy/clip_share"), []
    if grown and (grown[-1] >= 1.0 or (len(grown) >= SHORT and min(grown[-SHORT:]) >= 0.2)):  # a nat is no noise
        signs.append(f"the divergence from the sampler grows by {grown[-1]:.3g} nats per token within a step")
    if clipped >= 0.3:
        signs.append(f"{clipped:.0%} of the tokens are clipped")
    if not signs:
        return None
    return (
        f"{' and '.join(signs)}: the updates of a step go too far; lower trainer.learning_rate, algorithm.minibatches or "
        "algorithm.epochs"
    )


def sampler_gap(history: History) -> str | None:
    gap = history.lasting("policy/sampler_gap")
    if not gap >= 0.01:
        return None
    if history.lasting("rollout/staleness_mean") > 0:
        why = (
            "rollouts are older than the correction can bear; lower trainer.max_staleness, or take algorithm.correction = "
            "'importance' or 'ratio_mask'"
        )
    else:
        why = (
            "they compute differently; take the same engine.dtype (float32) and engine.dropout = 0 for both, or "
            "algorithm.correction = 'importance'"
        )
    return f"sampler and learner disagree by {gap:.3g} nats per token before the first update: {why}"


def gradient_exploding(history: History) -> str | None:
    norms = history.values("train/grad_norm")
    if len(norms) < EARLY + LATE:
        return None
    now, usual = history.lasting("train/grad_norm"), statistics.median(norms[:-SHORT])
    if not now > 20 * usual > 0:
        return None
    return (
        f"the gradient's norm is {now:.3g}, of {usual:.3g} before: lower trainer.learning_rate or trainer.grad_clip, or "
        "lengthen trainer.warmup_steps"
    )


def turns_collapsing(history: History) -> str | None:
    before, now = history.early("rollout/turns"), history.late("rollout/turns")
    if not (before >= 1.5 and now - 1 <= 0.3 * (before - 1)) or history.reward_rose():
        return None
    return (
        f"rollouts had {before:.1f} calls and have {now:.1f}, and earn no more: the agent gives up its tools or ends early; "
        "look at some with agl rollouts list, reward finished work only, or take a step reward for the calls that matter"
    )


def answers_growing(history: History) -> str | None:
    tokens = "train/tokens_sampled", "rollout/count"
    before, now = history.early(*tokens), history.late(*tokens)
    if not now >= 3 * before or history.reward_rose():
        return None
    return (
        f"a rollout samples {now:.0f} tokens, {before:.0f} at the beginning, and earns no more: lower model.max_tokens, "
        "take algorithm.aggregation = 'token_mean' or 'fixed_length', or a reward that falls with length"
    )


def reward_falling(history: History) -> str | None:
    rewards, spreads = history.values("train/reward_mean"), history.values("train/reward_std")
    if len(rewards) < 2 * SHORT or len(spreads) != len(rewards) or any(map(math.isnan, rewards + spreads)):
        return None
    means = [statistics.fmean(rewards[at : at + SHORT]) for at in range(len(rewards) - SHORT + 1)]
    best = max(range(len(means)), key=lambda at: means[at])
    least = max(4 * _noise(rewards) * math.sqrt(2 / SHORT), 0.25 * statistics.fmean(spreads[best : best + SHORT]))
    if means[best] - means[-1] <= least:
        return None
    step = history.steps[best + SHORT - 1]["step"]
    return (
        f"the reward was {means[best]:.3f} up to step {step} and is {means[-1]:.3f}: lower trainer.learning_rate, keep the "
        f"policy near its reference with algorithm.kl, and take the checkpoint nearest to step {step}"
    )


def reward_flat(history: History) -> str | None:
    rewards = history.values("train/reward_mean")[-FLAT:]
    if len(rewards) < FLAT or any(map(math.isnan, rewards)):
        return None
    if history.late("train/solved_groups") >= 0.5 or history.late("train/zero_variance") >= 0.95:
        return None  # all is learned, or no_signal tells why nothing can be
    if history.reward_rose():
        return None  # it levelled off
    before, now = statistics.fmean(rewards[: FLAT // 2]), statistics.fmean(rewards[FLAT // 2 :])
    # Twice the deviation of the difference of two means of FLAT / 2.
    if abs(now - before) > 2 * _noise(rewards) * math.sqrt(4 / FLAT):
        return None
    return (
        f"the reward has been flat for {FLAT} steps, at {now:.3f}: look at some rollouts with agl rollouts list, take more "
        "trainer.tasks_per_step, and try twice and half the trainer.learning_rate"
    )


HEALTH_CHECKS: dict[str, HealthCheck] = {
    **{check.__name__: check for check in (base_success_low, base_success_perfect, not_finite, processes_hung)},
    "updates_skipped": updates_skipped,
    **{check.__name__: check for check in (calls_refused, no_signal, entropy_gone, ratio_exploding, sampler_gap)},
    **{check.__name__: check for check in (gradient_exploding, turns_collapsing, answers_growing, reward_falling)},
    "reward_flat": reward_flat,
    "kl_running_away": at_least(
        0.5,
        "policy/ref_kl",
        "the policy is {:.3g} nats per token away from its reference: raise algorithm.kl, or lower trainer.learning_rate",
    ),
    "rollouts_failing": at_least(
        0.5,
        "rollout/failed",
        f"{{:.0%}} of the last {SHORT} steps' rollouts failed: see agl rollouts list RUN --state failed; mend the agent, or "
        "raise agent.timeout_s or agent.max_attempts",
        per="rollout/count",
    ),
    "infrastructure_failing": at_least(
        0.1,
        "rollout/cause/infra",
        f"{{:.0%}} of the last {SHORT} steps' attempts ended for want of infrastructure and were tried again: agl rollouts "
        'list RUN --where "lost > 0" names it; the sandbox, the environment, an external model or memory may be short',
    ),
    "verifier_failing": at_least(
        0.05,
        "rollout/cause/verifier",
        f"{{:.0%}} of the last {SHORT} steps' attempts ended in the reward function: agl rollouts list RUN --where "
        "\"cause = 'verifier'\" shows its errors",
    ),
    "prompts_forking": at_least(
        0.3,
        "rollout/forked_share",
        "{:.0%} of the calls do not continue the tokens of the call before: what was sampled there is trained apart from "
        "what followed; agl runs show RUN --drift names the causes",
    ),
}
OFFLINE_HEALTH_CHECKS = {
    name: HEALTH_CHECKS[name] for name in ("not_finite", "updates_skipped", "processes_hung", "gradient_exploding")
}
"""The checks of an offline run, where nothing is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The state of a run between its steps."""

    queued: int = 0
    oldest_queued_s: float = 0.0
    workerless_s: float = 0.0
    """Seconds for which rollouts have waited and no worker was seen."""
    paused: Sequence[str] = ()
    """Sentences of the workers that claim nothing for a while."""
    free_bytes: int = MIN_FREE_BYTES
    """Of the disk that holds the run's folder."""
    silent_s: float = 0.0
    """Seconds since a step or an evaluation was recorded; 0 before the first of this process."""
    longest_pause_s: float = 0.0
    """The longest time between two of them; 0 before the second."""


def load_alarms(load: Load) -> list[Alarm]:
    """The alarms of a moment."""
    found: dict[str, str] = {}
    if load.queued and load.workerless_s >= WORKERLESS_S:
        found["queue_without_workers"] = (
            f"{load.queued} rollouts wait and no worker was seen for {_minutes(load.workerless_s)}: start some with agl "
            "worker"
        )
    elif load.oldest_queued_s >= QUEUED_S:
        found["queue_old"] = (
            f"a rollout has waited {_minutes(load.oldest_queued_s)} for a worker, and {load.queued} wait: add workers, or "
            "raise agent.concurrency; agl runs show RUN --bottlenecks shows what limits the run"
        )
    if load.paused:
        count = "a worker claims" if len(load.paused) == 1 else f"{len(load.paused)} workers claim"
        found["workers_paused"] = f"{count} nothing for now: {load.paused[0]}"
    if load.free_bytes < MIN_FREE_BYTES:
        found["disk_filling"] = (
            f"{load.free_bytes / 2**20:,.0f} MiB are left on the disk of the run's folder: free some with agl runs delete, "
            "or lower trainer.keep_checkpoints; a checkpoint that does not fit ends the run"
        )
    if load.longest_pause_s and load.silent_s >= max(SILENT_S, SILENT_TIMES * load.longest_pause_s):
        found["run_silent"] = (
            f"no step ended for {_minutes(load.silent_s)}, {load.silent_s / load.longest_pause_s:.0f} times the longest "
            f"pause before ({_minutes(load.longest_pause_s)}): see agl rollouts list RUN and the run's logs folder"
        )
    return [Alarm(name, text) for name, text in found.items()]


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _base(history: History, what: str) -> float:
    """From the evaluation at temperature 1, else the greedy one; NaN once training has gone on for a while.

    The greedy one comes first and says less: a model that never succeeds greedily may succeed often enough to learn. It
    counts where a step was made and there was no other.
    """
    kinds = () if len(history.steps) >= EARLY else ("sampled", "greedy") if history.steps else ("sampled",)
    paths = (f"eval/{kind}/{what}" for kind in kinds)
    return next((_number(history.base[path]) for path in paths if path in history.base), math.nan)


def _all_good(history: History) -> bool:
    """True where the base model earns the highest reward almost everywhere; where all earn the same, above 0 is good."""
    mean = history.base.get("eval/sampled/reward_mean", history.base.get("eval/greedy/reward_mean"))
    return _base(history, "share_below_max") <= 1 - MAX_SUCCESS and _number(mean) > 0


def _noise(rewards: Sequence[float]) -> float:
    """Their standard deviation about a slow trend.

    Of normal noise the median of |differences| is 0.954 deviations; unlike these it ignores a fall that comes at once.
    """
    return statistics.median(abs(one - other) for one, other in pairwise(rewards)) / 0.954


def _of_policy(row: JSON, policy: str) -> JSON:
    """The fields of a row that are about this policy, by their plain names."""
    own = {name.removeprefix(policy): value for name, value in row.items() if name.startswith(policy)}
    return own | {name: row[name] for name in NOT_NUMBERS if name in row}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
