"""The collapse guard: what a run's numbers say is going wrong, by name, with what to change.

`trainer.watch` asks it after every row, ``agl runs show`` about a whole run. A pure function of the rows of metrics.jsonl:
the same rows give the same alarms, so a resumed run repeats none. It knows neither settings nor rollouts, and stops
nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentlightning.trainer.metrics import NOT_NUMBERS, policy_of
from agentlightning.types import JSON

LEAST_SUCCESS = 0.03
"""Below this base success hardly a group has anything to compare: of groups of 8, (1 - 0.03)^8 = 0.78 have no success."""
MOST_SUCCESS = 0.98
EARLY = 5
"""Steps at the beginning that later ones are compared with."""
LATE = 5
"""Steps that are averaged before something counts as a trend."""
SHORT = 3
"""Steps that all have to show it, where a number speaks for itself."""
QUIET = 20
"""Rows during which an alarm that ceased and comes back is not told again."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that goes wrong."""

    name: str
    """A name of RULES; with several policies, after that of the policy and a slash."""
    text: str
    """What the numbers say and what to change."""


@dataclass(frozen=True, slots=True)
class History:
    """One policy's numbers so far."""

    steps: Sequence[JSON]
    base: JSON
    """Its evaluations before training."""

    def values(self, name: str) -> list[float]:
        """One number per step that has it; what is not a finite number is NaN."""
        return [_number(row[name]) for row in self.steps if name in row]

    def late(self, name: str) -> float | None:
        """Mean over the last LATE steps; None where there are fewer, or where one is not finite."""
        return _mean(self.values(name)[-LATE:], LATE)

    def lasting(self, name: str) -> float | None:
        """The least of the last SHORT steps: what all of them reach; None as above."""
        values = self.values(name)[-SHORT:]
        return min(values) if len(values) == SHORT and all(map(math.isfinite, values)) else None

    def early(self, name: str) -> float | None:
        """Mean over the first EARLY steps, once there are LATE others."""
        values = self.values(name)
        return _mean(values[:EARLY], EARLY) if len(values) >= EARLY + LATE else None

    def reward_rose(self) -> bool:
        """Whether the reward rose by a quarter of its spread: then a change was not for the worse."""
        before, now, spread = self.early("reward_mean"), self.late("reward_mean"), self.early("reward_std")
        return before is not None and now is not None and now > before + 0.25 * (spread or 0.0)


Rule = Callable[[History], str | None]
"""What to tell; None where all is well or too little is known."""


def alarms(rows: Sequence[JSON], rules: Mapping[str, Rule]) -> list[Alarm]:
    """What is wrong after the last of these rows, in the order of the rules."""
    found = []
    for policy in sorted({policy_of(name) for row in rows for name in row}):
        own = [row if not policy else _of_policy(row, policy) for row in rows]
        history = History(
            steps=[row for row in own if row["kind"] == "step"],
            base={
                name: value for row in own if row["kind"] != "step" and row["step"] == 0 for name, value in row.items()
            },
        )
        for name, rule in rules.items():
            text = rule(history)
            if text is not None:
                found.append(Alarm(policy + name, text))
    return found


def new_alarms(rows: Sequence[JSON], rules: Mapping[str, Rule]) -> list[Alarm]:
    """Of the alarms after the last row those that did not hold after any of the QUIET rows before it."""
    now = alarms(rows, rules)
    for back in range(1, min(QUIET, len(rows)) + 1):
        if not now:
            break
        told = {alarm.name for alarm in alarms(rows[: len(rows) - back], rules)}
        now = [alarm for alarm in now if alarm.name not in told]
    return now


def base_success_low(history: History) -> str | None:
    share = _base(history, "above_least")
    if share is None or share >= LEAST_SUCCESS or _all_good(history):
        return None
    return (
        f"before training {share:.0%} of the held-out tasks earn more than the lowest reward; in most groups all rollouts "
        "fail alike, and nothing can be learned from them: begin with easier tasks, imitate a better model first (agl train "
        "--algorithm sft), reward partial success, or raise algorithm.group_size"
    )


def base_success_perfect(history: History) -> str | None:
    share = _base(history, "below_best")
    if share is None or share > 1 - MOST_SUCCESS or not _all_good(history):
        return None
    return (
        f"before training all but {share:.0%} of the held-out tasks earn the highest reward: there is nothing to learn; "
        "take harder tasks, or a reward that tells good from better"
    )


def not_finite(history: History) -> str | None:
    if not history.steps:
        return None
    row = history.steps[-1]
    bad = [name for name, value in row.items() if name not in NOT_NUMBERS and not math.isfinite(_number(value))]
    if not bad:
        return None
    return (
        f"{', '.join(sorted(bad))} of step {row['step']} is no finite number: lower trainer.learning_rate or "
        "trainer.grad_clip, take engine.dtype = 'float32', and go back to an earlier checkpoint"
    )


def no_signal(history: History) -> str | None:
    share = history.lasting("zero_variance")
    if share is None or share < 0.95:
        return None
    told = f"nothing could be learned from {share:.0%} of the last {SHORT} steps' rollouts: "
    if (history.lasting("solved_groups") or 0.0) >= 0.5:
        return told + "most tasks are solved by every rollout; end here, or take harder tasks"
    if (history.lasting("unsolved_groups") or 0.0) >= 0.5:
        return told + (
            "most tasks are failed by every rollout; take easier tasks, reward partial success, raise "
            "algorithm.group_size; if they were solved before, lower trainer.learning_rate and go back to a checkpoint"
        )
    return told + (
        "the rollouts of a task all earn the same; raise model.temperature or algorithm.group_size, take "
        "algorithm.dynamic_sampling = true, or a finer reward"
    )


def entropy_gone(history: History) -> str | None:
    before, now = history.early("entropy"), history.late("entropy")
    if before is None or now is None or now >= 0.1 * before or (history.late("solved_groups") or 0.0) >= 0.5:
        return None
    return (
        f"entropy fell from {before:.3g} to {now:.3g} nats a token while tasks are left unsolved: rollouts of a task become "
        "the same, and nothing new is tried; raise algorithm.clip_high or algorithm.entropy (0.001 to 0.01), lower "
        "trainer.learning_rate, and go back to a checkpoint from before"
    )


def ratio_exploding(history: History) -> str | None:
    grown = [_number(row["kl"]) - _number(row.get("sampler_gap", 0.0)) for row in history.steps if "kl" in row]
    clipped = history.lasting("clip_share")
    signs = []
    if grown and (grown[-1] >= 1.0 or (len(grown) >= SHORT and min(grown[-SHORT:]) >= 0.2)):  # a nat is no noise
        signs.append(f"the divergence from the sampler grows by {grown[-1]:.3g} nats a token within a step")
    if clipped is not None and clipped >= 0.3:
        signs.append(f"{clipped:.0%} of the tokens are clipped")
    if not signs:
        return None
    return (
        f"{' and '.join(signs)}: the updates of a step go too far; lower trainer.learning_rate, algorithm.minibatches or "
        "algorithm.epochs"
    )


def sampler_gap(history: History) -> str | None:
    gap = history.lasting("sampler_gap")
    if gap is None or gap < 0.01:
        return None
    told = f"sampler and learner disagree by {gap:.3g} nats a token before the first update: "
    if (history.lasting("staleness_mean") or 0.0) > 0:
        return told + (
            "rollouts are older than the correction can bear; lower trainer.max_staleness, or take algorithm.importance or "
            "algorithm.ratio_mask"
        )
    return told + (
        "they compute differently; take the same engine.dtype (float32) and engine.dropout = 0 for both, or "
        "algorithm.importance = 'token'"
    )


def gradient_exploding(history: History) -> str | None:
    norms = history.values("grad_norm")
    now = history.lasting("grad_norm")
    if len(norms) < EARLY + LATE or now is None:
        return None
    usual = statistics.median(norms[:-SHORT])
    if not now > 20 * usual > 0:
        return None
    return (
        f"the gradient's norm is {now:.3g}, of {usual:.3g} before: lower trainer.learning_rate or trainer.grad_clip, or "
        "lengthen trainer.warmup_steps"
    )


def kl_running_away(history: History) -> str | None:
    distance = history.lasting("ref_kl")
    if distance is None or distance < 0.5:
        return None
    return (
        f"the policy is {distance:.3g} nats a token away from its reference: raise algorithm.kl, or lower "
        "trainer.learning_rate"
    )


def turns_collapsing(history: History) -> str | None:
    before, now = history.early("turns"), history.late("turns")
    if before is None or now is None or before < 1.5 or now - 1 > 0.3 * (before - 1) or history.reward_rose():
        return None
    return (
        f"rollouts had {before:.1f} calls and have {now:.1f}, and earn no more: the agent gives up its tools or ends early; "
        "look at some with agl rollouts list, reward finished work only, or take a step reward for the calls that matter"
    )


def answers_growing(history: History) -> str | None:
    lengths = [
        _number(row["tokens_sampled"]) / _number(row["rollouts"])
        for row in history.steps
        if row.get("rollouts") and "tokens_sampled" in row
    ]
    if len(lengths) < EARLY + LATE:
        return None
    before, now = _mean(lengths[:EARLY], EARLY), _mean(lengths[-LATE:], LATE)
    if before is None or now is None or now < 3 * before or history.reward_rose():
        return None
    return (
        f"a rollout samples {now:.0f} tokens, {before:.0f} at the beginning, and earns no more: lower model.max_tokens, "
        "take algorithm.aggregation = 'token_mean' or 'fixed_length', or a reward that falls with length"
    )


def reward_falling(history: History) -> str | None:
    rewards, spreads = history.values("reward_mean"), history.values("reward_std")
    if len(rewards) < 2 * SHORT or len(spreads) != len(rewards) or not all(map(math.isfinite, rewards + spreads)):
        return None
    means = [statistics.fmean(rewards[at : at + SHORT]) for at in range(len(rewards) - SHORT + 1)]
    best = max(range(len(means)), key=lambda at: means[at])
    # Of normal noise the median of |differences| is 0.954 deviations; unlike these it ignores a fall that comes at once.
    noise = statistics.median(abs(one - other) for one, other in pairwise(rewards)) / 0.954
    least = max(4 * noise * math.sqrt(2 / SHORT), 0.25 * statistics.fmean(spreads[best : best + SHORT]))
    if means[best] - means[-1] <= least:
        return None
    step = history.steps[best + SHORT - 1]["step"]
    return (
        f"the reward was {means[best]:.3f} up to step {step} and is {means[-1]:.3f}: lower trainer.learning_rate, keep the "
        f"policy near its reference with algorithm.kl, and take the checkpoint nearest to step {step}"
    )


def rollouts_failing(history: History) -> str | None:
    shares = [
        _number(row["failed"]) / row["rollouts"]
        for row in history.steps[-SHORT:]
        if row.get("rollouts") and "failed" in row
    ]
    if len(shares) < SHORT or min(shares) < 0.5:
        return None
    return (
        f"{min(shares):.0%} of the last {SHORT} steps' rollouts failed: see agl rollouts list RUN --state failed; "
        "mend the agent, or raise agent.timeout_s or agent.max_attempts"
    )


def prompts_forking(history: History) -> str | None:
    share = history.lasting("forked_share")
    if share is None or share < 0.3:
        return None
    return (
        f"{share:.0%} of the calls do not continue the tokens of the call before: what was sampled there is trained apart "
        "from what followed; agl rollouts drift RUN names the causes"
    )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        base_success_low,
        base_success_perfect,
        not_finite,
        no_signal,
        entropy_gone,
        ratio_exploding,
        sampler_gap,
        gradient_exploding,
        kl_running_away,
        turns_collapsing,
        answers_growing,
        reward_falling,
        rollouts_failing,
        prompts_forking,
    )
}

RECORD_RULES = {name: RULES[name] for name in ("not_finite", "gradient_exploding")}
"""Those for a run that learns from the record, where nothing is sampled."""


def _base(history: History, what: str) -> float | None:
    """From the evaluation at temperature 1, else the greedy one; None once training has gone on for a while.

    The greedy one comes first and says less: a model that never succeeds greedily may succeed often enough to learn. It
    counts where a step was made and there was no other.
    """
    if len(history.steps) >= EARLY:
        return None
    for kind in ("sampled", "greedy") if history.steps else ("sampled",):
        value = history.base.get(f"heldout_{kind}_{what}")
        if value is not None:
            return _number(value)
    return None


def _all_good(history: History) -> bool:
    """Whether the base model earns the highest reward almost everywhere; where all earn the same, above 0 is good."""
    below = _base(history, "below_best")
    mean = history.base.get("heldout_sampled", history.base.get("heldout_greedy"))
    return below is not None and below <= 1 - MOST_SUCCESS and _number(mean) > 0


def _of_policy(row: JSON, policy: str) -> JSON:
    """The fields of a row that are about this policy, by their plain names."""
    own = {name.removeprefix(policy): value for name, value in row.items() if name.startswith(policy)}
    return own | {name: row[name] for name in NOT_NUMBERS if name in row}


def _mean(values: Sequence[float], count: int) -> float | None:
    """Of exactly `count` finite numbers."""
    return statistics.fmean(values) if len(values) == count and all(map(math.isfinite, values)) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
