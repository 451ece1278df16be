"""Settings of the agent, of its rewards and of the workers that run it: the table ``[agent]``.

`run.py` reads them. Knows nothing of what the settings do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentlightning.config.base import BaseUrl, Table, Tagged, matching, parse_settings


class RewardConfig(Table):
    """A reward function: of Python, a program, or a model that judges. A text alone is `run`."""

    name: Annotated[str, matching(r"[A-Za-z_][A-Za-z0-9_.-]*", "letters, digits and _ . -")] | None = None
    """Name of the reward and its metric, beside others; None: that of the function, the program, or `judge`."""
    run: str | None = None
    """``file.py:name`` or ``package.module:name``, called with (task, result)."""
    command: str | None = None
    """A program, split into words as a shell would: the rollout as JSON on its standard input, and as the last line that
    it prints the reward, or an object of rewards by name."""
    judge: str | None = None
    """A model to ask for a score from 0 to 1: an external model or a policy of the run."""
    instructions: str | None = None
    """Criteria for the judge; None: the rollout reached the task's goal."""
    weight: float = 1.0
    """Factor of this reward in the sum of several; its own record is without it."""

    @property
    def label(self) -> str:
        """The reward's name where there are several."""
        if self.name is not None:
            return self.name
        source = self.run or (self.command or "judge").split()[0]
        return Path(source.rpartition(":")[2]).stem

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.run, self.command, self.judge)) != 1:
            raise ValueError("give one of run (file.py:name), command (a program) and judge (a model)")
        if self.instructions is not None and self.judge is None:
            raise ValueError("instructions: has no effect without judge")
        return self


def reward_labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """Their names; ValueError where one would be lost among several: two are the same, or it is that of their sum."""
    labels = [one.label for one in rewards]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two rewards are called {twice[0]!r}; give each a name of its own")
    if len(labels) > 1 and "reward" in labels:
        raise ValueError("'reward' is the name of the sum of several rewards; give each a name of its own")
    return labels


class AgentConfig(Table):
    """The agent, its rewards and the workers that run it."""

    run: str | None = None
    """Function agent: ``file.py:name`` or ``package.module:name``."""
    command: str | None = None
    """Command agent: any program, for example ``node agent.js``."""
    reward: tuple[RewardConfig, ...] = ()
    """Reward function: ``file.py:name`` called with (task, result), or a table, or a list of these, whose rewards are added.
    None: the agent's own return value or records."""
    posted_rewards: tuple[str, ...] | None = None
    """Names of the rewards that agents may post. None: any, but none where they run in a sandbox or there is `reward`."""
    workers: int = Field(2, ge=0)
    """Worker processes to start here; 0 where workers run elsewhere."""
    concurrency: int = Field(32, ge=1)
    """Rollouts at a time in each worker."""
    timeout_s: float = Field(300.0, gt=0)
    max_attempts: int = Field(2, ge=1)
    on_failure: Literal["drop", "zero"] = "zero"
    """A rollout whose last attempt ended by the agent's own exit after it had sampled: reward 0, so that giving up does not
    pay, or left out. Failures of anything else are always left out."""
    event_loop: Literal["auto", "asyncio"] = "auto"
    """Event loop of coroutines: uvloop where it is installed, or asyncio's own, which nest_asyncio wants."""
    trace: bool | tuple[str, ...] = True
    """Function agents: name the agent (node, role) of each call, and record the OpenTelemetry spans that its code makes. A
    list also switches installed instrumentations on in every worker, by name or package."""
    unsupported_params: Literal["error", "drop"] | None = None
    """Treatment of a call that asks for sampling no trainer could account for (bad_words, typical_p, a grammar that cannot
    be made, or any where the engine cannot rebuild masks): refused, or sampled without it and not learned from. None: as
    error, but another temperature or top_p than the run's is overridden and named in the header x-agl-ignored."""
    at_limit: Literal["end", "error"] | None = None
    """Answer to a call beyond a limit's total, or whose prompt fills the context. end: an unrecorded message that says so;
    error: HTTP 429 or 400. None: end for a command, error for a function."""

    @property
    def reward_specs(self) -> list[str]:
        """`reward`, one text each for a worker's command line: what is not just a Python function as JSON."""
        alone = len(self.reward) == 1
        return [
            one.run if one.run is not None and alone else one.model_dump_json(exclude_defaults=True)
            for one in (one.model_copy(update={} if alone else {"name": one.label}) for one in self.reward)
        ]

    @field_validator("trace", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("reward", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
        return [{"run": one} if isinstance(one, str) else one for one in listed]

    @field_validator("reward")
    @classmethod
    def _told_apart(cls, value: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        reward_labels(value)
        if len(value) == 1 and value[0].weight != 1:
            raise ValueError("weight: has no effect on a reward function alone")
        return value

    @property
    def instrumentations(self) -> tuple[str, ...]:
        """Names of the instrumentations that `trace` switches on."""
        return () if isinstance(self.trace, bool) else self.trace

    @property
    def given(self) -> bool:
        """True where there is an agent: offline training needs one only to be evaluated."""
        return self.run is not None or self.command is not None

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.command is not None and self.trace is not True:
            raise ValueError(
                "trace: has no effect on a command, which is traced by what its environment says "
                "(OTEL_EXPORTER_OTLP_ENDPOINT is set for it)"
            )
        if self.command is not None and self.event_loop != "auto":
            raise ValueError("event_loop: has no effect on a command, which has a process of its own")
        return self


class EnvConfig(Table):
    """An environment: it gives the agent, the tasks and the held-out tasks, each of which may be given in its place."""

    name: str
    """``KIND:REST?option=value``, as `agl env list` shows them, or ``file.py:Class``."""
    options: dict[str, Any] = Field({})
    """Options of the environment, in addition to those in its name."""
    python: str | None = None
    """The Python that has its package. None: this one, or that of ``agl env install``."""


ENVIRONMENT = "env:"
"""Begins `agent.run` of an environment, and stands for its tasks until they are made."""


class AirRuleConfig(Table):
    """One rule of AIR."""

    weight: float
    """Reward of a call that scores 1; below 0 for what should not happen."""
    budget: float | None = Field(None, gt=0)
    """Latency, tokens or calls that cost nothing."""
    run: str | None = None
    """A custom rule: ``file.py:name``, called with (step, earlier)."""


class AirConfig(Table):
    """Automatic intermediate rewards: step rewards from what the system sees by itself."""

    text_tool_error: str | None = Field(None, min_length=1)
    """For agents that call tools in text: a user message that follows a completion is a tool's result, and one that this
    regular expression matches somewhere is the result of a tool that failed."""
    rules: dict[str, AirRuleConfig] = Field({})
    """By name; a number is a weight alone."""

    @field_validator("text_tool_error")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as cause:
            raise ValueError(f"expected a regular expression: {cause}") from cause
        return value

    @field_validator("rules", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, one in value.items():
            if isinstance(one, bool) or not isinstance(one, int | float | dict | AirRuleConfig):
                raise ValueError(f"{name}: expected a weight, or a table with weight, got {one!r}")
        return {name: {"weight": one} if isinstance(one, int | float) else one for name, one in value.items()}

    @field_validator("rules")
    @classmethod
    def _names(cls, value: dict[str, AirRuleConfig]) -> dict[str, AirRuleConfig]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name}: expected a name of small letters, digits and '_'")
        return value


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
    """Seconds for which a pod may wait for a node, a quota or an image; then its attempt is lost, with the reason."""
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
