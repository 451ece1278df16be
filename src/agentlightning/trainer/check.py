"""Run an agent without training its model: to check it, to evaluate it, or to record rollouts for offline training.

Driven by ``agl check``, ``agl eval`` and ``agl record``.
"""

from __future__ import annotations

import ast
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from agentlightning.adapters.side_calls import side_calls, side_calls_line
from agentlightning.config.external import secret_variables
from agentlightning.config.run import Config, public_task
from agentlightning.engines.base import EngineNeeds
from agentlightning.engines.machine import longest_row
from agentlightning.errors import AgentError, AgentLightningError, ConfigError, NoCallsError
from agentlightning.records import JSON, Attempt, Call, NewRollout, RetryPolicy, Reward, Rollout
from agentlightning.store.scan import read_feedback
from agentlightning.trainer.agent_source import alarm_warning
from agentlightning.trainer.causes import Sample, causes
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.defaults import FoundModel, find_models, with_defaults
from agentlightning.trainer.environments import with_environment
from agentlightning.trainer.estimate import RowRoom, Speed, estimate_speed
from agentlightning.trainer.evaluate import TEMPERATURES, Kind, run_held_out, success_metrics, successes, summarize
from agentlightning.trainer.monitor.health_checks import MIN_SUCCESS
from agentlightning.trainer.processes import Processes, engine_setup
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded
from agentlightning.trainer.schedules import algorithms_of
from agentlightning.trainer.serving import CHECK, rollouts_of, serve_model

QUICK_LOOK = 8
"""Rollouts after the first one that are executed together, and give the first figures of the speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """One rollout in full."""

    rollout: Rollout
    attempts: list[Attempt]
    calls: list[Call]
    rewards: list[Reward]
    feedback: str = ""
    """Words that came with them; '' where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(ShownRollout):
    """One rollout in full, and the base model's success."""

    success: float
    """Share of them that were solved, where the agent records a reward of the name `success`; else the mean reward."""
    tasks: int
    """Tasks that this rests on."""
    spread: float
    """Between the highest and the lowest of those rewards."""
    rollouts: Sequence[Rollout] = ()
    """All of them."""
    trains: bool = True
    """False for an external model."""
    shared_fields: Sequence[str] = ()
    """Fields of the task that a reward function reads and the agent gets."""
    causes: Sequence[str] = ()
    """Sentences on what keeps the rewards low."""
    room: RowRoom | None = None
    """None for tiny models, for engines that compute elsewhere, and where the first rollout failed."""
    speed: Speed | None = None
    """Of the rollouts measured together; None where one alone was made, or nothing would be trained."""

    @property
    def failure(self) -> AgentLightningError | None:
        """The error with which the check ends; None where training could begin."""
        if self.rollout.state != "succeeded":
            why = f": {self.rollout.warning}" if self.rollout.refused else "; its error is above"
            return AgentError(f"the agent failed on the first task{why}")
        if not self.calls:
            return NoCallsError(f"there would be nothing to learn from: {self.rollout.warning}")
        return None

    @property
    def side_calls(self) -> str | None:
        """A sentence about calls beside the task; None where there are none."""
        found = side_calls([call for call in self.calls if call.attempt == self.rollout.attempt])
        if not found:
            return None
        left = 'they are context and not trained on (algorithm.side_calls = "train" changes that)'
        return f"{side_calls_line([*found.values()])}: {left}"

    @property
    def warning(self) -> str | None:
        """A sentence where training could learn little from such rewards; None where it can."""
        if self.success < MIN_SUCCESS:
            low = f"base success {self.success:.2f} over {self.tasks} tasks is below {MIN_SUCCESS}"
            if not self.trains:
                return f"{low}: other prompts could hardly be compared; begin with easier tasks"
            return f"{low}: most groups would have nothing to compare; warm-start the model, or begin with easier tasks"
        if self.spread == 0 and self.tasks > 1:
            return (
                f"all {self.tasks} tasks earned {self.success:g}: a reward that is always the same teaches nothing; check "
                "the reward function, or take harder tasks"
            )
        return None

    @property
    def privacy_note(self) -> str | None:
        """A sentence where the agent is given what its reward is computed from."""
        if not self.shared_fields:
            return None
        names = ", ".join(map(repr, self.shared_fields))
        return (
            f"the reward reads {names} of the task, which the agent gets, too; name in data.private what the agent need not "
            "know, such as the answer"
        )


def task_fields(spec: str) -> set[str]:
    """Fields of the task that a reward function reads, ``task["answer"]`` and ``task.get("answer")``, in its own file; as
    far as the source says it, which is not imported."""
    source, _, name = spec.rpartition(":")
    path = Path(source) if source.endswith(".py") else Path(*source.split(".")).with_suffix(".py")
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    found, seen, left = set(), set(), [(name, 0)]
    while left:
        called, place = left.pop()
        if called not in functions or (called, place) in seen:
            continue
        seen.add((called, place))
        given = functions[called].args
        parameters = [one.arg for one in (*given.posonlyargs, *given.args)]
        task = parameters[place] if place < len(parameters) else None
        for node in ast.walk(functions[called]):
            match node:
                case ast.Subscript(value=ast.Name(id=of), slice=ast.Constant(value=str(field))) if of == task:
                    found.add(field)
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=of), attr="get"), args=[ast.Constant(value=str(field)), *_]
                ) if of == task:
                    found.add(field)
                case ast.Call(func=ast.Name(id=inner), args=arguments):
                    left += [(inner, n) for n, one in enumerate(arguments) if getattr(one, "id", None) == task]
    return found


def _source(config: Config, split: Literal["train", "val"]) -> str:
    source = config.data.train if split == "train" else config.data.val
    if source is None:
        raise ConfigError(f"data.{split}: is required; name the tasks to run the agent on")
    return source


def _tasks(config: Config, source: str, most: int | None = None) -> list[JSON]:
    rows = load_tasks(source, config.trainer.seed)[:most]
    config.check_tasks(rows)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """An evaluation of the held-out tasks."""

    success: dict[str, float]
    """``{"greedy": …, "sampled": …}``, of an external model ``{"as_asked": …}``; shares of success beside them."""
    rollouts: list[Rollout]
    """Those of the last kind, whose completions were sampled."""
    solved: dict[str, float]
    """By rollout, the success that was recorded beside its reward."""


async def evaluate_model(
    config: Config, folder: RunFolder, progress: Progress, name: str, attempts: int = 1
) -> HeldOutResult:
    """Held-out success of the configured model. attempts: tries of each task where completions are sampled."""
    config = await with_environment(config, folder, progress, ["val"])
    rows = _tasks(config, _source(config, "val"), config.eval.tasks)
    async with serve_model(config, folder, progress, name) as (collector, processes):
        success: dict[str, float] = {}
        rollouts, solved = list[Rollout](), dict[str, float]()
        kinds: list[Kind] = list(TEMPERATURES) if config.agent_model is None else ["as_asked"]
        for kind in kinds:
            rollouts = await processes.beside(
                run_held_out(
                    collector,
                    rows if kind == "greedy" else [row for row in rows for _ in range(attempts)],
                    step=0,
                    kind=kind,
                    max_tokens=config.model.max_tokens,
                    retry=RetryPolicy(max_attempts=1, timeout_s=config.agent.timeout_s),
                    on_progress=partial(progress.phase, f"evaluate {kind}"),
                )
            )
            success[kind] = summarize(rollouts)["reward_mean"]
            shares = await success_metrics(processes.store, rollouts)
            success |= {f"{kind}_success": value for value in shares.values()}
            progress.evaluated(0, kind, success[kind])
        solved = await successes(processes.store, rollouts)
    return HeldOutResult(success=success, rollouts=rollouts, solved=solved)


async def check_agent(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    tasks: int | None,
    show: Callable[[ShownRollout], None] | None = None,
    attempts: int = 1,
) -> CheckResult:
    """One rollout on the first training task, which `show` gets at once, then the base success over the first `tasks` ones
    (None: all), each tried so many times. No learner is started; the speed of its updates is estimated."""
    config = await with_environment(config, folder, progress)
    source = _source(config, "train")
    models: Mapping[str, FoundModel] = {}
    group_size = 1
    trains = config.agent_model is None
    if trains and config.optimize is None:
        group_size = next(iter(algorithms_of(config).values())).group_size  # what would stop training stops the check
        models = await find_models(config)
        config = await with_defaults(config, progress.note, models)
    if (sentence := alarm_warning(config.agent.run)) is not None:
        progress.note(sentence)
    rows = _tasks(config, source)
    config = config.with_steps(len(rows))
    async with serve_model(config, folder, progress, CHECK) as (collector, processes):
        store, rows = processes.store, rows[:tasks]
        new = rollouts_of(config, folder.run_id, rows, mode="eval", group=CHECK, replicas=1, max_attempts=1)
        shown, rollouts = await _first(processes, collector, new[0])
        if show is not None:
            show(shown)
        speed, done = None, 1
        while shown.rollout.state == "succeeded" and done < len(new):
            wanted = new[done : done + QUICK_LOOK] if done == 1 else new[done:]
            started, before, done = time.perf_counter(), done, done + len(wanted)
            tell = partial(_tell, progress, before, len(new))
            more = await processes.beside(collector.collect(wanted, tell))
            seconds = time.perf_counter() - started
            rollouts += more
            if models:
                calls = await store.calls([one.id for one in more])
                speed = _speed(config, models, more, calls, seconds, group_size)
                if before == 1:
                    progress.note(speed.sentence)
        calls = await store.calls([one.id for one in rollouts])
        earned = [rollout.reward or 0.0 for rollout in rollouts if rollout.judged] or [0.0]
        solved = await success_metrics(store, rollouts)
        return CheckResult(
            rollout=shown.rollout,
            attempts=shown.attempts,
            calls=shown.calls,
            rewards=shown.rewards,
            feedback=shown.feedback,
            success=solved.get("success_mean", sum(earned) / len(earned)),
            tasks=len({rollout.group_id for rollout in rollouts if rollout.judged}),
            rollouts=rollouts,
            spread=max(earned) - min(earned),
            trains=trains,
            shared_fields=shared_fields(config, rows[0]),
            causes=causes(Sample(rollouts=rollouts, calls=calls, max_tokens=config.model.max_tokens)),
            room=await _room(config, models, calls, progress) if len(rollouts) > 1 else None,
            speed=speed,
        )


async def _room(
    config: Config, models: Mapping[str, FoundModel], calls: Sequence[Call], progress: Progress
) -> RowRoom | None:
    """Measured while the sampler runs, with which the learner shares the device."""
    [alias, *others] = models or [""]
    if not models or others or models[alias].size.tiny:
        return None
    needs = EngineNeeds(reference=any(one.needs_reference for one in algorithms_of(config).values()))
    setup = engine_setup(config, needs, work_dir=Path())
    try:
        fits = await longest_row(models[alias].folder, setup, frozenset(secret_variables(config.model_dump())))
    except AgentLightningError as error:  # the check itself is done
        progress.note(f"the longest row that fits was not measured: {error}")
        return None
    if fits is None:
        return None
    room = RowRoom(fits=fits, longest=max((call.prompt_tokens + len(call.sampled_ids) for call in calls), default=0))
    progress.note(room.sentence)
    return room


async def _first(
    processes: Processes, collector: RolloutCollector, new: NewRollout
) -> tuple[ShownRollout, list[Rollout]]:
    store = processes.store
    (first,) = await processes.beside(collector.collect([new]))
    shown = ShownRollout(
        rollout=first,
        attempts=await store.attempts([first.id]),
        calls=await store.calls([first.id]),
        rewards=await store.rewards([first.id]),
        feedback=(await read_feedback(store, [first]))[0],
    )
    return shown, [first]


def _tell(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress.phase("base success", before + done, total)


def _speed(
    config: Config,
    models: Mapping[str, FoundModel],
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    seconds: float,
    group_size: int,
) -> Speed:
    first = next(iter(models.values()))
    known = len(models) == 1 and first.machine is not None and first.size.parameters is not None
    learner = (first.size, first.machine) if known and first.machine is not None else None
    held_out = len(load_tasks(config.data.val, config.trainer.seed)[: config.eval.tasks]) if config.data.val else 0
    return estimate_speed(config, rollouts, calls, seconds, group_size=group_size, held_out=held_out, learner=learner)


def shared_fields(config: Config, task: JSON) -> list[str]:
    """Fields of the task that a reward function reads and the agent gets."""
    read = {field for reward in config.agent.reward if reward.run for field in task_fields(reward.run)}
    return [name for name in public_task(task, config.data.private) if name in read]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResult:
    """Counts of the recorded rollouts."""

    run_id: str
    rollouts: int
    succeeded: int
    reward: float
    """Mean final reward of those that have one; 0 where none has."""


async def record_rollouts(
    config: Config, folder: RunFolder, progress: Progress, per_task: int, most_tasks: int | None = None
) -> RecordResult:
    """Run the agent `per_task` times on each training task, on the first `most_tasks` of them.

    Raises NoCallsError where no rollout reached the gateway.
    """
    config = await with_environment(config, folder, progress, ["train"])
    rows, attempts = _tasks(config, _source(config, "train"), most_tasks), config.agent.max_attempts
    new = rollouts_of(
        config, folder.run_id, rows, mode="train", group="record", replicas=per_task, max_attempts=attempts
    )
    async with serve_model(config, folder, progress, f"record {config.data.train}") as (collector, processes):
        rollouts = await processes.beside(collector.collect(new, partial(progress.phase, "record")))
        silence = check_calls_recorded(rollouts)
        if silence is not None:
            progress.note(silence)
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return RecordResult(
        run_id=folder.run_id,
        rollouts=len(rollouts),
        succeeded=sum(rollout.state == "succeeded" for rollout in rollouts),
        reward=statistics.fmean(rewards) if rewards else 0.0,
    )
