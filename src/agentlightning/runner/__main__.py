"""The worker process: ``python -m agentlightning.runner --server URL --run RUN (--agent SPEC | --command CMD) …``.

Started by the supervisor (with --child: it then ends with its parent) or by ``agl worker``. Reads the server's key from
AGL_SERVER_KEY. Exit codes: 0 stopped; 2 what the user gave is wrong; 75 an agent hung the process: start another; 1 else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from agentlightning.children import end_with_parent
from agentlightning.errors import AgentLightningError
from agentlightning.runner.command import CommandRunner, without_proxy
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.runner.processes import kill_marked
from agentlightning.runner.user_code import load
from agentlightning.runner.worker import BEAT_S, Worker
from agentlightning.store.base import LEASE_S
from agentlightning.store.client import LightningStoreClient


def main(arguments: list[str] | None = None) -> int:
    """Run a worker until it is stopped; returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.child:
        end_with_parent()
    server_key = os.environ.pop("AGL_SERVER_KEY", "")  # nothing that an agent starts shall have it
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = without_proxy(os.environ, options.server)
    mark = os.environ["AGL_PROCESS_MARK"] = secrets.token_hex(8)  # inherited by whatever agents start
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_work(options, server_key))
    except AgentLightningError as error:
        sys.stderr.write(f"worker: {error}\n")
        return error.exit_code
    finally:
        kill_marked(f"AGL_PROCESS_MARK={mark}")


async def _work(options: argparse.Namespace, server_key: str) -> int:
    threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="agent")
    try:
        reward = load(options.reward, ("task", "result"), "reward function") if options.reward else None
        runner: FunctionRunner | CommandRunner
        if options.command:
            runner = CommandRunner(options.command, scored=reward is not None)
        else:
            runner = FunctionRunner(load(options.agent), threads, scored=reward is not None)
    except AgentLightningError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    store = LightningStoreClient(options.server, server_key)
    async with store:
        execution = Execution(
            store=store,
            server_url=options.server,
            model=options.model,
            runner=runner,
            reward=reward,
            threads=threads,
            abandon_s=options.abandon_s,
        )
        worker = Worker(
            store,
            execution,
            open_store=lambda: LightningStoreClient(options.server, server_key),
            run_id=options.run,
            worker_id=options.worker_id,
            concurrency=options.concurrency,
            boot=lambda: store.boot,
            lease_s=options.lease_s,
            beat_s=options.beat_s,
            blocked_s=options.blocked_s,
            grace_s=options.grace_s,
            watch_interpreter=True,
        )
        for sign in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sign, worker.stop)
        code = await worker.run()
    if isinstance(runner, CommandRunner):
        runner.close()
    _end_now(code)
    return code
