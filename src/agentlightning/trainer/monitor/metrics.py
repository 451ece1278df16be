"""Metrics: every metric's path and meaning, and the metrics that follow from others.

`metric_logger.py` gives each number its path and adds `derived`; trackers and ``agl runs show`` order metrics as they stand
here. Pure: knows no store and no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from agentlightning.records import JSON

METRICS: Mapping[str, str] = {
    "train/reward_mean": "mean reward of the step's training rollouts",
    "train/schedule_entry": "active entry of algorithm.schedule; 0: [algorithm] itself",
    "train/reward_std": "standard deviation of these rewards",
    "rewards/NAME/mean": "mean of each named reward, if rollouts have several",
    "train/groups_with_signal": "share of groups whose rewards differ",
    "train/solved_groups": "share of groups in which every rollout has the step's highest reward",
    "train/unsolved_groups": "share of groups in which every rollout has the step's lowest reward",
    "train/zero_variance": "share of rollouts without signal",
    "train/loss": "mean loss of the step's updates",
    "train/nll": "negative log-probability of the trained tokens, nats per token",
    "train/grad_norm": "gradient norm before clipping, mean over the updates",
    "train/learning_rate": "learning rate of the step",
    "train/updates": "optimizer updates of the step",
    "train/skipped_updates": "updates skipped because their gradient was not finite; absent if none",
    "train/margin": "the policy's preference for the chosen completion over the reference's, times beta, in nats",
    "train/accuracy": "share of pairs with a margin above 0",
    "train/kl_baseline": "KTO's estimate of the KL to the reference",
    "train/examples": "examples of the step",
    "train/epoch": "passes over the examples so far",
    "train/tokens_sampled": "sampled tokens of the usable rollouts",
    "train/tokens_trained": "those of rollouts with an advantage; KL and entropy terms may train others, too",
    "train/trained_token_share": "train/tokens_trained / train/tokens_sampled",
    "train/sequences": "rows that the engine trained on",
    "eval/greedy/reward_mean": "mean reward over the held-out tasks, greedy",
    "eval/sampled/reward_mean": "the same at temperature 1",
    "eval/greedy/tasks": "held-out tasks evaluated",
    "eval/greedy/reward_stderr": "standard error of that mean; chance moves it by twice as much",
    "eval/greedy/share_above_min": "share of held-out tasks above the lowest reward",
    "eval/greedy/share_below_max": "share of held-out tasks below the highest reward",
    "eval/greedy/success_mean": "share of held-out tasks solved, where a reward of the name success is recorded",
    "eval/greedy/turns": "calls per rollout",
    "eval/greedy/failed": "failed rollouts; each counts as reward 0",
    "eval/greedy/dropped": "rollouts left out: infrastructure or the reward function failed; absent if none",
    "eval/loss": "loss on held-out recorded examples",
    "eval/margin": "their margin",
    "eval/accuracy": "their accuracy",
    "prompts/best_mean": "best candidate's mean reward over all validation tasks so far",
    "prompts/batch_mean": "mean reward of the batch's rollouts",
    "prompts/candidates": "candidates so far, including the start",
    "prompts/rollouts": "rollouts so far",
    "prompts/tokens": "tokens so far, of agents and of the writing model",
    "policy/entropy": "entropy at the trained tokens, nats per token",
    "policy/kl": "KL between sampler and policy during the updates (k3, nats per token)",
    "policy/sampler_gap": "policy/kl before the step's first update: difference between sampler and learner",
    "policy/weight_gap": "difference of sampler and learner at one row after publication, nats per token",
    "policy/ratio_max": "largest distance of a token's ratio from 1",
    "policy/clip_share": "share of tokens with a clipped ratio",
    "policy/masked_share": "share of tokens left out by a mask",
    "policy/importance_weight": "mean importance weight",
    "policy/ref_kl": "KL to the reference, nats per token",
    "policy/snapshot_step": "step of the checkpoint that an opponent with snapshot_of samples",
    "critic/loss": "loss of the critic",
    "critic/grad_norm": "the critic's gradient norm before clipping",
    "critic/value_mean": "mean of the critic's values",
    "critic/explained_variance": "share of the returns' variance that the critic explains",
    "rollout/count": "rollouts consumed by the step",
    "rollout/turns": "policy calls per rollout, without calls replayed by a fork",
    "rollout/calls": "recorded calls of these rollouts",
    "rollout/forked_calls": "calls whose prompt does not continue an earlier call's tokens",
    "rollout/forked_share": "rollout/forked_calls / rollout/calls",
    "rollout/side_calls": "calls beside the task, such as for a title; absent if none",
    "rollout/failed": "rollouts whose attempts all failed",
    "rollout/cause/CAUSE": "share of attempts that ended by it: policy, agent, refused, limit, timeout, verifier, infra",
    "rollout/dropped_groups": "groups left out because infrastructure or the reward function failed; absent if none",
    "rollout/refused_share": "share of rollouts that failed because the gateway refused their last model call",
    "rollout/invalid": "rollouts without a reward or a policy call",
    "rollout/broken_spans": "repaired or lost spans; by cause: rollout/broken_spans/CAUSE",
    "rollout/unrewarded": "rollouts dropped for a missing or non-finite reward",
    "rollout/staleness_mean": "training steps between sampling and learning, mean over the rollouts",
    "rollout/staleness_max": "the largest of them",
    "rollout/mixed_versions": "share of rollouts sampled by more than one version",
    "rollout/stale": "rollouts too old to learn from",
    "rollout/overprovisioned": "surplus rollouts that the step cancelled",
    "rollout/queued_s": "mean wait of a rollout for a worker, seconds",
    "rollout/duration_s": "mean duration of the last attempt, seconds",
    "rollout/duration_max_s": "the longest of them",
    "rollout/model_s": "mean seconds with a policy call in flight",
    "rollout/between_calls_s": "mean seconds before and between these calls: tools and the agent's code",
    "rollout/after_calls_s": "mean seconds after the last call: the agent's end and its reward function",
    "rollout/resampled_groups": "groups sampled in place of groups without a signal",
    "forks/count": "forks sampled for credit = forked",
    "forks/failed": "forks whose attempts all failed",
    "forks/replay_ended_share": "share of forks whose replay ended early; they are not used",
    "forks/advantage_variance": "sampling variance of a call's advantage, mean over rollouts with forks",
    "tree/forks": "forks among the step's rollouts",
    "tree/replay_ended_share": "share of forks whose replay ended early; independent rollouts from there on",
    "tree/shared_share": "share of replayed calls: neither sampled nor trained again",
    "tree/replayed_tokens": "completion tokens of these calls; not in cost/sampled_tokens",
    "judge/requests": "requests to the judge",
    "judge/cached": "replies stored by an earlier try of the step",
    "judge/unusable": "groups without a usable reply",
    "judge/prompt_tokens": "prompt tokens of the judge",
    "judge/sampled_tokens": "completion tokens of the judge",
    "workers/slots": "simultaneous rollouts of the run's workers; unknown for workers elsewhere",
    "workers/running_mean": "mean number of running rollouts",
    "workers/busy_share": "workers/running_mean / workers/slots",
    "workers/queued_mean": "mean number of rollouts waiting for a worker",
    "sampler/busy_share": "share of the step with a policy call in flight",
    "sampler/calls_mean": "mean number of simultaneous calls while busy",
    "sampler/slots": "simultaneous calls (engine.max_num_seqs); unknown for samplers elsewhere",
    "sampler/tokens_per_s": "tokens sampled per second while busy",
    "gateway/busy_share": "share of the step with any call in flight, external models included",
    "cost/agent_s": "total seconds of the rollouts' last attempts",
    "cost/prompt_tokens": "prompt tokens of their policy calls; shared prefixes count in each",
    "cost/sampled_tokens": "tokens sampled by policies",
    "cost/learner_tokens": "tokens computed for updates, padding included; packed shared prefixes count once",
    "cost/fork_agent_s": "total seconds of forks for credit = forked; not in cost/agent_s",
    "cost/fork_sampled_tokens": "tokens sampled for these forks; not in cost/sampled_tokens",
    "cost/external_tokens": "tokens of external models, as they report them",
    "processes/hung": "hung processes killed since the trainer started; absent if none",
    "time/tokens_per_s": "train/tokens_sampled / time/step_s",
    "time/step_s": "wall time of the step, without evaluations and checkpoints",
    "time/collect_s": "waiting for rollouts",
    "time/prepare_s": "reading rollouts and planning updates",
    "time/update_s": "updates",
    "time/publish_s": "publishing new weights",
    "time/probe_s": "scoring a row before and after the update, by samplers and learner",
    "time/record_s": "storing the calls' credit",
    "time/collect_share": "time/collect_s / time/step_s",
    "time/prepare_share": "time/prepare_s / time/step_s",
    "time/update_share": "time/update_s / time/step_s",
    "time/publish_share": "time/publish_s / time/step_s",
    "time/probe_share": "time/probe_s / time/step_s",
    "time/record_share": "time/record_s / time/step_s",
    "time/eval_loss_s": "wall time of the held-out loss",
    "time/eval_greedy_s": "wall time of the greedy evaluation",
    "time/eval_sampled_s": "wall time of the evaluation at temperature 1",
}
"""Meanings by path; air/RULE/reward_mean, air/RULE/share and rollout/broken_spans/CAUSE belong to their groups."""

SHORT: Mapping[str, str] = {
    path.partition("/")[2]: path for path in METRICS if path.startswith(("train/", "policy/", "rollout/"))
} | {
    "rollouts": "rollout/count",
    "importance": "policy/importance_weight",
    "baseline": "train/kl_baseline",
    "learner_tokens": "cost/learner_tokens",
    "value_loss": "critic/loss",
    "value_grad_norm": "critic/grad_norm",
    "value_mean": "critic/value_mean",
    "explained_variance": "critic/explained_variance",
}
"""Paths by the names that engines and algorithms, which know of no groups, give their numbers."""

NOT_NUMBERS = frozenset({"step", "kind", "time"})
"""Fields of a row of metrics.jsonl that are no metrics."""

_POLICY = re.compile(r"policies/[^/]+/")


def path_of(name: str, policy: str = "") -> str:
    """The path of a number; of one of several policies with the policy's alias before it.

    >>> path_of("loss"), path_of("time/step_s"), path_of("loss", "white")
    ('train/loss', 'time/step_s', 'policies/white/train/loss')
    """
    path = SHORT.get(name, name)
    return f"policies/{policy}/{path}" if policy else path


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """Shares and rates that follow from the metrics of a step; only those whose parts are there.

    >>> derived({"train/tokens_sampled": 40.0, "time/update_s": 1.0, "time/step_s": 4.0})
    {'time/tokens_per_s': 10.0, 'time/update_share': 0.25}
    """
    found = {}
    for policy in sorted({policy_of(path) for path in metrics}):
        for path, part, whole in (
            ("train/trained_token_share", "train/tokens_trained", "train/tokens_sampled"),
            ("rollout/forked_share", "rollout/forked_calls", "rollout/calls"),
            ("time/tokens_per_s", "train/tokens_sampled", "time/step_s"),
        ):
            if policy + part in metrics and policy + whole in metrics:
                found[policy + path] = metrics[policy + part] / max(1e-9, metrics[policy + whole])
    if "time/step_s" in metrics:
        for path in sorted(metrics):
            if path.startswith("time/") and path.endswith("_s") and path != "time/step_s":
                found[f"{path.removesuffix('_s')}_share"] = metrics[path] / max(1e-9, metrics["time/step_s"])
    return found


def policy_of(path: str) -> str:
    """The beginning of the path that names the policy; "" where the run trains one.

    >>> policy_of("policies/white/policy/entropy"), policy_of("policy/entropy")
    ('policies/white/', '')
    """
    found = _POLICY.match(path)
    return found.group() if found else ""


def group_of(path: str) -> str:
    """The group of a metric, whichever policy it is about: "other" for one that is not in METRICS' groups."""
    group = path[len(policy_of(path)) :].partition("/")[0]
    return group if any(known.startswith(f"{group}/") for known in METRICS) else "other"


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths in the order of METRICS, others after those of their group; the same metric of several policies by alias."""
    places = {path: place for place, path in enumerate(METRICS)}
    last = {path.partition("/")[0]: place for path, place in places.items()}

    def place(path: str) -> int:
        own = path[len(policy_of(path)) :]
        return places.get(own, last.get(own.partition("/")[0], len(places)))

    return sorted(paths, key=lambda path: (place(path), path))


def numbers(row: JSON) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_NUMBERS and isinstance(value, int | float) and math.isfinite(value)
    }
