"""The Job of an attempt and the Secret beside it, from the run's settings, and `state_of`, which reads an attempt's state
from its Job and pods. Pure: the same attempt gives the same objects, and a state is of what is there, not of what changed.

Driven by the Kubernetes runner. The Job tells what may be seen by whoever may see Jobs; the agent's environment, its key and
its task are in the Secret, which the Job owns and which ends with it.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentlightning.config.agent import AGENT_CONTAINER, KubernetesJob
from agentlightning.errors import ConfigError
from agentlightning.records import JSON, Claim, Lease
from agentlightning.runner.agent import LLM
from agentlightning.runner.command import LOOPBACK, command_environment, split_command

TASK_FOLDER = "/agl"
TASK_FILE = "task.json"
LEASE_FILE, KEY_FILE, JUDGE_KEY_FILE = "lease.json", "key.txt", "judge-key.txt"
"""Entries of the Secret that no pod is given: what a worker that starts again needs to go on with the attempt."""
OVERTIME_S = 60
"""A Job ends by itself so long after its attempt's time: where no worker is there to end it."""
KEPT_S = 300
"""A Job that ended is deleted by the cluster after so long: where no worker is there to delete it."""
TERM_S = 2
"""Time of a program that is told to end."""
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
RUN, WORKER, ROLLOUT, ATTEMPT = (f"agentlightning/{name}" for name in ("run", "worker", "rollout", "attempt"))


def job_name(claim: Claim) -> str:
    """The name of an attempt's objects: whoever creates them twice finds the first ones."""
    named = hashlib.sha256(f"{claim.rollout.run_id}/{claim.rollout.id}".encode()).hexdigest()
    return f"agl-{named[:24]}-{claim.lease.attempt}"


def label_value(text: str) -> str:
    """The text where Kubernetes takes it for a label's value, else a hash of it."""
    return text if LABEL.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:40]


def run_labels(run_id: str) -> dict[str, str]:
    """Labels of all objects of a run."""
    return {"app.kubernetes.io/name": "agl-agent", RUN: label_value(run_id)}


def worker_labels(run_id: str, worker_id: str) -> dict[str, str]:
    """Labels of all objects of a worker."""
    return run_labels(run_id) | {WORKER: label_value(worker_id)}


def attempt_of(job: JSON) -> tuple[str, int]:
    """The id of a Job's rollout and the number of its attempt."""
    notes = job["metadata"]["annotations"]
    return notes[ROLLOUT], int(notes[ATTEMPT])


class JobTemplate:
    """Makes the Jobs of a worker's attempts, as the run's settings want them.

    ConfigError where the command is empty, or pods could not reach the server. server_url: of the worker, for pods that
    are told no other.
    """

    def __init__(self, command: str, settings: KubernetesJob, *, run_id: str, worker_id: str, server_url: str) -> None:
        self._arguments = split_command(command, "agent command", found=False)
        if settings.server is None and urlsplit(server_url).hostname in LOOPBACK:
            raise ConfigError(
                f"sandbox.server: pods cannot reach {server_url}, which is this machine's own; expected a URL of the "
                "server that they can"
            )
        self.settings = settings
        self.run_id = run_id
        self.worker_id = worker_id

    def environment(self, claim: Claim, llm: LLM) -> dict[str, str]:
        """The variables of an attempt's program, with the model as pods reach it."""
        if self.settings.server is not None:
            outer = llm.anthropic_base_url
            root = f"{self.settings.server.rstrip('/')}{outer[outer.index('/r/') :]}"
            llm = dataclasses.replace(llm, base_url=f"{root}/v1", anthropic_base_url=root)
        return command_environment({}, claim, llm, Path(TASK_FOLDER) / TASK_FILE)

    def manifest(self, claim: Claim, names: Sequence[str]) -> JSON:
        """The Job. names: of the variables that its Secret holds."""
        name = job_name(claim)
        labels = worker_labels(claim.rollout.run_id, self.worker_id)
        labels |= {"app.kubernetes.io/part-of": "agentlightning"}
        notes = {ROLLOUT: claim.rollout.id, ATTEMPT: str(claim.lease.attempt), WORKER: self.worker_id}
        template: dict[str, Any] = copy.deepcopy(self.settings.pod)
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        spec = template.setdefault("spec", {})
        spec["restartPolicy"] = "Never"
        for setting, value in _defaults().items():
            spec.setdefault(setting, value)
        containers: list[dict[str, Any]] = spec.setdefault("containers", [])
        agent = next((each for each in containers if each.get("name") == AGENT_CONTAINER), None)
        if agent is None:
            agent = {"name": AGENT_CONTAINER}
            containers.insert(0, agent)
        agent |= {"image": self.settings.image, "command": list(self._arguments)}
        agent.setdefault("securityContext", {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}})
        others = [each for each in agent.get("env", []) if each.get("name") not in names]
        agent["env"] = others + [
            {"name": each, "valueFrom": {"secretKeyRef": {"name": name, "key": each}}} for each in names
        ]
        mounted = {"name": "agl-task", "mountPath": TASK_FOLDER, "readOnly": True}
        agent["volumeMounts"] = [*agent.get("volumeMounts", []), mounted]
        task = {"secretName": name, "items": [{"key": TASK_FILE, "path": TASK_FILE}]}
        spec["volumes"] = [*spec.get("volumes", []), {"name": "agl-task", "secret": task}]
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels, "annotations": notes},
            "spec": {
                "backoffLimit": 0,
                "activeDeadlineSeconds": math.ceil(claim.rollout.retry.timeout_s) + OVERTIME_S,
                "ttlSecondsAfterFinished": KEPT_S,
                "template": template,
            },
        }


def secret_manifest(claim: Claim, job: JSON, environment: Mapping[str, str]) -> JSON:
    """The Secret of a Job that there is."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    lease = {"rollout_id": claim.lease.rollout_id, "attempt": claim.lease.attempt, "token": claim.lease.token}
    texts = dict(environment) | {
        TASK_FILE: json.dumps(claim.rollout.task),
        LEASE_FILE: json.dumps(lease),
        KEY_FILE: claim.key,
        JUDGE_KEY_FILE: claim.judge_key,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": metadata["name"], "labels": metadata["labels"], "ownerReferences": [owner]},
        "type": "Opaque",
        "data": {name: _base64(text) for name, text in texts.items()},
    }


def lease_in(secret: JSON) -> tuple[Lease, str, str]:
    """The lease of a Secret's attempt, its key and that of its judge."""
    data = secret["data"]
    return Lease(**json.loads(_text(data[LEASE_FILE]))), _text(data[KEY_FILE]), _text(data[JUDGE_KEY_FILE])


def dropped(manifest: object, answer: object, path: str = "") -> list[str]:
    """Paths of what stands in a manifest and not in the API server's answer to it: names that it does not know."""
    if isinstance(manifest, dict):
        found = answer if isinstance(answer, dict) else {}
        return [
            missing
            for name, value in manifest.items()
            for missing in (
                [f"{path}.{name}".lstrip(".")] if name not in found else dropped(value, found[name], f"{path}.{name}")
            )
            if value not in (None, False, 0, "", [], {})
        ]
    if isinstance(manifest, list) and isinstance(answer, list):
        pairs = zip(manifest, answer, strict=False)
        return [missing for at, (one, other) in enumerate(pairs) for missing in dropped(one, other, f"{path}[{at}]")]
    return []


def _defaults() -> dict[str, Any]:
    """Settings of a pod where its template has none: an agent is nobody in the cluster, as in every sandbox."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERM_S,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    }


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


STARTING = ("", "ContainerCreating", "PodInitializing")
"""Reasons for which a container waits while nothing is wrong: an image may be large."""
OWN_ENDS = ("DeadlineExceeded", "OOMKilled")
"""Reasons of a pod's end for which its agent is to blame."""


@dataclass(frozen=True, slots=True)
class Running:
    """Its program runs, or nothing keeps it from starting."""

    where: str = ""
    """The thing that it waits for; empty where it runs."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something keeps it from starting, which may pass."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """Its program ended."""

    pod: str
    code: int
    why: str = ""
    """Reason that Kubernetes gives, beside the exit code, with its message: that of a program that is not there has one."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The cluster ended it, not its program."""

    reason: str


State = Running | Waiting | Exited | Lost


def state_of(job: JSON | None, pods: Sequence[JSON], first_pod: str | None) -> State:
    """The state of an attempt. job: None where it is gone; first_pod: the uid of the pod that was seen first."""
    own = [pod for pod in pods if first_pod in (None, pod["metadata"]["uid"])]
    if not own and first_pod is not None:
        return Lost("its pod is gone" if not pods else "its pod was replaced by another")
    for pod in own:
        return _of_pod(pod)
    if job is None:
        return Lost("its Job was deleted by somebody else")
    failed = _condition(job, "Failed")
    if failed is not None:
        return Lost(f"its Job failed without a pod: {_sentence(failed)}")
    return Waiting("its Job has no pod yet")


def _of_pod(pod: JSON) -> State:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    container: JSON = next(
        (each for each in status.get("containerStatuses", []) if each["name"] == AGENT_CONTAINER), {}
    )
    state = container.get("state", {})
    terminated = state.get("terminated")
    disrupted = _condition(pod, "DisruptionTarget")
    reason = status.get("reason", "")
    if disrupted is not None or (status.get("phase") == "Failed" and reason and reason not in OWN_ENDS):
        return Lost(f"its pod was ended by the cluster: {_sentence(disrupted or status)}")
    if terminated is not None:
        why = "" if terminated.get("reason", "") in ("", "Error", "Completed") else _sentence(terminated)
        return Exited(name, int(terminated.get("exitCode", 1)), why)
    if status.get("phase") in ("Failed", "Succeeded"):
        if reason in OWN_ENDS:
            return Exited(name, 137, reason)
        return Lost(f"its pod ended without a word of its program: {_sentence(status)}")
    if "deletionTimestamp" in pod["metadata"]:
        return Lost("its pod is being deleted by somebody else")
    if "running" in state:
        return Running()
    return _before_start(status, state.get("waiting", {}))


def _before_start(status: JSON, waiting: JSON) -> State:
    starting = [waiting]
    starting += [each.get("state", {}).get("waiting", {}) for each in status.get("initContainerStatuses", [])]
    for each in starting:
        if each.get("reason", "") not in STARTING:
            return Waiting(_sentence(each))
    unplaced: JSON = next((each for each in status.get("conditions", []) if each["type"] == "PodScheduled"), {})
    if unplaced.get("status") == "False":
        return Waiting(_sentence(unplaced))
    return Running(waiting.get("reason", "") or "its pod is being started")


def _condition(found: JSON, kind: str) -> JSON | None:
    conditions = found.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind and each["status"] == "True"), None)


def _sentence(found: JSON) -> str:
    return (
        ": ".join(filter(None, (str(found.get("reason") or ""), str(found.get("message") or "")))) or "no reason given"
    )
