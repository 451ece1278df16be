"""What a run records: every number's name, group and meaning, and the numbers that follow from others.

The loops record through `trainer.watch`, which adds `derived` to each row; trackers and ``agl runs show`` order numbers by
group. Pure: knows no store and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from agentlightning.types import JSON

GROUPS: Mapping[str, Mapping[str, str]] = {
    "reward": {
        "reward_mean": "mean reward of the step's training rollouts",
        "reward_std": "standard deviation of the reward over these rollouts",
        "mixed_groups": "share of groups whose rewards differ: the others have nothing to compare",
        "solved_groups": "share of groups in which every rollout has the step's highest reward",
        "unsolved_groups": "share of groups in which every rollout has the step's lowest reward",
        "zero_variance": "share of rollouts from which nothing could be learned",
    },
    "heldout": {
        "heldout_greedy": "mean reward over the held-out tasks, greedy",
        "heldout_sampled": "the same at temperature 1",
        "heldout_greedy_above_least": "share of held-out tasks with more than the lowest reward among them",
        "heldout_greedy_below_best": "share of held-out tasks with less than the highest reward among them",
        "heldout_greedy_turns": "calls a rollout in that evaluation",
        "heldout_greedy_failed": "rollouts of that evaluation that failed; each counts as reward 0",
        "heldout_sampled_above_least": "as heldout_greedy_above_least, at temperature 1",
        "heldout_sampled_below_best": "as heldout_greedy_below_best, at temperature 1",
        "heldout_sampled_turns": "as heldout_greedy_turns, at temperature 1",
        "heldout_sampled_failed": "as heldout_greedy_failed, at temperature 1",
        "heldout_loss": "loss of the recorded examples that are held out",
        "heldout_margin": "their margin",
        "heldout_accuracy": "their accuracy",
    },
    "learn": {
        "loss": "the loss, mean over the step's updates",
        "entropy": "entropy of the policy at the trained tokens, in nats a token",
        "kl": "divergence between sampler and policy during the updates (k3, nats a token)",
        "sampler_gap": "the same before the step's first update: what sampler and learner disagree about by themselves",
        "ratio_max": "the farthest that the ratio of any token is from 1",
        "clip_share": "share of tokens whose ratio was cut",
        "masked_share": "share of tokens that a mask left out",
        "importance": "mean importance weight",
        "ref_kl": "divergence from the reference (nats a token)",
        "nll": "negative log-probability of the trained tokens, nats a token",
        "grad_norm": "norm of the gradient before clipping, mean over the updates",
        "learning_rate": "of the step",
        "updates": "optimizer updates of the step",
        "value_loss": "loss of the critic",
        "value_grad_norm": "norm of the critic's gradient before clipping",
        "value_mean": "mean of the critic's values",
        "explained_variance": "share of the returns' variance that the critic explains",
        "margin": "how much more the policy prefers the wanted answer than the reference does, times beta, in nats",
        "accuracy": "share of pairs with a margin above 0",
        "baseline": "kto's estimate of the divergence from the reference",
        "examples": "examples of the step",
        "epoch": "passes over the record so far",
    },
    "rollouts": {
        "rollouts": "rollouts that the step consumed",
        "turns": "calls of the policy a rollout",
        "calls": "recorded calls of these rollouts",
        "forked_calls": "calls whose prompt could not continue the tokens of an earlier one",
        "forked_share": "forked_calls / calls",
        "failed": "rollouts whose attempts all failed",
        "invalid": "rollouts without a reward or a call of the policy",
        "broken_spans": "spans of these rollouts that were mended or lost; broken_spans_CAUSE has them by cause",
        "unrewarded": "rollouts dropped because a reward is missing or not finite",
        "filled": "rollouts whose reward was filled in",
        "incomplete_groups": "groups with fewer than group_size usable rollouts",
        "staleness_mean": "training steps between sampling and learning, mean over the rollouts",
        "staleness_max": "the largest of them",
        "mixed_versions": "share of rollouts that were sampled by more than one version",
        "stale": "rollouts that were too old to learn from",
        "surplus": "rollouts that were cancelled because the step had enough",
        "made_up_groups": "groups sampled in place of such as teach nothing",
        "judge_requests": "requests to the judge",
        "judge_cached": "replies that were there from an earlier try of the step",
        "judge_unusable": "groups for which it gave no usable answer",
        "judge_prompt_tokens": "tokens that it read",
        "judge_sampled_tokens": "tokens that it wrote",
    },
    "air": {
        "air_agreement": "correlation of AIR's rewards with the final reward, within groups",
        "air_turned": "share of calls whose advantage has another sign with AIR's rewards than without",
        "air_moved": "how far they move advantages, over the advantages' size",
    },
    "tokens": {
        "tokens_sampled": "sampled tokens of the usable rollouts",
        "tokens_trained": "those of them that were in an update",
        "trained_share": "tokens_trained / tokens_sampled",
        "sequences": "rows that the engine trained on",
        "tokens_per_second": "tokens_sampled / seconds",
    },
    "time": {
        "seconds": "wall time of the step, without evaluations and checkpoints",
        "seconds_collect": "waiting for rollouts",
        "seconds_record": "reading the record and planning",
        "seconds_learn": "updates",
        "seconds_publish": "putting the new weights to work",
        "share_collect": "seconds_collect / seconds",
        "share_record": "seconds_record / seconds",
        "share_learn": "seconds_learn / seconds",
        "share_publish": "seconds_publish / seconds",
        "seconds_heldout": "wall time of the loss of what is held out",
        "seconds_heldout_greedy": "wall time of the greedy evaluation",
        "seconds_heldout_sampled": "wall time of the evaluation at temperature 1",
    },
}
"""Names by group, with their meanings; air_RULE and air_RULE_share belong to "air", any other name to "other"."""

AIR = "air_"

NOT_NUMBERS = frozenset({"step", "kind", "time"})
"""Fields of a row of metrics.jsonl that are no metrics."""


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """Shares and rates that follow from the numbers of a step; only those whose parts are there.

    >>> derived({"tokens_trained": 30.0, "tokens_sampled": 40.0, "seconds_learn": 1.0, "seconds": 4.0})
    {'trained_share': 0.75, 'tokens_per_second': 10.0, 'share_learn': 0.25}
    """
    found = {}
    for policy in sorted({policy_of(name) for name in metrics}):
        for name, part, whole in (
            ("trained_share", "tokens_trained", "tokens_sampled"),
            ("forked_share", "forked_calls", "calls"),
            ("tokens_per_second", "tokens_sampled", "seconds"),
        ):
            if policy + part in metrics and policy + whole in metrics:
                found[policy + name] = metrics[policy + part] / max(1e-9, metrics[policy + whole])
    if "seconds" in metrics:
        for name in sorted(metrics):
            if name.startswith("seconds_"):
                found[f"share_{name.removeprefix('seconds_')}"] = metrics[name] / max(1e-9, metrics["seconds"])
    return found


def policy_of(name: str) -> str:
    """The policy that a number is about, with its slash; "" where the run trains one.

    >>> policy_of("white/entropy"), policy_of("entropy")
    ('white/', '')
    """
    return name[: name.rfind("/") + 1]


def group_of(name: str) -> str:
    """The group of a number, whatever policy it is about."""
    plain = name.rpartition("/")[2]
    found = next((group for group, names in GROUPS.items() if plain in names), "other")
    return "air" if found == "other" and plain.startswith(AIR) else found


def in_order(names: Iterable[str]) -> list[str]:
    """Names by group, as in GROUPS; within "other" and for the same number of several policies by name."""
    places = {name: place for place, name in enumerate(known for names in GROUPS.values() for known in names)}

    def place(name: str) -> int:
        plain = name.rpartition("/")[2]
        return places.get(plain, places["air_moved"] if plain.startswith(AIR) else len(places))

    return sorted(names, key=lambda name: (place(name), name))


def numbers(row: JSON) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_NUMBERS and isinstance(value, int | float) and math.isfinite(value)
    }
