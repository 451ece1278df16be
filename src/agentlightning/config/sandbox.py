"""Settings of the table ``[sandbox]``: what a command agent's attempts run in. What they mean is the affair of `sandbox/`
and `kubernetes/`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agentlightning.config.base import BaseUrl, Table, Tagged, matching, parse_settings

AGENT_CONTAINER = "agent"
"""The container of a pod that the agent runs in; others may stand beside it."""

ImageName = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", "the name of a container image")]


class NoSandbox(Table):
    """An agent runs as its worker does."""

    type: Literal["none"] = "none"


class Bubblewrap(Table):
    """Namespaces of Linux (bwrap)."""

    type: Literal["bubblewrap"] = "bubblewrap"
    readable: tuple[str, ...] = (".",)
    """Files and folders that the agent may read beside the system's, at the path that they have here. Relative ones begin
    in the worker's folder. Those of runs and of an SQLite store are left out of them."""
    memory_mb: int = Field(2048, ge=32)
    """Memory of an attempt's processes together, at most; half of it for its own /tmp, which is in memory."""


class Container(Table):
    """A container by Podman, else by Docker."""

    type: Literal["container"] = "container"
    image: ImageName
    """Image with the agent's program and python3."""
    readable: tuple[str, ...] = (".",)
    memory_mb: int = Field(2048, ge=32)


class KubernetesJob(Table):
    """A Job of a cluster, with one pod."""

    type: Literal["kubernetes"] = "kubernetes"
    image: ImageName
    """Image with the agent's program."""
    namespace: str | None = None
    """Namespace of the Jobs; None: that of the worker's pod, or of its kubeconfig's context."""
    server: BaseUrl | None = None
    """URL of the server as pods reach it; None: that of the worker."""
    pending_s: float = Field(20.0, gt=0)
    """Seconds for which a pod may wait for a reason that Kubernetes names: no node, no quota, no image. Then its attempt
    is lost, with the reason. A cluster that adds nodes as they are needed wants more."""
    pod: dict[str, Any] = Field({})
    """Template of the pods as Kubernetes has it, ``metadata`` and ``spec``; its container named ``agent`` is the agent's."""

    @field_validator("pod")
    @classmethod
    def _template(cls, pod: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(pod) - {"metadata", "spec"}):
            raise ValueError(f"{unknown[0]}: no such part of a pod's template; expected metadata and spec")
        spec = pod.get("spec", {})
        parts = [spec, pod.get("metadata", {}), *(spec.get("containers", []) if isinstance(spec, dict) else [])]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("expected metadata, spec and each of spec.containers to be tables")
        agent: dict[str, Any] = next(
            (each for each in spec.get("containers", []) if each.get("name") == AGENT_CONTAINER), {}
        )
        if taken := sorted({"image", "command", "args"} & set(agent)):
            raise ValueError(
                f"spec.containers: {taken[0]} of the container {AGENT_CONTAINER!r} would be ignored; expected "
                "sandbox.image and agent.command instead"
            )
        if "restartPolicy" in spec:
            raise ValueError("spec.restartPolicy: would be ignored, since an attempt starts its program once")
        return pod


SandboxConfig = Annotated[Bubblewrap | Container | KubernetesJob | NoSandbox, Tagged()]
Sandboxed = Bubblewrap | Container | KubernetesJob


class _Recorded(Table):
    sandbox: SandboxConfig = NoSandbox()


def sandbox_of_run(config: dict[str, Any]) -> Sandboxed | NoSandbox:
    """The sandbox that a run's configuration in the store asks for, so that workers anywhere do alike."""
    table = {name: config[name] for name in ("sandbox",) if name in config}
    return parse_settings(_Recorded, table, "run", ": ").sandbox
