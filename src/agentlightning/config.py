"""Typed settings of every part; `config_file.py` reads them from TOML with dotted overrides.

The command line and `Trainer` make a `Config`; every part gets its own table and none reads another's. A setting that does
not exist, has the wrong type, or would be ignored by the chosen parts is a `ConfigError` before anything starts. Knows
nothing of what the settings do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentlightning.config_air import AirConfig
from agentlightning.config_base import Table
from agentlightning.config_base import parse_settings as parse_settings

DEFAULT_STORE = "sqlite:///runs/agl.db"
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ModelConfig(Table):
    path: str
    """Hub name or local folder of a transformers causal language model with a chat template."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts; evaluation is greedy and at temperature 1."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of one call. None: what the agent asks for, else what the context holds."""


class RewardConfig(Table):
    """A reward function: of Python, a program, or a model that judges. A text alone is `run`."""

    run: str | None = None
    """``file.py:name`` or ``package.module:name``, called with (task, result)."""
    command: str | None = None
    """A program, split into words as a shell would: the rollout as JSON on its standard input, and as the last line that
    it prints the reward, or an object of rewards by name."""
    judge: str | None = None
    """A model to ask for a score from 0 to 1: a name that an upstream or a policy of the run answers to, or with `url`
    one of that endpoint's."""
    url: str | None = None
    """Of an OpenAI-compatible endpoint, with its /v1. None: the run's own gateway."""
    key_env: str | None = None
    """Variable of the workers' environment with the key of `url`; None: no key is sent."""
    instructions: str | None = None
    """What the judge is to look at; None: whether the rollout reached the task's goal."""
    temperature: float | None = Field(None, ge=0)
    """Of the judge's answers; None: the endpoint's own."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for one score. The attempt's own time counts as well."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.run, self.command, self.judge)) != 1:
            raise ValueError("give one of run (file.py:name), command (a program) and judge (a model)")
        ignored: dict[str, object] = {"url": self.url, "key_env": self.key_env, "instructions": self.instructions}
        ignored |= {"temperature": self.temperature}
        for name in (name for name, value in ignored.items() if value is not None and self.judge is None):
            raise ValueError(f"{name}: has no effect without judge")
        if self.run is not None and self.timeout_s != RewardConfig.model_fields["timeout_s"].default:
            raise ValueError("timeout_s: has no effect with run; agent.timeout_s bounds it")
        if self.key_env is not None and self.url is None:
            raise ValueError("key_env: has no effect without url; the gateway has the keys of its upstreams")
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError(  # what was given is repeated nowhere: somebody may have pasted a key
                "key_env: expected the name of an environment variable, such as OPENAI_API_KEY, not the key"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("url: expected http(s)://HOST/v1")
        return self


class AgentConfig(Table):
    run: str | None = None
    """Function agent: ``file.py:name`` or ``package.module:name``."""
    command: str | None = None
    """Command agent: any program, for example ``node agent.js``."""
    reward: RewardConfig | None = None
    """Reward function: ``file.py:name`` called with (task, result), or a table. None: the agent's own return value or
    records."""
    workers: int = Field(2, ge=0)
    """Worker processes to start here; 0 where workers run elsewhere."""
    concurrency: int = Field(32, ge=1)
    """Rollouts at a time in each worker."""
    timeout_s: float = Field(300.0, gt=0)
    max_attempts: int = Field(2, ge=1)
    on_failure: Literal["drop", "zero"] = "drop"
    """A rollout that failed all its attempts: left out, or reward 0."""
    posts_rewards: bool | None = None
    """Whether an attempt's key may set rewards at the gateway; None: only for a command without a reward function."""
    trace: bool = True
    """Function agents: name the agent (node, role) of each call, and record the OpenTelemetry spans that its code makes."""
    instrument: tuple[str, ...] = ()
    """Function agents: instrumentations to switch on in every worker, by name (langchain, openai_agents) or package: any
    that is installed of OpenInference's and OpenTelemetry's."""
    sampling_policy: Literal["refuse", "force"] = "refuse"
    """What becomes of a call that asks for sampling no trainer could account for (top_k, penalties, a JSON schema, a forced
    tool call): refused with a sentence, or sampled without it. What was asked for is recorded with the call."""

    @property
    def reward_spec(self) -> str | None:
        """`reward` as one text, for a worker's command line: what is not a Python function as JSON."""
        if self.reward is None or self.reward.run is not None:
            return None if self.reward is None else self.reward.run
        return self.reward.model_dump_json(exclude_defaults=True)

    @field_validator("reward", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"run": value} if isinstance(value, str) else value

    @property
    def given(self) -> bool:
        """Whether there is an agent: a run that learns from the record needs one only to be evaluated."""
        return self.run is not None or self.command is not None

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.instrument and not self.trace:
            raise ValueError("instrument: has no effect with trace = false; expected no instrumentation")
        if self.command is not None and (self.instrument or not self.trace):
            raise ValueError(
                f"{'instrument' if self.instrument else 'trace'}: has no effect on a command, which is traced by what its "
                "environment says (OTEL_EXPORTER_OTLP_ENDPOINT is set for it)"
            )
        return self


class DataConfig(Table):
    train: str | None = None
    """Tasks: a .jsonl, .csv or .parquet file, ``hub:NAME[:SPLIT]``, or a Python callable ``file.py:name``."""
    from_run: tuple[str, ...] = ()
    """Runs in the same store whose recorded training rollouts are learned from, in place of tasks."""
    val: str | None = None
    """Held-out tasks, never trained on."""
    fields: tuple[str, ...] | None = None
    """Fields that every task must have; None: the fields of the first task."""

    @field_validator("from_run", mode="before")
    @classmethod
    def _one_run(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.train is None) == (not self.from_run):
            raise ValueError("give either train (tasks) or from_run (recorded runs), not both")
        return self


class TrainerConfig(Table):
    steps: int = Field(100, ge=1)
    tasks_per_step: int = Field(32, ge=1)
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate that is left at the end of a linear decay; 1 keeps it constant."""
    grad_clip: float = Field(1.0, gt=0)
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints; a crash repeats at most this many updates, and samples nothing again."""
    keep_checkpoints: int = Field(2, ge=1)
    seed: int = 0
    max_staleness: int = Field(0, ge=0)
    """Training steps by which the weights that sampled a rollout may lie behind those that it updates: so many steps'
    groups run ahead of the trainer. 0: each step samples its own and waits for them (synchronous)."""
    group_order: Literal["queued", "finished"] = "queued"
    """Which groups a step takes. queued: the oldest, waiting for slow ones; nothing is dropped. finished: those that finish
    first; slow ones are learned from later, or cancelled and recorded as stale once they would be too stale."""
    surplus: float = Field(0.0, ge=0, le=1)
    """Share of groups queued beyond what a synchronous step needs: the first to finish are taken, the others cancelled."""
    group_deadline_s: float | None = Field(None, gt=0)
    """Seconds after the first end in a group at which what still runs of it is cancelled; None: it is waited for."""
    trackers: tuple[TrackerName, ...] = ()
    """Where else the run's numbers go, beside the store and metrics.jsonl; each needs the extra of its name."""
    guard: bool = True
    """Warn by name when the numbers say that the run goes wrong."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.group_order != "queued" and self.max_staleness == 0:
            raise ValueError("group_order: has no effect with max_staleness = 0; expected 'queued'")
        if self.surplus and self.max_staleness:
            raise ValueError(
                "surplus: with max_staleness above 0, groups that a step does not need are the next step's"
            )
        return self


class EvalConfig(Table):
    every: int = Field(0, ge=0)
    """Steps between greedy evaluations; 0: only before and after training."""
    tasks: int | None = Field(None, ge=1)
    """Most held-out tasks to use, the first ones; None: all."""
    sampled: bool = True
    """Also evaluate at temperature 1 before and after."""


class LoraConfig(Table):
    """A low-rank adapter that is trained instead of all weights."""

    rank: int = Field(16, ge=1)
    alpha: int | None = Field(None, ge=1)
    """The adapter counts alpha / rank times; None: twice."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction."""
    targets: tuple[str, ...] = ()
    """Last names of the layers to adapt, such as q_proj; none: every linear layer but the head."""


class EngineConfig(Table):
    name: Literal["local"] = "local"
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    muon_learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the matrices under muon; the others take trainer.learning_rate."""
    weight_decay: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    microbatch_tokens: int = Field(4096, ge=1)
    """Most tokens of one backward pass, padding included: bounds memory."""
    rows: Literal["padded", "tree"] = "padded"
    """tree: the learner computes once what sequences of a micro-batch begin with alike."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
    lora: LoraConfig | None = None
    max_rows: int = Field(64, ge=1)
    """Requests sampled at a time: on a CPU few enough for the cache."""
    sampler_threads: int = Field(1, ge=1)
    learner_threads: int | None = Field(None, ge=1)
    """None: as many as there are cores that nobody else uses while it learns."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.optimizer == "muon" and self.muon_learning_rate is None:
            raise ValueError("muon_learning_rate is needed with optimizer = 'muon'")
        if self.optimizer != "muon" and self.muon_learning_rate is not None:
            raise ValueError(f"muon_learning_rate has no effect with optimizer = {self.optimizer!r}")
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                "optimizer: muon is for whole matrices, not for the two factors of engine.lora; take adamw"
            )
        if self.dropout and (self.rows == "tree" or self.gradient_checkpointing):
            raise ValueError("dropout: goes neither with rows = 'tree' nor with gradient_checkpointing; expected 0")
        return self


class UpstreamConfig(Table):
    """A model that is not trained: where calls for it go. The gateway reads the same table from a run's resources."""

    url: str
    """Everything before the route: ``https://api.openai.com/v1``, ``https://api.anthropic.com/v1``."""
    protocol: Literal["openai", "anthropic"] = "openai"
    models: tuple[str, ...] = Field(min_length=1)
    """Names that agents ask for; ``*`` stands for any text, ``?`` for one character."""
    key_env: str | None = None
    """Name of the environment variable of the server that holds the key; None: no key is sent."""
    rename: str | None = Field(None, min_length=1)
    """Model name to send; None: the one that was asked for."""
    timeout_s: float = Field(600.0, gt=0)
    max_retries: int = Field(2, ge=0, le=10)

    @model_validator(mode="after")
    def _sendable(self) -> Self:
        # What was given is repeated nowhere here: somebody may have pasted a key.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError(
                "key_env: expected the name of an environment variable, such as OPENAI_API_KEY, not the key"
            )
        if self.key_env is not None and self.key_env.startswith("AGL_"):
            raise ValueError("key_env: a variable of Agent Lightning's own (AGL_…) is not sent anywhere")
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            whole = False
        if not whole or parts.query or parts.fragment or parts.username is not None or parts.password is not None:
            raise ValueError("url: expected http(s)://HOST/PATH without user, query or fragment; a key goes by key_env")
        if self.protocol == "anthropic" and not self.url.rstrip("/").endswith("/v1"):
            raise ValueError("url: expected the URL of an Anthropic endpoint with its /v1, as in …anthropic.com/v1")
        if not all(self.models) or any("[" in name for name in self.models):
            raise ValueError("models: expected model names, in which * and ? may stand for other text")
        return self


class PolicyConfig(Table):
    """One of several policies that are trained at once: what differs from the tables [model], [algorithm], [engine]."""

    model: str | None = None
    """Hub name or local folder. None: model.path."""
    learning_rate: float | None = Field(None, gt=0)
    """None: trainer.learning_rate."""
    algorithm: dict[str, Any] = Field({})
    engine: dict[str, Any] = Field({})


class TracingConfig(Table):
    """OpenTelemetry traces of what agents do."""

    export: str | None = Field(None, pattern=r"^https?://")
    """OTLP/HTTP endpoint, such as http://localhost:4318/v1/traces: every rollout is sent there when it finishes, as one
    trace. Headers come from OTEL_EXPORTER_OTLP_HEADERS."""


class StoreConfig(Table):
    url: str = DEFAULT_STORE
    """``memory://``, ``sqlite:///PATH``, ``postgresql://…`` or ``redis://…``, served by a process of the run; or
    ``http://SERVER``, one that runs already."""


class Config(Table):
    """Everything `agl train` needs."""

    model: ModelConfig
    agent: AgentConfig = AgentConfig()
    data: DataConfig
    algorithm: dict[str, Any] = Field({})
    """The algorithm's own settings; `name` picks it (default lightning_rl). The algorithm checks them."""
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    air: AirConfig = AirConfig()
    tracing: TracingConfig = TracingConfig()
    store: StoreConfig = StoreConfig()
    upstreams: dict[str, UpstreamConfig] = Field({})
    """Models that are not trained, by a name of your choice: a judge, a user simulator, an embedding."""
    policies: dict[str, PolicyConfig] = Field({})
    """Several policies, by the model name that agents ask for. Empty: one, which answers whatever name they ask for."""

    @model_validator(mode="before")
    @classmethod
    def _models_of_policies(cls, table: Any) -> Any:
        """model.path may be left out where every policy has a model of its own."""
        policies = table.get("policies") if isinstance(table, dict) else None
        if not (isinstance(policies, dict) and policies):
            return table
        own = [one.get("model") if isinstance(one, dict) else None for one in policies.values()]
        model = table.get("model", {})
        if not all(own) or not isinstance(model, dict):
            return table
        if model.get("path") not in (None, own[0]):  # the file of a run names every setting
            raise ValueError("model.path: has no effect, since each of the policies has a model of its own")
        return {**table, "model": {**model, "path": own[0]}}

    @model_validator(mode="after")
    def _upstreams_agree(self) -> Self:
        check_upstreams(self.upstreams, tuple(self.policies) or (Path(self.model.path).name, "default"))
        return self

    @model_validator(mode="after")
    def _policies_named(self) -> Self:
        for alias in self.policies:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", alias):
                raise ValueError(f"policies.{alias}: expected a name of letters, digits, '.', '_' and '-'")
        if self.policies and self.data.from_run:
            raise ValueError("policies: a run that learns from data.from_run trains one policy; leave them out")
        return self

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        agent = self.agent
        if (agent.run is not None and agent.command is not None) or not (agent.given or self.data.from_run):
            raise ValueError("agent: give either run (a function, 'file.py:name') or command (a program), not both")
        if self.data.from_run:  # trainer/recorded.py checks the others
            return self
        if self.data.val is None and self.eval != EvalConfig():  # the file of a run names every setting
            raise ValueError("eval: has no effect without data.val")
        return self


def check_upstreams(upstreams: Mapping[str, UpstreamConfig], policies: Sequence[str]) -> None:
    """ValueError where a model name would mean two upstreams, or one of them and a policy.

    An exact name counts before a pattern, a longer pattern before a shorter one.
    """
    for name, upstream in upstreams.items():
        if name in policies:
            raise ValueError(f"upstreams.{name}: is the name of the policy that is trained; choose another")
        for pattern in upstream.models:
            if hidden := [policy for policy in policies if fnmatchcase(policy, pattern)]:
                raise ValueError(
                    f"upstreams.{name}.models: {pattern!r} would take the calls of the policy {hidden[0]!r}"
                )
    for (one, first), (other, second) in combinations(upstreams.items(), 2):
        for a in first.models:
            for b in second.models:
                if is_exact(a) == is_exact(b) and len(a) == len(b) and _overlap(a, b):
                    raise ValueError(
                        f"upstreams.{other}.models: {b!r} means the same models as {a!r} of upstreams.{one}"
                    )


def is_exact(pattern: str) -> bool:
    """Whether a model pattern is a name."""
    return "*" not in pattern and "?" not in pattern


def parse_config(table: dict[str, Any], where: str = "configuration") -> Config:
    """A table as a Config; every problem in one ConfigError, a line each, with the dotted name of the setting."""
    return parse_settings(Config, table, where)


def _overlap(a: str, b: str) -> bool:
    """Whether some name matches both patterns.

    >>> _overlap("gpt-5*", "*-mini"), _overlap("gpt-?", "gpt-55")
    (True, False)
    """
    # reached[j]: some text matches the part of `a` so far and b[:j].
    reached = [True] + [False] * len(b)
    for j, y in enumerate(b):
        reached[j + 1] = reached[j] and y == "*"
    for x in a:
        before, reached = reached, [reached[0] and x == "*"]
        for j, y in enumerate(b):
            grows = "*" in (x, y) and (reached[j] or before[j + 1])
            reached.append(grows or (before[j] and (x == y or "?" in (x, y))))
    return reached[-1]


def run_record(config: Config) -> dict[str, Any]:
    """The configuration as a store keeps it with the run: what depends on other settings is decided; without passwords."""
    agent = config.agent
    table = config.model_dump(mode="json")
    table["store"]["url"] = without_password(absolute_url(config.store.url))
    if agent.posts_rewards is None:
        table["agent"]["posts_rewards"] = agent.command is not None and agent.reward is None
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

    >>> without_password("postgresql://agl:p@ss@db/agl"), without_password("redis://:secret@db?password=x&appendonly=off")
    ('postgresql://agl:***@db/agl', 'redis://:***@db?password=***&appendonly=off')
    """
    # Greedy, up to the last @ before the path: a password may hold one that nobody escaped.
    url = re.sub(r"(?<=://)([^:/?#]*):[^/?#]*@", r"\1:***@", url)
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", url)
