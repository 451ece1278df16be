"""Settings of the table ``[kubernetes]``: a command agent's attempts as Jobs of a cluster. What they mean is
`runner/kubernetes`'s affair."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from agentlightning.config.base import BaseUrl, Table, matching

AGENT_CONTAINER = "agent"
"""The container of a pod that the agent runs in; others may stand beside it."""


class KubernetesConfig(Table):
    """A Job with one pod for each attempt of a command agent."""

    image: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", "the name of a container image")]
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
                "kubernetes.image and agent.command instead"
            )
        if "restartPolicy" in spec:
            raise ValueError("spec.restartPolicy: would be ignored, since an attempt starts its program once")
        return pod
