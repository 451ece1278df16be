"""state_of: what the objects of an attempt say about it. Pure; it looks at what is there, not at what changed.

Driven by the Kubernetes runner with what it last saw of a Job and of its pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.config.agent import AGENT_CONTAINER
from agentlightning.records import JSON

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
