"""Scores a finished rollout with a reward function, be it a Python function, a program or a judge.

Driven by the worker as an attempt ends, and by `agl rewards rescore` over what is stored. A scorer says; what it said
becomes rewards of the record elsewhere. Whatever is wrong with it is a RewardError that names what was expected.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

import orjson

from agentlightning.config.agent import RewardConfig, reward_labels
from agentlightning.config.base import parse_settings
from agentlightning.errors import ConfigError, RewardError, boundary
from agentlightning.records import JSON, Call
from agentlightning.runner.command import json_of, plain, split_command
from agentlightning.runner.function import invoke
from agentlightning.runner.own_process import OwnProcess
from agentlightning.runner.processes import kill_group
from agentlightning.runner.result import RolloutResult, as_json
from agentlightning.runner.shared_process import AlarmRefusedError
from agentlightning.runner.user_code import load
from agentlightning.runtime.children import inheritable
from agentlightning.store.rules import reward_name, reward_number
from agentlightning.store.scan import feedback_text

FINAL = "reward"
STEPS = "steps"
WORDS = "feedback"
SCORE_TIMEOUT_S = 60.0
"""For one score by a program or a judge; the attempt's own time counts as well."""
MAX_OUTPUT_BYTES = 1024 * 1024
"""Of a program's output, from its end, that is read."""
MAX_SHOWN_CHARACTERS = 2000
"""Characters of a program's output that an error shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Scores that a reward function gave one rollout."""

    finals: dict[str, float]
    """By name; 'reward', which is the rollout's own, is always there and last."""
    steps: dict[str, dict[str, float]] = field(default_factory=dict)
    """By call and name."""
    feedback: str = ""
    """Words about the rollout, for whoever improves the agent."""


class Scorer(Protocol):
    """Any kind of reward function."""

    async def score(self, task: JSON, result: RolloutResult) -> Score:
        """Raises RewardError where it gives no reward; of user code, what it raises."""
        ...


def read_score(said: Any, calls: Sequence[Call]) -> Score:
    """Reads what a reward function returned: a number, or numbers by name, with those of single calls under ``steps`` and
    words under ``feedback``.

    Without a "reward" among the names, their sum is the rollout's reward. ``steps`` has an entry for each of `calls`,
    or for some by the call's id: a number, numbers by name, or None. Of two calls a and b:

        0.5                                          reward 0.5
        {"answer": 1, "format": 0.1}                 answer 1, format 0.1, reward 1.1
        {"score": 0, "feedback": "wrong year"}       score 0, reward 0, and words about it
        {"reward": 1, "steps": [None, 0.5]}          reward 1; call b: reward 0.5
        {"reward": 1, "steps": {"a": {"sql": -1}}}   reward 1; call a: sql -1
    """
    if not isinstance(said, Mapping):
        return Score(finals={FINAL: reward_number(said, "the reward function's value")})
    finals = {
        _named(name, "value"): reward_number(value, f"the reward function's {name!r}")
        for name, value in said.items()
        if name not in (STEPS, WORDS)
    }
    if not finals:
        raise RewardError('the reward function\'s value: expected {"reward": number} or numbers by name, got none')
    final = finals.pop(FINAL, None)
    if final is None:
        final = reward_number(sum(finals.values()), "the sum of the reward function's values")
    finals[FINAL] = final
    feedback = feedback_text(said.get(WORDS), f"the reward function's {WORDS!r}")
    return Score(finals=finals, steps=_steps(said.get(STEPS), calls), feedback=feedback)


def _steps(said: Any, calls: Sequence[Call]) -> dict[str, dict[str, float]]:
    if said is None:
        return {}
    known = [call.id for call in calls]
    if isinstance(said, Mapping):
        entries = list(said.items())
        if unknown := [name for name, _ in entries if name not in known]:
            raise RewardError(f"the reward function's 'steps': {unknown[0]!r} is no call of this rollout")
    elif isinstance(said, list | tuple):
        if len(said) != len(known):
            raise RewardError(
                f"the reward function's 'steps': expected one for each of {len(known)} calls, got {len(said)}"
            )
        entries = list(zip(known, said, strict=True))
    else:
        raise RewardError(f"the reward function's 'steps': expected a list or a table, got {type(said).__name__}")
    found: dict[str, dict[str, float]] = {}
    for call_id, value in entries:
        named = value if isinstance(value, Mapping) else {FINAL: value}
        numbers = {
            _named(name, "'steps'"): reward_number(number, f"the reward function's step {name!r}")
            for name, number in named.items()
            if number is not None
        }
        if numbers:
            found[call_id] = numbers
    return found


def _named(name: Any, where: str) -> str:
    try:
        return reward_name(name)
    except RewardError as error:
        raise RewardError(f"the reward function's {where}: {error}") from None


@dataclass(frozen=True, slots=True)
class FunctionScorer:
    """A callable ``(task, result)``, called in `threads` where it is synchronous, and in `own_process` once it was seen to
    need SIGALRM (math_verify does for its time limits)."""

    function: Callable[..., Any]
    threads: Executor
    own_process: OwnProcess | None = None

    async def score(self, task: JSON, result: RolloutResult) -> Score:
        with boundary("the reward function"):
            said = await self._said(task, result)
        return read_score(said, result.calls)

    async def _said(self, task: JSON, result: RolloutResult) -> Any:
        own = self.own_process
        if own is None or not own.used:
            try:
                return await invoke(self.function, self.threads, task, result, what="the reward function")
            except AlarmRefusedError:
                if own is None:
                    raise
        return await own.call(task, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandScorer:
    """A program in any language: task and result come as JSON on its standard input (`result.as_json`), and the last
    line that it prints is the score as JSON, as in `read_score`."""

    arguments: Sequence[str]
    timeout_s: float = SCORE_TIMEOUT_S

    async def score(self, task: JSON, result: RolloutResult) -> Score:
        given = orjson.dumps(as_json(task, result), default=str)
        # Files, not pipes: waiting for the program must not wait for what it leaves running with its output open.
        with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
            stdin.write(given)
            stdin.seek(0)
            code = await self._run(stdin, stdout, stderr)
            printed, errors = _end_of(stdout), _end_of(stderr)
        if code != 0:
            why = errors.strip()[-MAX_SHOWN_CHARACTERS:] or "it wrote nothing to its standard error"
            raise RewardError(f"the reward command ended with exit code {code}: {why}")
        last = next(filter(None, map(plain, reversed(printed.split("\n")))), "null")
        said = json_of(last)
        if said is None and last != "null":
            raise RewardError(f"the reward command: expected a number or an object as its last line, got {last[:80]!r}")
        return read_score(said, result.calls)

    async def _run(self, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.arguments,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=inheritable(os.environ),
                start_new_session=True,
            )
        except OSError as cause:
            raise RewardError(f"the reward command: {self.arguments[0]!r} cannot be started: {cause}") from cause
        try:
            return await asyncio.wait_for(process.wait(), self.timeout_s)
        except TimeoutError:
            raise RewardError(f"the reward command took longer than its {self.timeout_s:g} s") from None
        finally:
            kill_group(process.pid)  # with what it started
            await process.wait()


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class SumScorer:
    """Several reward functions, run at once: the reward of each by its name, and their weighted sum as the rollout's."""

    scorers: Mapping[str, Scorer]
    weights: Mapping[str, float]

    async def score(self, task: JSON, result: RolloutResult) -> Score:
        work = (one.score(task, result) for one in self.scorers.values())
        found = await asyncio.gather(*work, return_exceptions=True)  # none is left running when another one fails
        finals: dict[str, float] = {}
        steps: dict[str, dict[str, float]] = {}
        told: list[str] = []
        for label, score in zip(self.scorers, found, strict=True):
            if isinstance(score, BaseException):
                raise score
            finals |= _labelled(label, score.finals)
            for call_id, numbers in score.steps.items():
                steps.setdefault(call_id, {}).update(_labelled(label, numbers))
            told += [f"{label}: {score.feedback}"] if score.feedback else []
        total = sum(finals[label] * weight for label, weight in self.weights.items())
        finals[FINAL] = reward_number(total, "the sum of the rewards")
        return Score(finals=finals, steps=steps, feedback=feedback_text("\n".join(told), WORDS))


def _labelled(label: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {label if name == FINAL else f"{label}.{name}": number for name, number in numbers.items()}


def load_scorers(specs: Sequence[str], threads: Executor, judge: Callable[[RewardConfig], Scorer]) -> Scorer:
    """`load_scorer` of one spec, or of several, whose rewards are added. ConfigError where their names are not distinct."""
    if len(specs) == 1:
        return load_scorer(specs[0], threads, judge)
    configs = [_reward_config(spec) for spec in specs]
    try:
        labels = reward_labels(configs)
    except ValueError as cause:
        raise ConfigError(f"reward: {cause}") from cause
    return SumScorer(
        scorers={label: load_scorer(spec, threads, judge) for label, spec in zip(labels, specs, strict=True)},
        weights={label: config.weight for label, config in zip(labels, configs, strict=True)},
    )


def load_scorer(spec: str, threads: Executor, judge: Callable[[RewardConfig], Scorer]) -> Scorer:
    """Loads a `spec`: ``file.py:name``, ``package.module:name``, or a RewardConfig as JSON.

    judge: makes the scorer that asks a model. ConfigError where it cannot be loaded.
    """
    if not spec.startswith("{"):
        if " " in spec and not spec.rpartition(":")[0].endswith(".py"):
            raise ConfigError(
                f"reward function {spec!r}: expected file.py:name or package.module:name; a program is named in a "
                "configuration, as command in [agent.reward]"
            )
        own = OwnProcess(spec, ("task", "result"), "reward function")
        return FunctionScorer(load(spec, ("task", "result"), "reward function"), threads, own)
    config = _reward_config(spec)
    if config.run is not None:
        return load_scorer(config.run, threads, judge)
    if config.command is None:
        return judge(config)
    return CommandScorer(arguments=split_command(config.command, "reward.command"))


def _reward_config(spec: str) -> RewardConfig:
    if not spec.startswith("{"):
        return RewardConfig(run=spec)
    try:
        table = json.loads(spec)
    except ValueError:
        raise ConfigError(f"reward: {spec!r} is neither file.py:name nor a table as JSON") from None
    return parse_settings(RewardConfig, table, "reward")
