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
    "train/schedule_entry": "entry of algorithm.schedule that the step was trained by; 0: [algorithm] itself",
    "train/reward_std": "standard deviation of the reward over these rollouts",
    "rewards/NAME/mean": "mean of the reward of that name, where rollouts have several",
    "agents/NAME/reward_mean": "mean of the return of the agent of that name, with agent_reward_weights",
    "train/groups_with_signal": "share of groups whose rewards differ: the others have nothing to compare",
    "train/solved_groups": "share of groups in which every rollout has the step's highest reward",
    "train/unsolved_groups": "share of groups in which every rollout has the step's lowest reward",
    "train/zero_variance": "share of rollouts from which nothing could be learned",
    "train/loss": "loss, mean over the step's updates",
    "train/nll": "negative log-probability of the trained tokens, nats per token",
    "train/grad_norm": "norm of the gradient before clipping, mean over the updates",
    "train/learning_rate": "learning rate of the step",
    "train/updates": "optimizer updates of the step",
    "train/margin": "how much more the policy prefers the chosen completion than the reference does, times beta, in nats",
    "train/accuracy": "share of pairs with a margin above 0",
    "train/kl_baseline": "KTO's estimate of the divergence from the reference",
    "train/examples": "examples of the step",
    "train/epoch": "passes over the examples so far",
    "train/tokens_sampled": "sampled tokens of the usable rollouts",
    "train/tokens_trained": "those of them whose rollout has an advantage; KL and entropy terms may train the others, too",
    "train/trained_token_share": "train/tokens_trained / train/tokens_sampled",
    "train/sequences": "rows that the engine trained on",
    "eval/greedy/reward_mean": "mean reward over the held-out tasks, greedy",
    "eval/sampled/reward_mean": "the same at temperature 1",
    "eval/greedy/tasks": "held-out tasks that evaluation rests on",
    "eval/greedy/reward_stderr": "standard error of that mean; chance moves it by twice as much",
    "eval/sampled/tasks": "as eval/greedy/tasks, at temperature 1",
    "eval/sampled/reward_stderr": "as eval/greedy/reward_stderr, at temperature 1",
    "eval/greedy/share_above_min": "share of held-out tasks with more than the lowest reward among them",
    "eval/greedy/share_below_max": "share of held-out tasks with less than the highest reward among them",
    "eval/greedy/turns": "calls per rollout in that evaluation",
    "eval/greedy/failed": "rollouts of that evaluation that failed; each counts as reward 0",
    "eval/sampled/share_above_min": "as eval/greedy/share_above_min, at temperature 1",
    "eval/sampled/share_below_max": "as eval/greedy/share_below_max, at temperature 1",
    "eval/sampled/turns": "as eval/greedy/turns, at temperature 1",
    "eval/sampled/failed": "as eval/greedy/failed, at temperature 1",
    "eval/loss": "loss of the recorded examples that are held out",
    "eval/margin": "their margin",
    "eval/accuracy": "their accuracy",
    "prompts/best_mean": "best mean reward over all validation tasks of any candidate so far",
    "prompts/batch_mean": "mean reward of the batch's rollouts",
    "prompts/candidates": "candidates so far, the start among them",
    "prompts/rollouts": "rollouts so far",
    "prompts/tokens": "tokens so far, of agents and of the model that writes new texts",
    "prompts/best": "of a training step that searched: number of the candidate whose texts the agents get from then on",
    "policy/entropy": "entropy of the policy at the trained tokens, nats per token",
    "policy/kl": "divergence between sampler and policy during the updates (k3, nats per token)",
    "policy/sampler_gap": "policy/kl before the step's first update: the difference between sampler and learner themselves",
    "policy/ratio_max": "largest distance of any token's ratio from 1",
    "policy/clip_share": "share of tokens whose ratio was clipped",
    "policy/masked_share": "share of tokens that a mask left out",
    "policy/importance_weight": "mean importance weight",
    "policy/ref_kl": "divergence from the reference, nats per token",
    "policy/snapshot_step": "of an opponent with snapshot_of: step of the checkpoint that it samples",
    "critic/loss": "loss of the critic",
    "critic/grad_norm": "norm of the critic's gradient before clipping",
    "critic/value_mean": "mean of the critic's values",
    "critic/explained_variance": "share of the returns' variance that the critic explains",
    "rollout/count": "rollouts that the step consumed",
    "rollout/turns": "calls of the policy per rollout, without those that a fork replayed",
    "rollout/calls": "recorded calls of these rollouts",
    "rollout/forked_calls": "calls whose prompt could not continue the tokens of an earlier one",
    "rollout/forked_share": "rollout/forked_calls / rollout/calls",
    "rollout/compactions": "conversations that went on from the agent's own summary of another one; left out where none did",
    "rollout/failed": "rollouts whose attempts all failed",
    "rollout/refused_share": "share of rollouts that failed because the gateway refused their last model call",
    "rollout/invalid": "rollouts without a reward or a call of the policy",
    "rollout/broken_spans": "spans of these rollouts that were repaired or lost; by cause: rollout/broken_spans/CAUSE",
    "rollout/unrewarded": "rollouts dropped because a reward is missing or not finite",
    "rollout/filled": "rollouts whose reward was filled in",
    "rollout/staleness_mean": "training steps between sampling and learning, mean over the rollouts",
    "rollout/staleness_max": "the largest of them",
    "rollout/mixed_versions": "share of rollouts that were sampled by more than one version",
    "rollout/stale": "rollouts that were too old to learn from",
    "rollout/overprovisioned": "rollouts that were cancelled because the step had enough",
    "rollout/queued_s": "seconds that a rollout waited for a worker, mean over the step's rollouts",
    "rollout/duration_s": "seconds that its last attempt took, mean",
    "rollout/duration_max_s": "the longest of them",
    "rollout/model_s": "seconds of these with a call to the policy under way, mean",
    "rollout/between_calls_s": "seconds before and between these calls: tools and the agent's own code, mean",
    "rollout/after_calls_s": "seconds after the last call: the agent's end and its reward function, mean",
    "rollout/resampled_groups": "groups sampled in place of groups without a signal",
    "forks/count": "forks that credit = forked had sampled for the step",
    "forks/failed": "those of them whose attempts all failed",
    "forks/replay_ended_share": "share of them whose replay ended early, so that they are no evidence",
    "forks/advantage_variance": "sampling variance of a call's advantage, mean over the rollouts with forks",
    "tree/forks": "forks among the step's rollouts, with rollouts = tree",
    "tree/replay_ended_share": "share of them whose replay ended early, which are rollouts of their own from there on",
    "tree/shared_share": "share of the calls of the step's rollouts that were replayed: neither sampled nor trained again",
    "tree/replayed_tokens": "tokens of these calls' completions; not in cost/sampled_tokens",
    "judge/requests": "requests to the judge",
    "judge/cached": "replies that an earlier try of the step had stored",
    "judge/unusable": "groups for which the judge gave no usable answer",
    "judge/prompt_tokens": "tokens that the judge read",
    "judge/sampled_tokens": "tokens that the judge wrote",
    "workers/slots": "rollouts that the run's workers can run at a time; not known of workers that are started elsewhere",
    "workers/running_mean": "rollouts that ran at a time, mean over the step",
    "workers/busy_share": "workers/running_mean / workers/slots",
    "workers/queued_mean": "rollouts that waited for a worker at a time, mean over the step",
    "sampler/busy_share": "share of the step in which the sampler had a call of the policy",
    "sampler/calls_mean": "calls at a time while it had any",
    "sampler/slots": "calls that it samples at a time (engine.max_num_seqs); not known of samplers that are not the run's",
    "sampler/tokens_per_s": "tokens sampled per second while it had a call",
    "gateway/busy_share": "share of the step in which the gateway had a call, of a policy or an external model",
    "cost/agent_s": "seconds that the step's rollouts ran, added up: their last attempts",
    "cost/prompt_tokens": "tokens of the prompts of their calls to policies; what several prompts begin with counts in each",
    "cost/sampled_tokens": "tokens that policies sampled for them",
    "cost/learner_tokens": "tokens that the learner computed for updates: padding counts, what packing shares counts once",
    "cost/fork_agent_s": "seconds that the step's forks ran, with credit = forked; not in cost/agent_s",
    "cost/fork_sampled_tokens": "tokens that policies sampled for them; not in cost/sampled_tokens",
    "cost/external_tokens": "tokens of their calls to external models, as these reported them",
    "processes/hung": "processes that hung and were killed, since the trainer started; left out where none was",
    "time/tokens_per_s": "train/tokens_sampled / time/step_s",
    "time/step_s": "wall time of the step, without evaluations and checkpoints",
    "time/collect_s": "waiting for rollouts",
    "time/prepare_s": "reading the rollouts and planning the updates",
    "time/update_s": "updates",
    "time/publish_s": "publishing the new weights",
    "time/record_s": "storing the credit of the calls",
    "time/collect_share": "time/collect_s / time/step_s",
    "time/prepare_share": "time/prepare_s / time/step_s",
    "time/update_share": "time/update_s / time/step_s",
    "time/publish_share": "time/publish_s / time/step_s",
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
