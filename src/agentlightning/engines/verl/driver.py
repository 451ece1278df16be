"""The process that drives verl: Ray's driver, the learner's operations on a pipe, and the sampler's HTTP endpoint.

    python -m agentlightning.engines.verl.driver --pipe N --listen N --options JSON

The engine starts it, in the interpreter that has verl. It ends when a part of verl ends: what the others hold is then of
no use, and the engine starts all of them again.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentlightning.engines import pipe as child_pipe
from agentlightning.engines.folders import first_line
from agentlightning.engines.sampler_address import SAMPLING_KEY
from agentlightning.engines.verl.engine import VerlOptions
from agentlightning.engines.verl.sampler_app import create_app
from agentlightning.errors import AgentLightningError, ConfigError, EngineError
from agentlightning.rendering.model_folder import end_ids
from agentlightning.runtime.children import end_with_parent
from agentlightning.runtime.log_lines import line_handler
from agentlightning.runtime.watchdog import BEATS, MAX_BEAT_S, ChildHeartbeat, RunningTime, beat_to_parent

if TYPE_CHECKING:
    from agentlightning.engines.verl.workers import VerlWorkers

END_S = 5.0
"""Seconds for calls in flight once the engine is closed."""

log = logging.getLogger("agentlightning.verl")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentlightning.engines.verl.driver")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor of the socket pair's end")
    parser.add_argument("--listen", type=int, required=True, help="descriptor of the sampler's listening socket")
    parser.add_argument("--hang-timeout", type=float, required=True, help="seconds that a rollout server may be silent")
    parser.add_argument("--options", required=True, help="VerlOptions as JSON")
    given = parser.parse_args(arguments)
    secrets = end_with_parent()
    heartbeat = beat_to_parent()
    heartbeat.working = False  # until there are operations: the engine itself bounds a start
    logging.basicConfig(level=logging.INFO, handlers=[line_handler("%(asctime)s verl %(message)s")], force=True)
    pipe: Connection = Connection(given.pipe)
    try:
        workers = _start(VerlOptions(**json.loads(given.options)))
    except AgentLightningError as error:
        pipe.send(("error", type(error).__name__, str(error)))
        return error.exit_code
    pipe.send(("ok", {"device": workers.device, "pids": workers.pids()}))
    listener = socket.socket(fileno=given.listen)
    asyncio.run(_serve(workers, pipe, listener, heartbeat, given.hang_timeout, secrets.get(SAMPLING_KEY, "")))
    return 0


def _start(options: VerlOptions) -> VerlWorkers:
    try:
        from agentlightning.engines.verl.workers import VerlWorkers
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"engine.options.python: {sys.executable} lacks the package {missing.name}; expected an interpreter with "
            "this package and its extra verl"
        ) from missing
    try:
        return VerlWorkers(options)
    except AgentLightningError:
        raise
    except Exception as cause:
        log.exception("verl did not start")
        raise EngineError(f"verl did not start: {type(cause).__name__}: {first_line(cause)}") from cause


async def _serve(
    workers: VerlWorkers,
    pipe: Connection,
    listener: socket.socket,
    heartbeat: ChildHeartbeat,
    hang_timeout_s: float,
    sampling_key: str,
) -> None:
    """Until the pipe closes, a part of verl's dies or hangs, or the engine says so by SIGTERM."""
    loop, ended, published = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    def call(method: str, *arguments: Any) -> Any:
        result = workers.call(method, *arguments)
        if method == "publish":
            loop.call_soon_threadsafe(published.set)
        return result

    def operate() -> None:
        child_pipe.serve(call, pipe, heartbeat)
        loop.call_soon_threadsafe(ended.set)

    def failed(error: Exception) -> None:
        from ray.exceptions import RayActorError

        log.error("sampling failed: %s", error)
        if isinstance(error, RayActorError):
            ended.set()

    folder = Path(workers.config.actor_rollout_ref.model.path)
    app = create_app(
        workers.client,
        context=workers.context,
        end_ids=end_ids(folder),
        on_error=failed,
        sampling_key=sampling_key,
        score=partial(score_prompt, workers.servers),
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S)
    await runner.setup()
    threading.Thread(target=operate, name="operations", daemon=True).start()
    waits: list[asyncio.Task[Any]] = [asyncio.create_task(event.wait()) for event in (published, ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not ended.is_set():  # calls wait in the socket until there is a version to stamp them with
        await web.SockSite(runner, listener).start()
        waits.append(asyncio.create_task(watch_servers(workers.servers, hang_timeout_s)))
        await asyncio.wait(waits[1:], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    pipe.close()
    import ray

    ray.shutdown()
    await runner.cleanup()


async def score_prompt(servers: Sequence[Any], ids: list[int]) -> list[list[float]]:
    """Log-probabilities of the tokens but the first, by each rollout server."""
    given = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    outputs = await asyncio.gather(
        *(
            server.generate.remote(request_id=uuid.uuid4().hex, prompt_ids=ids, sampling_params=dict(given))
            for server in servers
        )
    )
    # verl gives a list of alternatives for each token, and a filler for the one after the last.
    return [[first for first, *_ in one.extra_fields["prompt_logprobs"][:-1]] for one in outputs]


async def watch_servers(servers: Sequence[Any], hang_timeout_s: float) -> None:
    """Returns once a rollout server is dead, or silent for that time: calls would wait for it for ever."""
    beat_s = min(MAX_BEAT_S, hang_timeout_s / BEATS)
    silent = RunningTime(2 * beat_s)
    answers: list[asyncio.Future[Any]] = []
    while silent.tick() <= hang_timeout_s:
        answers = answers or [asyncio.ensure_future(server.__ray_ready__.remote()) for server in servers]
        await asyncio.wait(answers, timeout=beat_s)
        if all(answer.done() for answer in answers):
            dead = [place for place, answer in enumerate(answers) if answer.exception() is not None]
            if dead:
                log.error("rollout servers %s died: %s", dead, answers[dead[0]].exception())
                return
            answers = []
            silent.reset()
            await asyncio.sleep(beat_s)
    hung = [place for place, answer in enumerate(answers) if not answer.done()]
    log.error("rollout servers %s gave no sign of life for %g s", hung, hang_timeout_s)


if __name__ == "__main__":
    sys.exit(main())
