"""An environment's tasks, made and checked by a process of the Python that has its package, and kept in the run's folder.

From there on the run has two files of tasks and a function agent, and nothing else knows that there is an environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection

import orjson

from agentlightning.config.agent import ENVIRONMENT, EnvConfig
from agentlightning.config.run import Config
from agentlightning.environments.base import EnvironmentName, Split
from agentlightning.environments.packages import interpreter
from agentlightning.errors import ConfigError, DataError, InputError
from agentlightning.records import JSON
from agentlightning.runtime.children import inheritable, secrets_line
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.progress import Progress

TRAIN_TASKS = 1000
"""Training tasks of an environment, at most: those that the steps take, if they are fewer."""
VAL_TASKS = 100


async def with_environment(
    config: Config, folder: RunFolder, progress: Progress, splits: Collection[Split] = ("train", "val")
) -> Config:
    """The configuration with the environment's agent and the files of its tasks, of these splits; `progress` gets the
    warnings of their check.

    ConfigError for an environment that is not there or not installed; DataError where its tasks cannot be trained on.
    """
    if config.env is None:
        return config
    name = _name(config.env)
    agent = config.agent
    if agent.run == ENVIRONMENT:
        agent = agent.model_copy(update={"run": f"{ENVIRONMENT}{name}"})
    wanted = [split for split in splits if getattr(config.data, split) == ENVIRONMENT]
    data = config.data
    if wanted:
        progress.phase("starting: tasks", 0, 1)
        most = config.trainer.steps * config.trainer.tasks_per_step
        limits: dict[Split, int] = {
            "train": min(TRAIN_TASKS, TRAIN_TASKS if config.trainer.epochs else most),
            "val": min(VAL_TASKS, config.eval.tasks or VAL_TASKS),
        }
        arguments = [word for split in wanted for word in (f"--{split}", str(limits[split]))]
        made = await make_tasks(config.env, [*arguments, "--seed", str(config.trainer.seed)])
        for warning in made["warnings"]:
            progress.note(f"env {name}: {warning}")
        files = {split: folder.write_tasks(f"env-{split}.jsonl", rows) for split, rows in made["rows"].items()}
        data = data.model_copy(update=files)
    own = config.env if (agent.run or "").startswith(ENVIRONMENT) else None
    return config.model_copy(update={"agent": agent, "data": data, "env": own})


async def make_tasks(env: EnvConfig, arguments: list[str]) -> JSON:
    """The rows by split, and warnings, of ``python -m agentlightning.environments NAME arguments…``.

    ConfigError or DataError with the child's sentence.
    """
    name = _name(env)
    process = await asyncio.create_subprocess_exec(
        interpreter(name.kind, env.python),
        *("-m", "agentlightning.environments", str(name), *arguments),
        env={**inheritable(os.environ), "PYTHONSAFEPATH": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        process.stdin.write(secrets_line({}))
        output = await process.stdout.read()
        await process.wait()
        said = (await errors).decode(errors="replace").strip()
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer: JSON = orjson.loads(output)
    except orjson.JSONDecodeError as cause:
        raise DataError(f"env {name}: its tasks could not be made: {said[-500:]}") from cause
    if "error" in answer:
        kind: type[InputError] = ConfigError if answer["error"] in ("ConfigError", "MissingExtraError") else DataError
        raise kind(str(answer["message"]))
    return answer


def worker_python(config: Config) -> str:
    """The Python of the run's workers. ConfigError where the environment's is not here."""
    if config.env is None or not (config.agent.run or "").startswith(ENVIRONMENT):
        return sys.executable
    return interpreter(_name(config.env).kind, config.env.python)


def _name(env: EnvConfig) -> EnvironmentName:
    return EnvironmentName.parse(env.name, env.options)
