"""The runner whose attempts are Jobs of a Kubernetes cluster: an image and a command, a pod for each attempt.

Driven by the worker like the command runner, with the same environment, reward and exit codes for the program. What it
wants are its attempts; what is there are Jobs by label; it compares the two whenever something is seen to have changed, so
that neither a restart of the API server nor one of the worker loses an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from agentlightning.config.agent import AGENT_CONTAINER, KubernetesJob
from agentlightning.errors import AgentError, ConfigError, InfrastructureError
from agentlightning.kubernetes.cluster import RESYNC_S, Cluster, ClusterError, FollowedObjects
from agentlightning.kubernetes.job import (
    Exited,
    JobTemplate,
    Lost,
    Running,
    State,
    Waiting,
    attempt_of,
    dropped,
    job_name,
    lease_in,
    run_labels,
    secret_manifest,
    state_of,
    worker_labels,
)
from agentlightning.kubernetes.lightkube_cluster import LightkubeCluster
from agentlightning.records import JSON, Claim, Lease, NewRollout
from agentlightning.runner.agent import LLM
from agentlightning.runner.command import (
    MAX_RECORDED_BYTES,
    CommandFailed,
    printed_reward,
)
from agentlightning.runner.function import AgentOutput
from agentlightning.runner.sandboxes import CommandAgent, StartedRunner
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.codec import new_rollout

log = logging.getLogger(__name__)

LOG_LINES = 1000
"""Last lines of what a program printed, at most, among which its reward is looked for."""
LAST_WORDS_S = 1.5
"""Time for each of the two things that an interrupted attempt still needs of the API server."""
LOG_S = 20.0
"""Time for reading what a program printed: a kubelet may be away for a moment."""

Over = Callable[[Sequence[tuple[str, int]]], Awaitable[Sequence[bool]]]
"""Returns which attempts, as (rollout, number), the server holds for ended."""


@dataclasses.dataclass(eq=False, slots=True)
class _Place:
    """An attempt that is wanted."""

    name: str
    changed: asyncio.Event
    """Something of it may have changed in the cluster."""
    created: float = float("inf")
    """time.monotonic() of its Job's creation, once that is known."""
    seen: bool = False
    """Its Job was among those followed."""
    pod: str | None = None
    """The uid of its pod."""
    pod_name: str | None = None
    state: State = dataclasses.field(default_factory=Running)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftAttempt:
    """An attempt that this worker's predecessor began."""

    lease: Lease
    key: str
    judge_key: str
    age_s: float


async def start_runner(agent: CommandAgent, store: LightningStore) -> StartedRunner:
    """The runner, which follows the cluster from now on. ConfigError where the cluster would refuse its Jobs."""
    assert isinstance(agent.sandbox, KubernetesJob)
    template = JobTemplate(
        agent.command, agent.sandbox, run_id=agent.run_id, worker_id=agent.worker_id, server_url=agent.server_url
    )
    cluster = LightkubeCluster(agent.sandbox.namespace)
    runner = KubernetesRunner(template, cluster, over=_over_by(store), scored=agent.scored)
    await runner.check()
    runner.start()
    return StartedRunner(runner=runner, left=await _left_claims(runner, store))


def check(agent: CommandAgent) -> str:
    """Describes it; a worker asks the API server, with the rights that it has there."""
    return "sandbox: kubernetes, a pod for each attempt"


class KubernetesRunner:
    """Runs a command line in the pod of a Job. `start` it before the first attempt, `check` says whether it can.

    over: asked before a Job that nobody here wants is deleted: another worker may.
    """

    def __init__(
        self,
        template: JobTemplate,
        cluster: Cluster,
        *,
        over: Over,
        scored: bool = False,
        resync_s: float = RESYNC_S,
    ) -> None:
        self._template = template
        self._cluster = cluster
        self._over = over
        self._scored = scored
        self._resync_s = resync_s
        self._places: dict[str, _Place] = {}
        labels = worker_labels(template.run_id, template.worker_id)
        self._jobs = FollowedObjects(cluster, "Job", labels, self._look, resync_s)
        self._pods = FollowedObjects(cluster, "Pod", labels, self._look, resync_s)
        self._background = BackgroundTasks()
        self._tasks: list[asyncio.Task[None]] = []

    async def check(self) -> None:
        """ConfigError where the cluster would refuse Jobs as the settings want them, or knows not all that they say."""
        job = self._template.manifest(_trial(self._template.run_id), ["OPENAI_API_KEY"])
        try:
            answer = await self._cluster.create(job, dry_run=True)
            for kind in ("Job", "Pod"):
                await self._cluster.list(kind, run_labels(self._template.run_id))
        except ClusterError as cause:
            raise ConfigError(f"kubernetes: an attempt's Job cannot be created: {cause}") from cause
        if unknown := dropped(job["spec"]["template"], answer["spec"]["template"]):
            raise ConfigError(f"sandbox.pod: {unknown[0]}: the cluster knows no such setting")

    async def left(self) -> list[LeftAttempt]:
        """The attempts that a worker of this id began and did not end. Waits for the API server, as long as it takes."""
        backoff = Backoff()
        while True:
            try:
                jobs = await self._cluster.list("Job", worker_labels(self._template.run_id, self._template.worker_id))
                found = [await self._left(job) for job in jobs]
                return [each for each in found if each is not None]
            except ClusterError as error:
                log.warning("Jobs of this worker cannot be read: %s", error)
                await backoff.sleep()

    def start(self) -> None:
        """Follow Jobs and pods, and delete Jobs whose attempts are over, until `close`."""
        loops = {"jobs": self._jobs.run, "pods": self._pods.run, "left jobs": self._sweep_for_ever}
        self._tasks = [self._background.start(name, loop) for name, loop in loops.items()]

    async def close(self) -> None:
        """Stop following; Jobs stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def states(self) -> dict[str, State]:
        """States of the attempts as last seen, by the name of its Job."""
        return {name: place.state for name, place in self._places.items()}

    async def run(self, claim: Claim, llm: LLM) -> AgentOutput:
        """Run the attempt's Job, which may be there already, to its end, and delete it.

        CommandFailed where the program failed or was interrupted; InfrastructureError where the cluster could not run it.
        """
        place = _Place(job_name(claim), asyncio.Event())
        self._places[place.name] = place
        try:
            await self._create(claim, llm, place)
            exited = await self._exited(place)
            output = await self._printed(exited)
        except asyncio.CancelledError as cause:
            waits = place.state.where if isinstance(place.state, Running) else getattr(place.state, "reason", "")
            where = f"; it had not started: {waits}" if waits else ""
            raise CommandFailed(f"the program was interrupted{where}", await self._last_words(place)) from cause
        finally:
            try:
                await self._delete(place.name)
            finally:
                del self._places[place.name]
        return self._output(exited, output)

    # --- what an attempt goes through --------------------------------------------------------------------------------

    async def _create(self, claim: Claim, llm: LLM, place: _Place) -> None:
        environment = self._template.environment(claim, llm)
        manifest = self._template.manifest(claim, sorted(environment))
        job = await self._created(manifest, place)
        place.created = time.monotonic()
        # After it, so that it owns the Secret: whoever is killed in between leaves a pod that cannot start, and no key.
        await self._created(secret_manifest(claim, job, environment), place)

    async def _created(self, manifest: JSON, place: _Place) -> JSON:
        """The object, created now or before. Waits for an API server that is away, and a while for one that refuses."""
        backoff = Backoff()
        refused: float | None = None
        while True:
            try:
                return await self._cluster.create(manifest)
            except ClusterError as error:
                try:
                    if error.status == 409:
                        return await self._cluster.read(manifest["kind"], manifest["metadata"]["name"])
                except ClusterError as gone:
                    error = gone
                if error.status in (400, 413, 422):
                    raise AgentError(f"kubernetes: the attempt's {manifest['kind']} is refused: {error}") from error
                now = time.monotonic()
                place.state = Waiting(str(error))
                if error.status in (401, 403, 404):  # a quota refuses with 403, too
                    refused = now if refused is None else refused
                    if now - refused >= self._template.settings.pending_s:
                        raise InfrastructureError(f"kubernetes: {error}") from error
            await backoff.sleep()

    async def _exited(self, place: _Place) -> Exited:
        """The end of its program. InfrastructureError where there is none."""
        waiting_since: float | None = None
        while True:
            place.changed.clear()
            place.state = state = self._state(place)
            pause: float | None = None
            match state:
                case Exited():
                    return state
                case Lost():
                    raise InfrastructureError(f"kubernetes: {state.reason}")
                case Waiting() if self._jobs.live and self._pods.live:
                    waiting_since = time.monotonic() if waiting_since is None else waiting_since
                    pause = waiting_since + self._template.settings.pending_s - time.monotonic()
                    if pause <= 0:
                        why = await self._refusal(place) if place.pod is None else state.reason
                        raise InfrastructureError(
                            f"kubernetes: it waited for {self._template.settings.pending_s:g} s: {why}"
                        )
                case Running():
                    waiting_since = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await place.changed.wait()

    def _state(self, place: _Place) -> State:
        job = self._jobs.objects.get(place.name)
        place.seen = place.seen or job is not None
        if job is None and not place.seen and self._jobs.listed <= place.created:
            return Running("its Job was just created")
        pods = [pod for pod in self._pods.objects.values() if pod["metadata"]["labels"].get("job-name") == place.name]
        if pods and place.pod is None:
            place.pod, place.pod_name = pods[0]["metadata"]["uid"], pods[0]["metadata"]["name"]
        return state_of(job, pods, place.pod)

    async def _refusal(self, place: _Place) -> str:
        """The reason for which a Job has no pod, as the controller that makes them tells."""
        fields = {"involvedObject.kind": "Job", "involvedObject.name": place.name}
        try:
            events = await self._cluster.list("Event", {}, fields)
        except ClusterError as error:
            return f"its Job has no pod, and why cannot be read: {error}"
        told = [each.get("message") or "" for each in events if each.get("type") == "Warning"]
        return f"its Job has no pod: {told[-1] if told else 'no reason given'}"

    async def _printed(self, exited: Exited) -> str:
        backoff = Backoff(timeout_s=LOG_S)
        while True:
            try:
                return await self._log(exited.pod)
            except ClusterError as error:
                if not await backoff.sleep():
                    if exited.code != 0:
                        return f"(its output could not be read: {error})"
                    raise InfrastructureError(
                        f"kubernetes: what the program printed cannot be read: {error}"
                    ) from error

    async def _log(self, pod: str) -> str:
        return await self._cluster.log(pod, AGENT_CONTAINER, LOG_LINES)

    def _output(self, exited: Exited, printed: str) -> AgentOutput:
        recorded = printed.encode()[-MAX_RECORDED_BYTES:].decode(errors="replace")
        if exited.code != 0 or exited.why:
            why = f" ({exited.why})" if exited.why else ""
            raise CommandFailed(
                f"program ended with exit code {exited.code}{why}; the end of its output:\n{recorded}",
                recorded,
                0 if exited.why else exited.code,
            )
        reward, feedback = printed_reward(printed, bare_numbers=not self._scored)
        return AgentOutput(output=recorded, reward=reward, reward_source="output", feedback=feedback, printed=recorded)

    async def _last_words(self, place: _Place) -> str:
        if place.pod_name is not None:
            with contextlib.suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    return (await self._log(place.pod_name)).encode()[-MAX_RECORDED_BYTES:].decode(errors="replace")
        return ""

    async def _delete(self, name: str) -> None:
        """Delete a Job; where that fails now, it is tried again while others are looked for, and in the end it expires."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._cluster.delete_job(name)
        except (ClusterError, TimeoutError) as error:
            if getattr(error, "status", None) != 404:
                log.warning("Job %s is not deleted yet: %s", name, str(error) or "no answer")

    def _look(self) -> None:
        for place in self._places.values():
            place.changed.set()

    # --- Jobs that nobody here wants -----------------------------------------------------------------------------------

    async def _left(self, job: JSON) -> LeftAttempt | None:
        try:
            lease, key, judge_key = lease_in(await self._cluster.read("Secret", job["metadata"]["name"]))
        except ClusterError as error:
            if error.status == 404:  # its predecessor was killed before it could create it
                return None
            raise
        created = datetime.fromisoformat(job["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        age_s = (datetime.now(UTC) - created).total_seconds()
        return LeftAttempt(lease=lease, key=key, judge_key=judge_key, age_s=max(0.0, age_s))

    async def _sweep_for_ever(self) -> None:
        while True:
            with contextlib.suppress(ClusterError):  # an API server that is away is told of by those who follow
                await self.sweep()
            await asyncio.sleep(self._resync_s)

    async def sweep(self) -> None:
        """Delete the run's Jobs, whichever worker made them, whose attempts are over. ClusterError, StoreError."""
        jobs = await self._cluster.list("Job", run_labels(self._template.run_id))
        unwanted = [job for job in jobs if job["metadata"]["name"] not in self._places]
        if not unwanted:
            return
        for job, over in zip(unwanted, await self._over([attempt_of(job) for job in unwanted]), strict=True):
            if over:
                await self._delete(job["metadata"]["name"])


def _trial(run_id: str) -> Claim:
    """The claim of an attempt that there is not."""
    rollout = new_rollout(NewRollout(run_id=run_id, task={}, group_id="check"), "check", now_ns=0)
    return Claim(rollout=rollout, lease=Lease(rollout_id="check", attempt=1, token=""), key="")


async def _left_claims(runner: KubernetesRunner, store: LightningStore) -> list[tuple[Claim, float]]:
    """The attempts that this worker's predecessor left running, with the seconds since they began."""
    left = await runner.left()
    if not left:
        return []
    rollouts = await store.rollouts(RolloutQuery(ids=[each.lease.rollout_id for each in left]))
    by_id = {rollout.id: rollout for rollout in rollouts}
    return [
        (Claim(rollout=rollout, lease=each.lease, key=each.key, judge_key=each.judge_key), each.age_s)
        for each in left
        if (rollout := by_id.get(each.lease.rollout_id)) is not None
    ]


def _over_by(store: LightningStore) -> Over:
    """Asks the store which attempts are over."""

    async def over(attempts: Sequence[tuple[str, int]]) -> list[bool]:
        rollouts = await store.rollouts(RolloutQuery(ids=sorted({rollout for rollout, _ in attempts})))
        running = {(rollout.id, rollout.attempt) for rollout in rollouts if rollout.state == "running"}
        return [attempt not in running for attempt in attempts]

    return over
