"""verifiers: the kind ``verifiers:TASKSET?option=value``: tasks, rewards and agent program of a taskset of its version 1.

TASKSET is a folder with its package, or the id of one that is installed. Options: harness (the agent program, by default the
taskset's own, else "null": the model alone), runtime ("subprocess": on this machine), and the taskset's own settings.
Episodes run in an EnvServer, one for each worker, that is started by the first of them. Only single-agent tasksets.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from agentlightning.environments.base import EpisodeResult, Split, out_of_limits
from agentlightning.errors import ConfigError, InfrastructureError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM
from agentlightning.runtime.children import end_with_parent, start_child, stop_child

HELD_OUT = 5
"""One task of so many is held out: a taskset has no splits, and may be endless."""
KEY_HEADER = "x-agl-attempt-key"
"""Carries an attempt's key to the server, which takes keys by the name of a variable of its own alone."""
WATCH_S = 1.0
"""Seconds between two looks whether the server of a running episode is alive."""


class Verifiers:
    """The tasks of one taskset."""

    def __init__(
        self, taskset: str, *, harness: str | None = None, runtime: str = "subprocess", **settings: Any
    ) -> None:
        self._folder, identifier = find_package(taskset)
        if self._folder is not None:
            sys.path.insert(0, self._folder)
        from verifiers.v1.utils.loaders import default_harness_id, load_taskset, resolve_env_config

        try:
            own = default_harness_id(identifier) == identifier
            agent = {
                "harness": None if own and harness is None else {"id": harness or "null"},
                "runtime": {"type": runtime},
            }
            config = {"taskset": {"id": identifier, **settings}, "agent": agent}
            resolved = resolve_env_config(config)
            self._taskset = load_taskset(resolved.taskset)
        except Exception as cause:  # of pydantic, of its imports, of the taskset's own code
            raise ConfigError(f"env verifiers:{taskset}: {cause}"[:1000]) from cause
        self._config = config
        self._server: subprocess.Popen[bytes] | None = None
        self._socket_folder = ""

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        chosen = (task for task in self._taskset if (task.data.idx % HELD_OUT == HELD_OUT - 1) == (split == "val"))
        for task in itertools.islice(chosen, limit):
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            data.pop("idx", None)
            yield {"index": task.data.idx, "task": data}

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        from verifiers.v1.clients import EvalClientConfig
        from verifiers.v1.serve.client import EnvClient
        from verifiers.v1.types import SamplingConfig

        server = self._running_server()
        client = EnvClient(self._address())
        model = EvalClientConfig(
            base_url=llm.base_url, api_key_var=f"AGL_API_KEY_{uuid4().hex}", headers={KEY_HEADER: llm.api_key}
        )
        data = {**task["task"], "idx": task["index"]}
        playing = asyncio.ensure_future(
            client.run(task_data=data, client=model, model=llm.model, sampling=SamplingConfig())
        )
        try:
            while not playing.done():
                await asyncio.wait({playing}, timeout=WATCH_S)
                if not playing.done() and server.poll() is not None:
                    raise InfrastructureError(
                        f"the server of verifiers ended with code {server.returncode}; its output says why"
                    )
            return episode_result(playing.result())
        except RuntimeError as cause:
            raise InfrastructureError(f"verifiers could not play a task: {cause}"[:1000]) from cause
        finally:
            playing.cancel()
            await asyncio.wait({playing})
            await client.close()

    def close(self) -> None:
        if self._server is not None:
            stop_child(self._server)
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._server = None

    def _running_server(self) -> subprocess.Popen[bytes]:
        """The server, which is started where there is none, or none any more."""
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._socket_folder = tempfile.mkdtemp(prefix="agl-verifiers-")
            arguments = [__name__, self._address(), self._folder or "", orjson.dumps(self._config).decode()]
            # Its agent programs are started by uv, which is installed beside this Python.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            self._server = start_child(arguments, env={"PATH": path})
        return self._server

    def _address(self) -> str:
        return f"ipc://{self._socket_folder}/server"


def find_package(taskset: str) -> tuple[str | None, str]:
    """The folder to import a taskset from, None where it is installed, and its id. ConfigError for a folder without one
    package."""
    folder = Path(taskset).resolve()
    if not folder.is_dir():
        if "/" in taskset and taskset.startswith((".", "/", "~")):
            raise ConfigError(f"env verifiers:{taskset}: no such folder")
        return None, taskset
    if (folder / "__init__.py").exists():
        return str(folder.parent), folder.name
    packages = [*folder.glob("*/__init__.py"), *folder.glob("src/*/__init__.py")]
    named = [one for one in packages if one.parent.name == folder.name.replace("-", "_").lower()] or packages
    if len(named) != 1:
        found = ", ".join(sorted(one.parent.name for one in named)) or "none"
        raise ConfigError(f"env verifiers:{taskset}: expected a folder with one package, found {found}")
    return str(named[0].parents[1]), named[0].parent.name


def episode_result(episode: Any) -> EpisodeResult:
    """The result of an episode of verifiers: its rewards by name, unweighted, and its metrics are metrics.

    VerifierError where the taskset's code failed, InfrastructureError where anything else did.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    full = [error for error in errors if error.type == "ProviderError" and out_of_limits(error.message)]
    if len(episode.traces) != 1:
        failed = f": {errors[-1].type}: {errors[-1].message}" if errors else ""
        raise InfrastructureError(f"expected one agent in an episode, got {len(episode.traces)}{failed}"[:1000])
    (trace,) = episode.traces
    if errors and not full and not trace.ok:
        kind = VerifierError if errors[-1].type == "TaskError" else InfrastructureError
        raise kind(f"{errors[-1].type}: {errors[-1].message}"[:1000])
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    if not scores and not full:
        raise VerifierError("the taskset gave no reward; give it a function with @vf.reward")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    truncated = {"truncated": float(bool(full) or trace.is_truncated)}
    return EpisodeResult(reward=float(trace.reward), metrics={**metrics, **scores, **truncated})


def serve(address: str, folder: str, config: JSON) -> None:
    """Play episodes until SIGTERM, or until the worker ends."""
    if folder:
        sys.path.insert(0, folder)
    from verifiers.v1.serve.server import EnvServer
    from verifiers.v1.utils.loaders import resolve_env_config

    class Server(EnvServer):  # type: ignore[misc]
        async def _run(self, request: Any, *arguments: Any) -> Any:
            variable = request.client.api_key_var
            os.environ[variable] = request.client.headers.pop(KEY_HEADER)
            try:
                return await super()._run(request, *arguments)
            finally:
                del os.environ[variable]

    def end(*_: object) -> None:
        """It cleans up on KeyboardInterrupt, which a second signal must not cut short."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    Server.run_server(config=resolve_env_config(config), address=address)


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1], sys.argv[2], orjson.loads(sys.argv[3]))
