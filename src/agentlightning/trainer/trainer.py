"""Trainer: the Python entry point. It makes a configuration of its arguments and drives what the command line drives.

Every call runs its event loop in a thread of its own, so that scripts and notebooks call it alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.algorithms.settings import as_table
from agentlightning.config.agent import RewardConfig
from agentlightning.config.base import Table
from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.runner.user_code import agent_spec
from agentlightning.store.open import store_url
from agentlightning.trainer.check import CheckResult, check_agent, evaluate_model
from agentlightning.trainer.checkpoint import RunFolder, export_policy, policies_in, run_config
from agentlightning.trainer.data.tasks import Source, load_tasks
from agentlightning.trainer.display import Display
from agentlightning.trainer.interrupts import run_interruptible
from agentlightning.trainer.model_weights import with_versions
from agentlightning.trainer.policies import with_models
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.schedules import algorithm_class, make_algorithm, name_of
from agentlightning.trainer.training import Training, TrainResult, new_run_id

Code = Callable[..., Any] | str
"""A callable, or where it is: ``file.py:name``, ``package.module:name``."""
RewardFunction = Code | RewardConfig
CODE = ("run", "command", "reward")
"""Settings of an agent that a resumed run may be given anew: a notebook's functions have no lasting name."""


class Trainer:
    """Trains the model behind an agent.

    >>> trainer = Trainer(model="Qwen/Qwen2.5-1.5B-Instruct", algorithm=LightningRL(group_size=8), steps=100)
    >>> result = trainer.fit(solve, train_dataset=train_rows, val_dataset=val_rows)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        algorithm: LightningRL | OfflineAlgorithm | None = None,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        store: str | None = None,
        server: str | None = None,
        workers: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        tasks_per_step: int | None = None,
        learning_rate: float | None = None,
        seed: int | None = None,
        settings: Mapping[str, Mapping[str, Any] | Table] | None = None,
        runs: str | Path = "runs",
        progress: Progress | Literal["auto"] | None = "auto",
    ) -> None:
        """Args:
        model: hub name or local folder of a transformers causal language model with a chat template; None where each
            of `policies` has its own.
        algorithm: LightningRL by default; SFT, RFT, Distill, DPO and KTO train offline (`fit(from_run=…)`).
        policies: several to train at once, by the model name that agents ask for: what differs from the run's settings,
            as in ``[policies.NAME]``: ``{"writer": {"learning_rate": 2e-5, "algorithm": LightningRL(entropy=0.01)}}``.
        store: URL of the store; None: AGL_STORE, else ``sqlite:///runs/agl.db``.
        server: URL of a server that runs already, with its store (its key in AGL_SERVER_KEY); None starts one.
        workers: worker processes to start here (default 2); 0 where they run elsewhere.
        steps, epochs, tasks_per_step, learning_rate, seed: as in the table ``[trainer]``, with its defaults.
        settings: any other setting by table, as an object or as in TOML: ``{"engine": agl.EngineConfig(device="cuda"),
            "trainer": {"grad_clip": 0.5}}``.
        runs: folder under which every run gets its own.
        progress: told of phases, steps and evaluations as they come. "auto": a live panel in a terminal, a line per
            step elsewhere; None: silent.

        ConfigError where both `store` and `server` are given; settings are checked by `fit`.
        """
        if store is not None and server is not None:
            raise ConfigError("server: has a store of its own; give store or server, not both")
        training = {"steps": steps, "epochs": epochs, "tasks_per_step": tasks_per_step}
        table: dict[str, dict[str, Any]] = {
            "model": {"path": model},
            "agent": {"workers": workers},
            "algorithm": {} if algorithm is None else _algorithm_table(algorithm),
            "trainer": training | {"learning_rate": learning_rate, "seed": seed},
            "store": {"url": server or store},
            "policies": {alias: _policy_table(own) for alias, own in (policies or {}).items()},
        }
        table = {name: {key: value for key, value in one.items() if value is not None} for name, one in table.items()}
        for name, values in (settings or {}).items():
            given = values.model_dump(exclude_unset=True) if isinstance(values, Table) else values
            table[name] = {**table.get(name, {}), **given}
        self._given = {name: values for name, values in table.items() if values}
        self._runs = Path(runs)
        self._progress = progress
        self._training: Training | None = None
        self._result: TrainResult | None = None

    def fit(
        self,
        agent: Code | None = None,
        train_dataset: Source | None = None,
        val_dataset: Source | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        *,
        env: str | None = None,
        reward_weights: Sequence[float] | None = None,
        from_run: str | Sequence[str] | None = None,
        resume: str | None = None,
    ) -> TrainResult:
        """Train until the last step and return.

        Args:
            agent: a callable ``(task, llm) -> reward``, sync or async, or ``file.py:name``.
            train_dataset: task rows, or a source as in `load_tasks`.
            val_dataset: held-out task rows, never trained on.
            reward_funcs: ``(task, result) -> float | dict``, sync or async, as docs/rewards.md says, or a `RewardConfig` for
                a program or a judge; None: the agent's return value. A list: each is a metric of its own under its name,
                and the reward is their sum.
            env: an environment that gives what of these is not given, ``textarena:FrozenLake-v0`` or ``file.py:Class``.
            reward_weights: a weight for each of `reward_funcs`: the reward is the weighted sum.
            from_run: ids of runs in the same store whose rollouts are learned from, in place of `train_dataset`; the
                agent is then needed for `val_dataset` alone.
            resume: id of a run to go on with from its last checkpoint, with its own settings: what else is given must
                agree with them, but for the code of agent and rewards.

        Ctrl-C, SIGTERM and SIGHUP end training after the step that is under way; a second one ends it at once, with
        KeyboardInterrupt.
        Raises the errors of docs/errors.md: an InputError before anything starts, the others where the run cannot go on.
        """
        code = _Code(agent, reward_funcs, reward_weights, env)
        given: dict[str, Any] = {
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
            "from_run": from_run,
            "resume": resume,
        }
        with self._fitting(code, **given) as training:
            self._result = run_interruptible(partial(training.run, resume=resume is not None), training.stop)
        return self._result

    async def afit(self, agent: Code | None = None, **given: Any) -> TrainResult:
        """`fit` as a coroutine, with the same arguments."""
        code = _Code(agent, given.pop("reward_funcs", None), given.pop("reward_weights", None), given.pop("env", None))
        with self._fitting(code, **given) as training:
            self._result = await training.run(resume=given.get("resume") is not None)
        return self._result

    def stop(self) -> None:
        """Ask the run to end after the step that is under way, with a checkpoint."""
        if self._training is not None:
            self._training.stop()

    def check(
        self,
        agent: Code | None = None,
        train_dataset: Source | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        *,
        env: str | None = None,
        reward_weights: Sequence[float] | None = None,
        tasks: int = 32,
    ) -> CheckResult:
        """Run the agent once on the first task, then on the first `tasks` for the base success; trains nothing."""
        folder = RunFolder(self._runs, new_run_id())
        # Settings of evaluations need held-out tasks; a check runs none of them.
        config = self._config(folder, _Code(agent, reward_funcs, reward_weights, env), train_dataset, train_dataset)
        with self._shown(f"check {folder.run_id}") as progress:
            return run_interruptible(partial(check_agent, config, folder, progress, tasks))

    def evaluate(
        self,
        agent: Code | None = None,
        val_dataset: Source | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        *,
        env: str | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Mean reward over held-out tasks, ``{"greedy": …, "sampled": …}``: of the model, after `fit` of the trained one;
        ``{"as_asked": …}`` of an external model."""
        folder = RunFolder(self._runs, new_run_id())
        # A configuration needs training tasks; an evaluation runs none of them.
        config = self._config(folder, _Code(agent, reward_funcs, reward_weights, env), val_dataset, val_dataset)
        if self._result is not None:
            config = with_models(config, policies_in(self._result.policy))
        title = f"eval {self._result.run_id if self._result else config.model.path}"
        with self._shown(title) as progress:
            return run_interruptible(partial(evaluate_model, config, folder, progress, title)).success

    def export(self, path: str | Path, policy: str | None = None) -> Path:
        """Write the model that `fit` trained last as a new transformers folder, which vLLM loads, too.

        policy: which one, of a run that trains several.
        """
        if self._result is None:
            raise ConfigError("export: nothing was trained yet; call fit first")
        return export_policy(self._result.policy, Path(path), policy)

    @contextmanager
    def _fitting(
        self,
        code: _Code,
        train_dataset: Source | None = None,
        val_dataset: Source | None = None,
        from_run: str | Sequence[str] | None = None,
        resume: str | None = None,
    ) -> Iterator[Training]:
        folder = RunFolder(self._runs, resume or new_run_id())
        config = self._config(folder, code, train_dataset, val_dataset, from_run, resume is not None)
        with self._shown(folder.run_id) as progress:
            self._training = Training(config, folder, progress)
            yield self._training

    def _shown(self, title: str) -> AbstractContextManager[Progress]:
        return Display(title) if self._progress == "auto" else nullcontext(self._progress or Silent())

    def _config(
        self,
        folder: RunFolder,
        code: _Code,
        train: Source | None = None,
        val: Source | None = None,
        from_run: str | Sequence[str] | None = None,
        resume: bool = False,
    ) -> Config:
        """The configuration of a run: what was given here, in a resumed run beside its own."""
        known = run_config(folder, self._given.get("store", {}).get("url")) if resume else None
        folder.make()
        table = {name: dict(values) for name, values in self._given.items()}
        code.add_to(table, folder.path)
        if known is None:
            table["store"] = {"url": store_url(None)} | table.get("store", {})
        data = table.setdefault("data", {})
        for name, tasks in (("train", train), ("val", val)):
            if tasks is not None:
                data[name] = self._tasks(name, tasks, folder, known)
        if from_run is not None:
            data["from_run"] = from_run
        if known is None:
            return with_versions(parse_config(table, "Trainer"), self._runs)
        return _resumed(known, table, folder.run_id)

    def _tasks(self, name: str, tasks: Source, folder: RunFolder, known: Config | None) -> str:
        """The tasks as a setting; rows are kept with the run. ConfigError where a resumed run has others."""
        seed = self._given.get("trainer", {}).get("seed", 0)
        if known is None:
            return (
                tasks if isinstance(tasks, str) else folder.write_tasks(f"{name}.jsonl", load_tasks(tasks, seed=seed))
            )
        own: str | None = getattr(known.data, name)
        rows = load_tasks(tasks, seed=known.trainer.seed)
        if own is None or load_tasks(own, known.trainer.seed) != rows:
            raise ConfigError(f"resume: {name}_dataset has other tasks than run {folder.run_id} was started with")
        return own


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """Code of a run: the agent and its reward functions."""

    agent: Code | None
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None
    reward_weights: Sequence[float] | None = None
    env: str | None = None

    def add_to(self, table: dict[str, dict[str, Any]], folder: Path) -> None:
        """As settings; functions that have no file are written to `folder`."""

        def spec(function: Code) -> str:
            return function if isinstance(function, str) else agent_spec(function, folder)

        agent = table.setdefault("agent", {})
        if self.env is not None:
            table["env"] = {"name": self.env}
        if self.agent is not None:
            agent["run"] = spec(self.agent)
        several = self.reward_funcs if isinstance(self.reward_funcs, Sequence) else None
        if several is None or isinstance(several, str):
            if self.reward_weights is not None:
                raise ConfigError("reward_weights: expected a list of reward_funcs beside it")
            if self.reward_funcs is not None:
                one = self.reward_funcs
                agent["reward"] = one.model_dump() if isinstance(one, RewardConfig) else spec(one)  # type: ignore[arg-type]
            return
        found = [
            one if isinstance(one, RewardConfig) else RewardConfig(run=spec(one), name=getattr(one, "__name__", None))
            for one in several
        ]
        if self.reward_weights is not None and any(one.weight != 1.0 for one in found):
            raise ConfigError("reward_weights: expected none, since a RewardConfig of reward_funcs has its own weight")
        weights = [one.weight for one in found] if self.reward_weights is None else self.reward_weights
        if len(weights) != len(found):
            raise ConfigError(f"reward_weights: expected one for each of {len(found)} reward_funcs, got {len(weights)}")
        agent["reward"] = [
            one.model_dump(exclude_unset=True) | {"weight": weight} for one, weight in zip(found, weights, strict=True)
        ]


def _resumed(known: Config, table: Mapping[str, Mapping[str, Any]], run_id: str) -> Config:
    """The run's own configuration with the code that was given; ConfigError where another setting differs."""
    own = known.model_dump(mode="json")
    tables = {name: {**(own.get(name) or {}), **values} for name, values in table.items()}
    if "algorithm" in table:
        tables["algorithm"] = _filled(tables["algorithm"], own["algorithm"])
    if "epochs" in table.get("trainer", {}) and "steps" not in table["trainer"]:
        del tables["trainer"]["steps"]  # the run's own were its epochs
    given = parse_config({**own, **tables}, "Trainer")
    if known.data.train is not None:
        rows = load_tasks(known.data.train, known.trainer.seed)
        given = given.with_steps(len(rows))
    now = given.model_dump(mode="json")
    if "algorithm" in table:  # whose table holds what was given alone, without its defaults
        own["algorithm"], now["algorithm"] = (_whole_algorithm(config) for config in (known, given))
    for name, values in table.items():
        for setting in {*values} | ({"steps"} & own[name].keys()):
            before, after = own[name].get(setting), now[name].get(setting)
            if before != after and not (name == "agent" and setting in CODE):
                kept = f"resume: run {run_id} keeps its own settings"
                raise ConfigError(f"{kept}; {name}.{setting} is {before!r} there, and {after!r} here")
    return given


def _filled(given: Any, own: Any) -> Any:
    """A table whose settings that were left open are the run's own, which were chosen when it started."""
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        return {name: _filled(value, own.get(name)) for name, value in given.items()}
    return own if given is None else given


def _whole_algorithm(config: Config) -> JSON:
    """Every setting of the algorithm, as JSON."""
    algorithm = make_algorithm(config, algorithm_class(config))
    whole: JSON = orjson.loads(orjson.dumps(_algorithm_table(algorithm)))
    return whole | {"schedule": config.algorithm.get("schedule", [])}


def _algorithm_table(algorithm: LightningRL | OfflineAlgorithm) -> dict[str, Any]:
    named = {} if type(algorithm) is LightningRL else {"type": name_of(algorithm)}
    return named | as_table(algorithm)


def _policy_table(own: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = own.get("algorithm")
    return {**own, "algorithm": _algorithm_table(algorithm)} if isinstance(algorithm, LightningRL) else dict(own)
