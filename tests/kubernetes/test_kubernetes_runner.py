"""The suite of the Kubernetes runner: over a cluster in memory, and over Kubernetes' own API server, scheduler and
controllers with a node that tests play."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster_lab import DEADLINE_S, Lab, evicted, exited, running, unschedulable, until, waiting

import build
from agentlightning.config.agent import KubernetesJob
from agentlightning.errors import AgentError, ConfigError, InfrastructureError
from agentlightning.kubernetes.cluster import Cluster, ClusterError
from agentlightning.kubernetes.job import JobTemplate, Running, Waiting, attempt_of, job_name
from agentlightning.kubernetes.runner import KubernetesRunner
from agentlightning.records import JSON, Claim
from agentlightning.runner.agent import llm_for
from agentlightning.runner.command import MAX_RECORDED_BYTES, CommandFailed
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.runner.function import AgentOutput

SETTINGS = KubernetesJob(image="registry.example/agent:1", server="http://agl.example:8088")


def a_claim(rollout_id: str = "r1", run_id: str = "run", task: JSON | None = None) -> Claim:
    return build.claim(rollout_id, run_id=run_id, task=task or {"q": "1 + 1"})


class Ended:
    """What the server says of attempts: those told are over."""

    def __init__(self) -> None:
        self.rollouts: set[str] = set()

    async def __call__(self, attempts: Sequence[tuple[str, int]]) -> list[bool]:
        return [rollout in self.rollouts for rollout, _ in attempts]


def a_runner(
    lab: Lab, over: Ended | None = None, worker_id: str = "w", run_id: str = "run", **settings: object
) -> KubernetesRunner:
    """One that is not started."""
    template = JobTemplate(
        "python agent.py --fast",
        SETTINGS.model_copy(update={"pending_s": lab.pending_s, **settings}),
        run_id=run_id,
        worker_id=worker_id,
        server_url="http://127.0.0.1:9",
    )
    return KubernetesRunner(template, lab.workers, over=over or Ended(), resync_s=0.5)


@asynccontextmanager
async def started(runner: KubernetesRunner) -> AsyncIterator[KubernetesRunner]:
    runner.start()
    try:
        yield runner
    finally:
        await runner.close()


def attempt(runner: KubernetesRunner, claim: Claim) -> "asyncio.Task[AgentOutput]":
    return asyncio.create_task(runner.run(claim, llm_for(claim, "http://127.0.0.1:9", "policy", ConnectionPool())))


async def pod_of(lab: Lab, claim: Claim) -> JSON:
    """The pod of an attempt, once there is one, and what it needs."""
    found: list[JSON] = []

    async def there() -> bool:
        found[:] = await lab.cluster.list("Pod", {"job-name": job_name(claim)})
        return bool(found) and bool(await lab.cluster.list("Secret", {}))

    await until(there)
    return found[0]


async def jobs_of(lab: Lab) -> list[JSON]:
    return list(await lab.cluster.list("Job", {"app.kubernetes.io/name": "agl-agent"}))


async def ended(task: "asyncio.Task[AgentOutput]") -> AgentOutput:
    async with asyncio.timeout(DEADLINE_S):
        return await task


async def test_a_program_finds_its_environment_and_gives_its_reward(lab: Lab) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        pod = await pod_of(lab, claim)
        secret = await lab.cluster.read("Secret", job_name(claim))
        job = await lab.cluster.read("Job", job_name(claim))
        name = pod["metadata"]["name"]
        await lab.report(name, running())
        lab.prints(name, 'thinking\n{"reward": 0.75}\n')
        await lab.report(name, exited(0))
        done = await ended(work)
        gone = await jobs_of(lab)
    container = pod["spec"]["containers"][0]
    data = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert (done.reward, done.printed) == (0.75, 'thinking\n{"reward": 0.75}\n')
    assert container["command"] == ["python", "agent.py", "--fast"]
    assert data["OPENAI_BASE_URL"] == "http://agl.example:8088/r/r1/1/v1"
    assert data["OPENAI_API_KEY"] == "sk-agl-key"
    assert data["task.json"] == '{"q": "1 + 1"}'
    assert {each["name"] for each in container["env"]} >= {"OPENAI_API_KEY", "AGL_TASK", "AGL_REWARD_URL"}
    assert "sk-agl-key" not in str(pod) + str(job)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert gone == []


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (waiting("ImagePullBackOff", "Back-off pulling image"), "ImagePullBackOff: Back-off pulling image"),
        (waiting("CreateContainerConfigError", "secret not found"), "CreateContainerConfigError"),
        (unschedulable("0/1 nodes are available: 1 Insufficient cpu."), "Unschedulable: 0/1 nodes"),
        (evicted("The node was low on resource: memory."), "Evicted: The node was low on resource"),
    ],
)
async def test_what_the_cluster_cannot_run_is_lost_with_its_reason(lab: Lab, status: JSON, told: str) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        await lab.report((await pod_of(lab, claim))["metadata"]["name"], status)
        with pytest.raises(InfrastructureError, match=told):
            await ended(work)
        assert await jobs_of(lab) == []


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (exited(137, "OOMKilled"), r"exit code 137 \(OOMKilled\)"),
        (exited(128, "StartError", "exec: no such file"), r"exit code 128 \(StartError: exec: no such file\)"),
        (exited(3), "exit code 3; the end of its output:\nboom"),
    ],
)
async def test_a_program_that_fails_says_so_with_the_end_of_its_output(lab: Lab, status: JSON, told: str) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        lab.prints(name, "boom\n")
        await lab.report(name, status)
        with pytest.raises(CommandFailed, match=told):
            await ended(work)


async def test_a_quota_that_allows_no_pod_is_told(lab: Lab) -> None:
    await lab.limit_pods(0)
    async with started(a_runner(lab)) as runner:
        with pytest.raises(InfrastructureError, match="exceeded quota"):
            await ended(attempt(runner, a_claim()))


async def test_a_pod_that_waits_and_then_runs_is_not_lost(lab: Lab) -> None:
    claim = a_claim()
    async with started(a_runner(lab, pending_s=30.0)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        await lab.report(name, waiting("ErrImagePull", "registry away"))
        await lab.report(name, running())
        lab.prints(name, "1\n")
        await lab.report(name, exited(0))
        assert (await ended(work)).reward == 1


@pytest.mark.parametrize(("deleted", "told"), [("pod", "its pod"), ("job", "kubernetes: its")])
async def test_an_attempt_whose_pod_or_job_somebody_deletes_is_lost(lab: Lab, deleted: str, told: str) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        await lab.report(name, running())
        await until(lambda: _is_running(runner, claim))
        await (lab.remove(name) if deleted == "pod" else lab.cluster.delete_job(job_name(claim)))
        with pytest.raises(InfrastructureError, match=told):
            await ended(work)
        assert await jobs_of(lab) == []


async def _is_running(runner: KubernetesRunner, claim: Claim) -> bool:
    return runner.states.get(job_name(claim)) == Running()


async def test_a_cancelled_attempt_leaves_no_job_and_tells_what_it_printed(lab: Lab) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        lab.prints(name, "half way\n")
        await lab.report(name, running())
        await until(lambda: _is_running(runner, claim))
        work.cancel()
        with pytest.raises(CommandFailed, match="interrupted") as failure:
            await ended(work)
        assert failure.value.output == "half way\n"
        assert await jobs_of(lab) == []
    await until(lambda: _nothing(lab))


async def _nothing(lab: Lab) -> bool:
    return not await lab.cluster.list("Secret", {}) and not await lab.cluster.list("Pod", {})


async def test_the_end_of_much_output_is_kept(lab: Lab) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        lab.prints(name, ("x" * 99 + "\n") * 1_000_000 + "0.5\n")
        await lab.report(name, exited(0))
        done = await ended(work)
    assert done.reward == 0.5
    assert len(str(done.printed)) == MAX_RECORDED_BYTES


async def test_an_api_server_that_was_away_costs_no_attempt(lab: Lab) -> None:
    claim, later = a_claim(), a_claim("r2")
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        await lab.report(name, running())
        await lab.go_away()
        second = attempt(runner, later)
        await until(lambda: _waits(runner, later))
        await lab.come_back()
        lab.prints(name, "1\n")
        await lab.report(name, exited(0))
        assert (await ended(work)).reward == 1
        other = (await pod_of(lab, later))["metadata"]["name"]
        lab.prints(other, "0\n")
        await lab.report(other, exited(0))
        assert (await ended(second)).reward == 0


async def _waits(runner: KubernetesRunner, claim: Claim) -> bool:
    return isinstance(runner.states.get(job_name(claim)), Waiting)


async def test_a_worker_that_starts_again_goes_on_with_what_it_left(lab: Lab) -> None:
    claim = a_claim()
    whole = lab.workers
    lab.workers = cut = CutOff(whole)
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        pod = await pod_of(lab, claim)
        cut.cut = True
        work.cancel()
        with pytest.raises(CommandFailed):
            await ended(work)
    lab.workers = whole
    async with started(a_runner(lab)) as successor:
        left = await successor.left()
        assert [(each.lease, each.key) for each in left] == [(claim.lease, claim.key)]
        work = attempt(successor, claim)
        lab.prints(pod["metadata"]["name"], "1\n")
        await lab.report(pod["metadata"]["name"], exited(0))
        assert (await ended(work)).reward == 1
        assert (await a_runner(lab, worker_id="another").left()) == []


class CutOff:
    """A cluster as a worker sees it that is killed: from then on it can do nothing more."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise ClusterError("the worker was killed")
        return getattr(self._cluster, name)


async def test_a_job_whose_worker_was_killed_before_its_secret_is_not_taken_over(lab: Lab) -> None:
    claim = a_claim()
    async with started(a_runner(lab)) as runner:
        work = attempt(runner, claim)
        await pod_of(lab, claim)
        job = await lab.cluster.read("Job", job_name(claim))
        work.cancel()
        with contextlib.suppress(CommandFailed):
            await ended(work)
    metadata = {key: job["metadata"][key] for key in ("name", "labels", "annotations")}
    template = job["spec"]["template"]
    for label in ("controller-uid", "job-name"):
        template["metadata"]["labels"].pop(label, None)
    await until(lambda: _nothing(lab))
    await lab.cluster.create({**job, "metadata": metadata, "spec": {"template": template}, "status": {}})
    over = Ended()
    over.rollouts.add(claim.rollout.id)
    successor = a_runner(lab, over)
    assert await successor.left() == []
    await successor.sweep()
    assert await jobs_of(lab) == []


async def test_jobs_of_other_workers_stay_until_their_attempts_are_over(lab: Lab) -> None:
    over = Ended()
    claim = a_claim()
    async with started(a_runner(lab, over, "one")) as one:
        work = attempt(one, claim)
        await pod_of(lab, claim)
        other = a_runner(lab, over, "two")
        await other.sweep()
        assert [attempt_of(job) for job in await jobs_of(lab)] == [("r1", 1)]
        over.rollouts.add("r1")
        await other.sweep()
        assert await jobs_of(lab) == []
        with pytest.raises(InfrastructureError):
            await ended(work)


async def test_names_that_kubernetes_has_no_place_for_are_hashed(lab: Lab) -> None:
    claim = a_claim("Rollout/ümläut " * 9, "My Run_№ 1!")
    async with started(a_runner(lab, run_id="My Run_№ 1!", worker_id="HOST." * 30)) as runner:
        work = attempt(runner, claim)
        name = (await pod_of(lab, claim))["metadata"]["name"]
        assert attempt_of((await jobs_of(lab))[0]) == (claim.rollout.id, 1)
        lab.prints(name, "1\n")
        await lab.report(name, exited(0))
        assert (await ended(work)).reward == 1


async def test_a_task_that_no_secret_can_hold_fails_its_attempt(lab: Lab) -> None:
    async with started(a_runner(lab)) as runner:
        big = a_claim(task={"text": "x" * 2_000_000})
        with pytest.raises(AgentError, match="Secret is refused"):
            await ended(attempt(runner, big))
        assert await jobs_of(lab) == []


async def test_a_template_with_a_name_that_the_cluster_does_not_know_is_an_error(lab: Lab) -> None:
    await a_runner(lab, pod={"spec": {"nodeSelector": {"pool": "agents"}}}).check()
    with pytest.raises(ConfigError, match="nosuchsetting"):
        await a_runner(lab, pod={"spec": {"nosuchsetting": 1}}).check()


async def test_pods_that_could_not_reach_the_server_are_an_error(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.server"):
        a_runner(lab, server=None)
