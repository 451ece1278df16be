"""Worker processes that are killed while their Jobs run, with a server and Kubernetes' own API server."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from cluster_lab import exited, running, until
from real_cluster import NAMESPACE, RealLab

from agentlightning.kubernetes.job import attempt_of
from agentlightning.records import JSON, NewRollout, Rollout
from agentlightning.runtime.children import listen, secrets_line, stop_child
from agentlightning.store.base import RolloutQuery
from agentlightning.store.client import LightningStoreClient

pytestmark = pytest.mark.parametrize(
    "lab", [pytest.param("real", marks=[pytest.mark.slow, pytest.mark.long])], indirect=True
)

KEY = "key-of-the-tests"


@dataclass
class Site:
    """A run on a server, with one rollout, and its cluster."""

    lab: RealLab
    url: str
    store: LightningStoreClient
    rollout: Rollout

    @contextmanager
    def worker(self, worker_id: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker process, killed at the end if not before."""
        run = ("--server", self.url, "--run", self.rollout.run_id, "--worker-id", worker_id)
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning.runner", *run, "--command", "python agent.py", *options],
            env={**os.environ, "AGL_SERVER_KEY": KEY, "KUBECONFIG": str(self.lab.worker_kubeconfig)},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def attempts(self) -> list[int]:
        """Numbers of the attempts that have Jobs."""
        jobs = await self.lab.cluster.list("Job", {"app.kubernetes.io/name": "agl-agent"})
        return sorted(attempt_of(job)[1] for job in jobs)

    async def pod(self, attempt: int) -> str:
        """The pod of an attempt, once it and its Secret are there."""
        found: list[str] = []

        async def there() -> bool:
            for job in await self.lab.cluster.list("Job", {"app.kubernetes.io/name": "agl-agent"}):
                name = job["metadata"]["name"]
                if attempt_of(job)[1] == attempt:
                    pods: list[JSON] = list(await self.lab.cluster.list("Pod", {"job-name": name}))
                    found[:] = [pod["metadata"]["name"] for pod in pods]
                    secrets = await self.lab.cluster.list("Secret", {})
                    return bool(found) and name in {each["metadata"]["name"] for each in secrets}
            return False

        await until(there)
        return found[0]

    async def state(self) -> Rollout:
        [rollout] = await self.store.rollouts(RolloutQuery(ids=[self.rollout.id]))
        return rollout

    async def succeeded(self) -> bool:
        return (await self.state()).state == "succeeded"


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a server process."""
    listener = listen("127.0.0.1", 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "agentlightning.gateway", "--store", "memory://", "--fd", str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    os.write(process.stdin.fileno(), secrets_line({"AGL_SERVER_KEY": KEY}))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop_child(process)
    listener.close()


@pytest.fixture
async def site(lab: RealLab, server: str) -> AsyncIterator[Site]:
    table = {
        "type": "kubernetes",
        "image": "registry.example/agent:1",
        "namespace": NAMESPACE,
        "server": "http://agl.example:8088",
    }
    async with LightningStoreClient(server, KEY) as store:
        run = await store.create_run("killed", {"sandbox": table})
        [rollout] = await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
        yield Site(lab, server, store, rollout)


async def test_a_worker_process_goes_on_with_the_job_of_one_that_was_killed(site: Site) -> None:
    with site.worker("one") as first:
        pod = await site.pod(attempt=1)
        await site.lab.report(pod, running())
        first.send_signal(signal.SIGKILL)
        first.wait()
    site.lab.prints(pod, "0.5\n")
    await site.lab.report(pod, exited(0))  # while no worker is there
    with site.worker("one"):
        await until(site.succeeded)
        done = await site.state()
        assert (done.attempt, done.lost) == (1, 0)
        await until(lambda: _no_jobs(site))


async def test_the_job_of_a_killed_worker_is_deleted_by_another_once_its_lease_is_over(site: Site) -> None:
    with site.worker("one", "--lease-s", "3", "--heartbeat-s", "0.3") as first:
        await site.lab.report(await site.pod(attempt=1), running())
        first.send_signal(signal.SIGKILL)
        first.wait()
    with site.worker("two"):
        pod = await site.pod(attempt=2)
        await site.lab.report(pod, running())
        await until(lambda: _only_second(site))
        site.lab.prints(pod, "1\n")
        await site.lab.report(pod, exited(0))
        await until(site.succeeded)
        done = await site.state()
        assert (done.attempt, done.lost) == (2, 1)
        await until(lambda: _no_jobs(site))


async def _no_jobs(site: Site) -> bool:
    return await site.attempts() == []


async def _only_second(site: Site) -> bool:
    return await site.attempts() == [2]
