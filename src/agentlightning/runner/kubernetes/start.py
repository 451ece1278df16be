"""start_kubernetes_runner: the runner of a worker whose run asks for Jobs, ready for its first attempt.

Driven by the worker process. The one place here that knows the store: what a cluster tells of attempts is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.config.base import parse_settings
from agentlightning.config.kubernetes import KubernetesConfig
from agentlightning.records import Claim
from agentlightning.runner.kubernetes.job import JobTemplate
from agentlightning.runner.kubernetes.lightkube_cluster import LightkubeCluster
from agentlightning.runner.kubernetes.runner import KubernetesRunner, Over
from agentlightning.store.base import LightningStore, RolloutQuery


def kubernetes_of_run(config: Mapping[str, Any]) -> KubernetesConfig | None:
    """The Jobs that a run's configuration in the store asks for, so that workers anywhere do alike."""
    table = config.get("kubernetes")
    return parse_settings(KubernetesConfig, table, "kubernetes", ".") if isinstance(table, dict) else None


async def start_kubernetes_runner(
    command: str,
    settings: KubernetesConfig,
    store: LightningStore,
    *,
    run_id: str,
    worker_id: str,
    server_url: str,
    scored: bool,
) -> KubernetesRunner:
    """The runner, which follows the cluster from now on. ConfigError where the cluster would refuse its Jobs."""
    template = JobTemplate(command, settings, run_id=run_id, worker_id=worker_id, server_url=server_url)
    runner = KubernetesRunner(template, LightkubeCluster(settings.namespace), over=over_by(store), scored=scored)
    await runner.check()
    runner.start()
    return runner


async def left_claims(runner: KubernetesRunner, store: LightningStore) -> list[tuple[Claim, float]]:
    """The attempts that this worker's predecessor left running, with the seconds since they began."""
    left = await runner.left()
    if not left:
        return []
    rollouts = await store.rollouts(RolloutQuery(ids=[each.lease.rollout_id for each in left]))
    by_id = {rollout.id: rollout for rollout in rollouts}
    return [
        (Claim(rollout=rollout, lease=each.lease, key=each.key), each.age_s)
        for each in left
        if (rollout := by_id.get(each.lease.rollout_id)) is not None
    ]


def over_by(store: LightningStore) -> Over:
    """Asks the store which attempts are over."""

    async def over(attempts: Sequence[tuple[str, int]]) -> list[bool]:
        rollouts = await store.rollouts(RolloutQuery(ids=sorted({rollout for rollout, _ in attempts})))
        running = {(rollout.id, rollout.attempt) for rollout in rollouts if rollout.state == "running"}
        return [attempt not in running for attempt in attempts]

    return over
