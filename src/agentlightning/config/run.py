"""Typed settings of every part; `file.py` reads them from TOML with dotted overrides.

The command line and `Trainer` make a `Config`; every part gets its own table and none reads another's. A setting that does
not exist, has the wrong type, or would be ignored by the chosen parts is a `ConfigError` before anything starts. Knows
nothing of what the settings do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from agentlightning.config.agent import (
    ENVIRONMENT,
    AgentConfig,
    AirConfig,
    EnvConfig,
    KubernetesJob,
    NoSandbox,
    SandboxConfig,
)
from agentlightning.config.base import FolderUrl, Table, matching
from agentlightning.config.base import parse_settings as parse_settings
from agentlightning.config.engine import EngineConfig, PolicyConfig, check_policies
from agentlightning.config.external import ExternalModelConfig, agent_model, check_external_models, external_name
from agentlightning.config.prompts import OptimizeConfig, PromptsConfig, check_optimize
from agentlightning.errors import ConfigError

DEFAULT_STORE = "sqlite:///runs/agl.db"
TAG = r"[^\s\x00-\x1f]{1,64}"
"""A word: searches go by words."""
POLICY_SETTINGS = ("unsupported_params",)
"""Settings of [agent] for calls that a policy answers."""
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ModelConfig(Table):
    """The model that is trained, and how it is sampled."""

    path: str
    """Hub name or local folder of a transformers causal language model with a chat template; or ``external:NAME``: agents
    ask the external model of that name, no engine is started, and nothing can be trained."""
    name: (
        Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits and _ . -")] | None
    ) = None
    """Name of the model's versions, over all runs: ``support`` for ``support@40``, ``support-ALIAS`` of several policies.
    None: the run's id."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts; evaluation is greedy and at temperature 1."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of one completion, at most. None: chosen when the run starts (`trainer.defaults`); for tiny models what the
    agent asks for, else what the context holds."""
    chat_template: str | None = None
    """In place of the model's: ``"chatml"``, or a file. Checkpoints and exports have it."""
    tool_syntax: Literal["hermes", "tags", "pairs", "bare"] | None = None
    """The way in which tools and calls are written as text in the system message. None: the chat template's own way, and
    ``"hermes"`` where it has none."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if external_name(self.path) is None:
            return self
        if self.name is not None:
            raise ValueError("name: has no effect on an external model, of which no version is made")
        for name in ("temperature", "max_tokens", "chat_template", "tool_syntax"):
            if getattr(self, name) != ModelConfig.model_fields[name].default:
                raise ValueError(f"{name}: has no effect on an external model, which samples as the agent asks")
        return self


class DataConfig(Table):
    """The tasks."""

    train: str | None = None
    """Tasks: a .jsonl, .csv or .parquet file, ``hub:NAME[:SPLIT]``, or a Python callable ``file.py:name``."""
    from_run: tuple[str, ...] = ()
    """Runs in the same store whose recorded training rollouts are learned from, in place of tasks."""
    sampler: str = "uniform"
    """Draw of the training tasks: uniform (each once an epoch), learnability (by p (1 - p) of their pass rates p, with decay
    and exploration), or ``file.py:name``."""
    val: str | None = None
    """Held-out tasks, never trained on."""
    private: tuple[str, ...] = ()
    """Fields of the tasks that reward functions get and agents do not: not in `task`, AGL_TASK or prompt templates."""

    @field_validator("from_run", "private", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.train is None and not self.from_run:
            raise ValueError("give either train (tasks) or from_run (recorded runs)")
        if self.sampler not in ("uniform", "learnability") and ":" not in self.sampler:
            raise ValueError(f"sampler: expected uniform, learnability or file.py:name, got {self.sampler!r}")
        if self.sampler != "uniform" and self.from_run and self.train is None:
            raise ValueError("sampler: has no effect without train, the tasks to draw from")
        return self


class TrainerConfig(Table):
    """The training loop."""

    steps: int = Field(100, ge=1)
    epochs: float | None = Field(None, gt=0)
    """Passes over the training tasks, in place of `steps`."""
    tasks_per_step: int = Field(32, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    """The highest. None: chosen by model and algorithm when the run starts (`trainer.defaults`)."""
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate that is left at the end of a linear decay; 1 keeps it constant."""
    grad_clip: float = Field(1.0, gt=0)
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints; a crash repeats at most this many updates, and samples nothing again."""
    keep_checkpoints: int = Field(2, ge=1)
    checkpoint_url: FolderUrl | None = None
    """Folder of an object store or a shared disk that checkpoints are copied to, so that any host can go on from them."""
    seed: int = 0
    max_staleness: int = Field(0, ge=0)
    """Steps by which the weights that sampled a rollout may lie behind those that it updates; 0: synchronous."""
    batch_order: Literal["fifo", "first_finished"] = "fifo"
    """The groups that a step takes. fifo: the oldest, waiting for slow ones. first_finished: slow ones are learned from
    later, or cancelled once they would be too stale."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that get the metrics, beside the store and metrics.jsonl; each needs the extra of its name."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that the server, the sampler and the learner each have to start; a busy machine takes minutes."""
    hang_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds without a sign of life after which one of them is started again; 30 times as long without progress."""

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate of a run that has started."""
        assert self.learning_rate is not None
        return self.learning_rate

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.epochs is not None and self.steps != TrainerConfig.model_fields["steps"].default:
            raise ValueError("epochs: conflicts with steps; give one of the two")
        if self.batch_order != "fifo" and self.max_staleness == 0:
            raise ValueError("batch_order: has no effect with max_staleness = 0; expected 'fifo'")
        return self


class EvalConfig(Table):
    """Evaluations on held-out tasks."""

    every: int = Field(0, ge=0)
    """Steps between greedy evaluations; 0: only before and after training."""
    tasks: int | None = Field(None, ge=1)
    """Held-out tasks to use, at most, the first ones; None: all."""
    sampled: bool = True
    """Also evaluate at temperature 1 before and after."""


class TracingConfig(Table):
    """OpenTelemetry traces of what agents do."""

    export: Annotated[str, matching(r"https?://.+", "http://HOST:PORT/PATH")] | None = None
    """OTLP/HTTP endpoint, such as http://localhost:4318/v1/traces: every rollout is sent there when it finishes, as one
    trace. Headers come from OTEL_EXPORTER_OTLP_HEADERS."""


class MonitorConfig(Table):
    """Data of a run for screens, which training never reads."""

    tags: tuple[Annotated[str, matching(TAG, "words of at most 64 characters")], ...] = Field((), max_length=20)
    """Words to find the run by; ``agl runs tag`` sets others later."""


LIMITS_RESOURCE = "limits:run"
"""Name of the resource of a run that has them, apart from those that people choose."""


class LimitConfig(Table):
    """Bounds of one attempt, of a serving key, or of a whole run. None: none but the server's."""

    max_calls: int | None = Field(None, ge=1)
    """Model calls, of policies and external models."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of all prompts and completions together; the call that reaches the bound is still answered."""

    @property
    def has_totals(self) -> bool:
        """True where something adds up over calls."""
        return self.max_tokens is not None or self.max_calls is not None


class LimitsConfig(Table):
    """Limits of each attempt, of serving keys, and of the run as a whole."""

    attempt: LimitConfig = LimitConfig()
    run: LimitConfig = LimitConfig()
    keys: dict[str, LimitConfig] = Field(default_factory=dict)
    """Of each serving key, by the name that it was made with."""

    @property
    def of_agents(self) -> LimitsConfig:
        """The same without what is of serving keys alone."""
        return self.model_copy(update={"keys": {}})


def check_limits(limits: LimitsConfig, served: bool = False) -> None:
    """ValueError for a key's limit where nobody is `served`."""
    if limits.keys and not served:
        raise ValueError("limits.keys: have no effect without users; see agl serve --policy")


class AlertsConfig(Table):
    """Senders of alarms, in addition to the run's output and the console."""

    webhook_env: str | None = None
    """Environment variable with the URL of a webhook in Slack's format: a secret that is neither stored nor shown."""
    command: tuple[str, ...] = ()
    """Program and arguments, started once per alarm with the alarm on standard input:
    ``["mail", "-s", "agl", "me@example.org"]``."""

    @field_validator("webhook_env")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            # "secret": the sentence does not repeat the value, which may be the URL.
            told = "expected the name of an environment variable, such as SLACK_WEBHOOK, not the URL"
            raise PydanticCustomError("secret", told)
        return value


class StoreConfig(Table):
    """The store of rollouts, calls and rewards."""

    url: str = DEFAULT_STORE
    """``memory://``, ``sqlite:///PATH``, ``postgresql://…`` or ``redis://…``, served by a process of the run; or
    ``http://SERVER``, one that runs already."""


class Config(Table):
    """Everything `agl train` needs."""

    model: ModelConfig
    env: EnvConfig | None = None
    """An environment that exists, in place of an agent and tasks of your own."""
    agent: AgentConfig = AgentConfig()
    data: DataConfig
    algorithm: dict[str, Any] = Field({})
    """The algorithm's own settings; `type` picks it (default lightning_rl), `schedule` holds what differs from a step on.
    The algorithm checks them."""
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    air: AirConfig = AirConfig()
    sandbox: SandboxConfig = NoSandbox()
    """Isolation of a command agent's attempts; without one they run as the worker's user, with all that it may do."""
    tracing: TracingConfig = TracingConfig()
    monitor: MonitorConfig = MonitorConfig()
    alerts: AlertsConfig = AlertsConfig()
    store: StoreConfig = StoreConfig()
    external: dict[str, ExternalModelConfig] = Field({})
    """Models that are not trained, by a name of your choice: a judge, a user simulator, an embedding."""
    prompts: PromptsConfig = PromptsConfig()
    """Prompt templates, and the agents whose system prompts they replace."""
    optimize: OptimizeConfig | None = None
    """Search for better prompts; None: there is none."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds of what each attempt, and the run as a whole, may use."""
    policies: dict[str, PolicyConfig] = Field({})
    """Several policies, by the model name that agents ask for. Empty: one, which answers whatever name they ask for."""

    @property
    def source_name(self) -> str:
        """Name of what it runs: the environment, else the agent."""
        if self.env is not None:
            return self.env.name
        return Path(self.agent.run).name if self.agent.run is not None else str(self.agent.command)

    @property
    def offline(self) -> bool:
        """True where the run samples nothing to learn from."""
        return self.data.train is None

    def with_steps(self, examples: int) -> Self:
        """With `trainer.epochs` as steps, once the number of training examples is known."""
        trainer = self.trainer
        if trainer.epochs is None:
            return self
        steps = max(1, math.ceil(trainer.epochs * examples / trainer.tasks_per_step))
        return self.model_copy(update={"trainer": trainer.model_copy(update={"steps": steps, "epochs": None})})

    def check_tasks(self, rows: Sequence[dict[str, Any]]) -> None:
        """ConfigError where a setting names a field that tasks do not have, or where agents find what is kept from them."""
        private, fields = self.data.private, rows[0]  # all rows have its fields
        if missing := [name for name in private if name not in fields]:
            raise ConfigError(f"data.private: no such field {missing[0]!r}; the tasks have {', '.join(sorted(fields))}")
        self.prompts.check_fields(public_task(fields, private), self.agent.command is not None)
        readable = [] if isinstance(self.sandbox, NoSandbox | KubernetesJob) else self.sandbox.readable
        for file in (self.data.train, self.data.val):
            path = Path(file or "")
            if private and file and path.is_file():
                folder = next((one for one in readable if path.resolve().is_relative_to(Path(one).resolve())), None)
                if folder is not None:
                    raise ConfigError(
                        f"data.private: {file} stands in {folder!r}, which agents may read (sandbox.readable); give them a "
                        "folder of their own"
                    )

    @property
    def agent_model(self) -> str | None:
        """The external model that agents ask for; None where they ask the policies of the run."""
        name = external_name(self.model.path)
        return None if name is None else agent_model(name, self.external)

    @model_validator(mode="before")
    @classmethod
    def _of_environment(cls, table: Any) -> Any:
        """Marks the agent and tasks of an environment as its own where nothing else is given."""
        if not isinstance(table, dict) or not table.get("env"):
            return table
        agent, data = table.get("agent") or {}, table.get("data") or {}
        if not isinstance(agent, dict) or not isinstance(data, dict):
            return table
        if not (agent.get("run") or agent.get("command")):
            agent = {**agent, "run": ENVIRONMENT}
        splits = ("val",) if data.get("from_run") else ("train", "val")
        data = {**data, **{split: ENVIRONMENT for split in splits if data.get(split) is None}}
        if not str(agent.get("run")).startswith(ENVIRONMENT) and ENVIRONMENT not in data.values():
            raise ValueError("env: has no effect, since agent, data.train and data.val are given")
        return {**table, "agent": agent, "data": data}

    @model_validator(mode="before")
    @classmethod
    def _models_of_policies(cls, table: Any) -> Any:
        """model.path may be left out where every policy has a model of its own."""
        policies = table.get("policies") if isinstance(table, dict) else None
        if not (isinstance(policies, dict) and policies):
            return table
        own = [
            one.get("model") if isinstance(one, dict) else None
            for one in policies.values()
            if not (isinstance(one, dict) and one.get("snapshot_of"))
        ]
        model = table.get("model", {})
        if not (own and all(own)) or not isinstance(model, dict):
            return table
        if model.get("path") not in (None, own[0]):  # the file of a run names every setting
            raise ValueError("model.path: has no effect, since each of the policies has a model of its own")
        return {**table, "model": {**model, "path": own[0]}}

    @model_validator(mode="after")
    def _external_models_agree(self) -> Self:
        if self.agent_model is not None:
            self._check_no_engine()
            check_external_models(self.external, ())
        else:
            check_external_models(self.external, tuple(self.policies) or (Path(self.model.path).name, "default"))
        check_limits(self.limits)
        for name in self.prompts.templates:
            if name in {*self.external, *self.policies, "default", LIMITS_RESOURCE}:
                raise ValueError(
                    f"prompts.templates.{name}: is the name of another resource of the run; choose another"
                )
        if self.optimize is not None:
            check_optimize(self.optimize, self.prompts.templates, self.external)
        return self

    def _check_no_engine(self) -> None:
        """ValueError for a setting of the policies that agents do not ask."""
        agent, plain = self.agent, AgentConfig()
        ignored = {f"agent.{name}": getattr(agent, name) != getattr(plain, name) for name in POLICY_SETTINGS}
        for name, given in {**ignored, "engine": self.engine != EngineConfig(), "policies": self.policies}.items():
            if given:
                raise ValueError(f"{name}: has no effect with model.path = {self.model.path!r}: no engine is started")

    @model_validator(mode="after")
    def _policies_named(self) -> Self:
        check_policies(self.policies, self.trainer.keep_checkpoints)
        if self.policies and self.data.from_run:
            raise ValueError("policies: a run that learns from data.from_run trains one policy; leave them out")
        return self

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        agent = self.agent
        if self.data.train is not None and self.data.from_run and not self.algorithm.get("schedule"):
            raise ValueError(
                "data: give either train (tasks) or from_run (recorded runs), not both, unless algorithm.schedule switches "
                "between them"
            )
        if (agent.run is not None and agent.command is not None) or not (agent.given or self.offline):
            raise ValueError("agent: give either run (a function, 'file.py:name') or command (a program), not both")
        if agent.reward and agent.posted_rewards:
            raise ValueError("agent.posted_rewards: has no effect with agent.reward, which alone gives rewards then")
        if agent.command is None and not isinstance(self.sandbox, NoSandbox):
            raise ValueError(
                "sandbox: a function agent runs inside the worker and cannot be isolated from it; expected agent.command"
            )
        if self.offline:  # trainer/offline/settings.py checks the others
            return self
        if self.data.val is None and self.eval != EvalConfig():  # the file of a run names every setting
            raise ValueError("eval: has no effect without data.val")
        return self


class _RecordedData(Table):
    private: tuple[str, ...] = ()


def private_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`data.private` of a run's configuration in the store, so that workers and gateways anywhere do alike."""
    table = config.get("data")
    told = {"private": table["private"]} if isinstance(table, dict) and "private" in table else {}
    return parse_settings(_RecordedData, told, "run", ": data.").private


def public_task(task: dict[str, Any], private: Collection[str]) -> dict[str, Any]:
    """The task as its agent gets it.

    >>> public_task({"question": "6 x 7?", "answer": 42}, ["answer"])
    {'question': '6 x 7?'}
    """
    return {name: value for name, value in task.items() if name not in private}


def parse_config(table: dict[str, Any], where: str = "configuration") -> Config:
    """A table as a Config; every problem in one ConfigError, a line each, with the dotted name of the setting."""
    return parse_settings(Config, table, where)


def run_record(config: Config) -> dict[str, Any]:
    """The configuration as a store keeps it with the run: what depends on other settings is decided; without passwords."""
    table = config.model_dump(mode="json")
    table["store"]["url"] = without_password(absolute_url(config.store.url))
    return table


def config_text(config: Config) -> str:
    """The configuration as JSON, for the run folder; where its store is a file, from anywhere."""
    table = config.model_dump(mode="json")
    table["store"]["url"] = absolute_url(config.store.url)
    return json.dumps(table, indent=2)


def absolute_url(url: str) -> str:
    """A store's URL that means the same from every working directory.

    >>> absolute_url("sqlite:///runs/agl.db") == f"sqlite:///{Path.cwd()}/runs/agl.db"
    True
    """
    scheme, separator, rest = url.partition(":///")
    path, mark, query = rest.partition("?")
    if scheme != "sqlite" or not path or Path(path).is_absolute():
        return url
    return f"{scheme}{separator}{Path.cwd() / path}{mark}{query}"


def without_password(url: str) -> str:
    """A store's URL as it may be shown and logged.

    >>> without_password("postgresql://agl:p@s/s@db/agl"), without_password("redis://:secret@db?password=x&appendonly=off")
    ('postgresql://agl:***@db/agl', 'redis://:***@db?password=***&appendonly=off')
    """
    # Up to the last @: a password may hold one that nobody escaped, or what else ends the host of a URL.
    url = re.sub(r"(?<=://)([^:/?#@]*):.*@", r"\1:***@", url)
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", url)
