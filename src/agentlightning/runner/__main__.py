"""The worker process: ``python -m agentlightning.runner --server URL --run RUN (--agent SPEC | --command CMD) …``.

Started by the supervisor (with --child: it then ends with its parent, which hands it the server's key) or by ``agl
worker``, which has it in AGL_SERVER_KEY. It may be the first process of a container. Exit codes: 0 stopped; 2 what the user
gave is wrong; 75 an agent hung the process: start another; 1 else.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from os import _exit
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from agentlightning.config.agent import AgentConfig, NoSandbox, sandbox_of_run
from agentlightning.config.external import ExternalModelConfig, agent_model, external_name, secret_variables
from agentlightning.config.run import parse_settings, private_fields
from agentlightning.errors import AgentLightningError, ConfigError, StoreError, printable
from agentlightning.gateway.connection_limit import raise_file_limit
from agentlightning.runner.air import air_of_run
from agentlightning.runner.attempt import CURRENT, attributed_task
from agentlightning.runner.command import without_proxy
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.runner.guardian import Guardian
from agentlightning.runner.llm_judge import gateway_judge
from agentlightning.runner.sandboxes import CommandAgent, StartedRunner, start_runner, store_folders
from agentlightning.runner.scoring import Scorer, load_scorers
from agentlightning.runner.shared_process import run_loop, share_process, watch_signals
from agentlightning.runner.user_code import load
from agentlightning.runner.worker import HEARTBEAT_INTERVAL_S, Worker, WorkerOptions
from agentlightning.runtime.children import end_with_parent, leave_orphans_to_parent
from agentlightning.runtime.log_lines import escape_last_resort, replace_unprintable
from agentlightning.runtime.process_secrets import KEY, OWN_SECRETS, add_key_options, shown_above, take_key
from agentlightning.runtime.watchdog import beat_to_parent
from agentlightning.store.base import LEASE_S
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.scan import find_run
from agentlightning.store.templates import TemplateReader
from agentlightning.tracing.buffer import SpanBuffer
from agentlightning.tracing.frameworks import (
    enable_instrumentations,
    find_instrumentations,
)
from agentlightning.tracing.propagation import ContextPropagator, ImportHook

POLICY = "policy"
"""Model name given to agents where the run's policy answers to every name."""


def main(arguments: list[str] | None = None) -> int:
    """Run a worker until it is stopped; returns its exit code."""
    options = _parser().parse_args(arguments)
    leave_orphans_to_parent()
    escape_last_resort()
    replace_unprintable()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a process that its guardian ends (SIGABRT) says where its threads were
    try:
        take_key(options.key_file, options.key_fd)
    except ConfigError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    handed_down = end_with_parent() if options.child else {}
    os.environ.update(handed_down)
    server_key = os.environ.get(KEY, "")
    _forget(*OWN_SECRETS)
    beat_to_parent().working = False  # what agents do to the event loop is judged here (heartbeat.py)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = without_proxy(os.environ, options.server)
    if options.agent:  # its agents' connections are this process's; programs keep the limit they were written for
        raise_file_limit()
    share_process()
    watch_signals()
    guardian = Guardian(options.agent_user)
    os.environ |= guardian.environment
    connections = ConnectionPool()
    with ThreadPoolExecutor(options.concurrency, thread_name_prefix="agent") as threads:
        try:
            judge = gateway_judge(options.server, options.model or POLICY, connections)
            reward = load_scorers(options.reward, threads, judge) if options.reward else None
            _forget(*handed_down)  # judges have read their keys
            agent = FunctionRunner(load(options.agent), threads, scored=reward is not None) if options.agent else None
            config = asyncio.run(_config_of_run(options, server_key))
            _forget(*secret_variables(config))
            event_loop = _agent_settings(config, "event_loop").event_loop
        except AgentLightningError as error:
            return _cannot_start(error)
        process = _Process(
            options=options,
            server_key=server_key,
            config=config,
            agent=agent,
            reward=reward,
            threads=threads,
            connections=connections,
            guardian=guardian,
        )
        return run_loop(_work(process), event_loop, attributed_task, process.working.is_set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """The parts of this process that are there before its event loop."""

    options: argparse.Namespace
    server_key: str
    config: Mapping[str, Any]
    """The run's configuration in the store: workers anywhere do alike."""
    agent: FunctionRunner | None
    reward: Scorer | None
    threads: Executor
    connections: ConnectionPool
    guardian: Guardian
    working: threading.Event = field(default_factory=threading.Event)
    """Set once agents may run; Ctrl-C ends the process before."""


async def _config_of_run(options: argparse.Namespace, server_key: str) -> Mapping[str, Any]:
    if not options.child:  # a person started it: a server that is away is waited for, for half a minute
        sys.stderr.write(f"note: asking {options.server} for run {options.run}\n")
    async with LightningStoreClient(options.server, server_key) as store:
        return (await find_run(store, options.run)).config


def _cannot_start(error: AgentLightningError) -> int:
    sys.stderr.write(f"worker: {printable(str(error))}\n")
    return error.exit_code if isinstance(error, StoreError) else 2


async def _work(process: _Process) -> int:
    options, config = process.options, process.config
    store = LightningStoreClient(options.server, process.server_key)
    async with store:
        try:
            started = await _start(process, store)
            air = await air_of_run(options.run, store, process.threads)
            model = options.model or _agent_model(config)
            private = private_fields(config)
            traced = not options.command and _trace_agents(options, config)
        except AgentLightningError as error:
            return _cannot_start(error)
        execution = Execution(
            store=store,
            server_url=options.server,
            model=model,
            runner=started.runner,
            reward=process.reward,
            connections=process.connections,
            templates=TemplateReader(store),
            abandon_s=options.abandon_s,
            air=air,
            private=private,
            traced=traced,
            delivery_timeout_s=options.lease_s,
        )
        worker = Worker(
            execution,
            _worker_options(options),
            open_store=lambda: LightningStoreClient(options.server, process.server_key),
            boots=lambda: store.boots,
            guardian=process.guardian,
            left=started.left,
        )
        if not options.child:  # a person started it, and sees nothing else
            sys.stderr.write(f"note: working for run {options.run} at {options.server}, until Ctrl-C\n")
        handle = _on_signal(worker, options)
        for sign in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sign, handle)
        process.working.set()
        try:
            code = await worker.run()
        except AgentLightningError as error:
            sys.stderr.write(f"worker: {printable(str(error))}\n")
            code = error.exit_code
    if process.agent is not None:
        process.agent.close()
    _end_now(code, process.guardian)


def _worker_options(options: argparse.Namespace) -> WorkerOptions:
    return WorkerOptions(
        run_id=options.run,
        worker_id=options.worker_id,
        concurrency=options.concurrency,
        lease_s=options.lease_s,
        heartbeat_s=options.heartbeat_s,
        blocked_s=options.blocked_s,
        drain_timeout_s=options.drain_timeout_s,
    )


def _agent_model(config: Mapping[str, Any]) -> str:
    """The model name that the run's configuration in the store has for agents: workers anywhere do alike."""
    table = config.get("model")
    path = table.get("path") if isinstance(table, Mapping) else None
    name = external_name(path) if isinstance(path, str) else None
    if name is None:
        return POLICY
    tables = config.get("external")
    own = tables.get(name) if isinstance(tables, Mapping) else None
    settings = parse_settings(ExternalModelConfig, own or {}, f"external.{name}")
    try:
        return agent_model(name, {name: settings})
    except ValueError as cause:
        raise ConfigError(str(cause)) from cause


def _on_signal(worker: Worker, options: argparse.Namespace) -> Callable[[], None]:
    """The handler of SIGTERM and SIGINT: the first drains the worker, a second one ends its agents at once."""
    asked = False

    def handle() -> None:
        nonlocal asked
        # A child is told twice where its parent closes its standard input, or dies: it has its time all the same.
        worker.stop(now=asked and not options.child)
        if not asked and not options.child and worker.acting:
            running, limit_s = len(worker.acting), options.drain_timeout_s
            sys.stderr.write(f"note: draining: {running} running, which get {limit_s:g} s; again ends them at once\n")
        asked = True

    return handle


async def _start(process: _Process, store: LightningStoreClient) -> StartedRunner:
    """The runner of the agent, in the sandbox that the run's configuration in the store asks for: workers anywhere do alike.
    ConfigError where it cannot be had here."""
    options, sandbox = process.options, sandbox_of_run(dict(process.config))
    if options.agent_user is not None:
        if process.agent is not None or not isinstance(sandbox, NoSandbox):
            raise ConfigError("--agent-user: has no effect on function agents and in a sandbox; leave it out")
        process.guardian.check()
    elif isinstance(sandbox, NoSandbox) and (shown := shown_above({KEY: process.server_key})):
        raise ConfigError(
            f"{shown}, above this worker, shows it in its environment to the agents that run here; start the worker without "
            "that process (in a container: init: false), or give the key by --key-file, --key-fd or a systemd credential"
        )
    if process.agent is None:
        hidden = [Path(path) for path in options.hidden or ()] + store_folders(process.config, options.server)
        hidden += [] if options.key_file is None else [options.key_file]
        command = CommandAgent(
            command=options.command,
            sandbox=sandbox,
            server_url=options.server,
            run_id=options.run,
            worker_id=options.worker_id,
            scored=process.reward is not None,
            hidden=hidden,
            guardian=process.guardian,
        )
        return await start_runner(command, store)
    if not isinstance(sandbox, NoSandbox):
        raise ConfigError(
            "sandbox: this run's agents run in a sandbox, and a function agent cannot be isolated from its worker; "
            "expected a command"
        )
    return StartedRunner(runner=process.agent)


def _forget(*names: str) -> None:
    """Take variables out of the environment: nothing that an agent starts shall have them."""
    for name in names:
        os.environ.pop(name, None)


def _trace_agents(options: argparse.Namespace, config: Mapping[str, Any]) -> bool:
    """Returns whether the run's agents are traced, as its configuration in the store says: workers anywhere do alike."""
    agent = _agent_settings(config, "trace")
    if agent.trace is not False:
        trace_agents(agent, options.server)
    return agent.trace is not False


def _agent_settings(config: Mapping[str, Any], *names: str) -> AgentConfig:
    """The run's settings of these names; the others have their defaults."""
    table = config.get("agent")
    told = {name: table[name] for name in names if name in table} if isinstance(table, dict) else {}
    return parse_settings(AgentConfig, told, "agent")


def trace_agents(agent: AgentConfig, server_url: str) -> None:
    """Observe the function agents of this process. Comes after the agent's module, whose own TracerProvider is kept.
    ConfigError where an instrumentation or an installed framework adapter is missing or does not fit."""
    ContextPropagator(server_url).install()
    if agent.instrumentations:
        from agentlightning.tracing.tracer import Tracer, install

        found = find_instrumentations(agent.instrumentations)
        enable_instrumentations(found, install(Tracer(current_spans)))
    else:
        ImportHook({"opentelemetry.trace": _trace}).start()


def current_spans() -> SpanBuffer | None:
    """Returns where spans of this context go."""
    attempt = CURRENT.get(None)
    return attempt.spans if attempt is not None else None


def _trace(_: ModuleType) -> None:
    from agentlightning.tracing.tracer import Tracer, install

    install(Tracer(current_spans))


def _end_now(code: int, guardian: Guardian) -> NoReturn:
    """End without waiting for what agents left running: their threads and tasks must not keep the process."""
    try:
        guardian.kill_left()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk, a stream that an agent closed: nothing keeps the process
        _exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentlightning.runner", description="A worker process.")
    parser.add_argument("--server", required=True, help="URL of the server")
    parser.add_argument("--run", required=True, help="id of the run whose rollouts it claims")
    agent = parser.add_mutually_exclusive_group(required=True)
    agent.add_argument("--agent", help="file.py:name, package.module:name or a file.pkl")
    agent.add_argument("--command", help="any program, with its arguments")
    parser.add_argument("--hidden", action="append", help="folder that an agent in a sandbox does not see")
    parser.add_argument("--reward", action="append", help="reward function, named like an agent, or the table as JSON")
    parser.add_argument("--model", help="model name given to agents")
    parser.add_argument("--concurrency", type=_places, default=8, help="attempts at a time")
    parser.add_argument("--worker-id", default=f"{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--child", action="store_true", help="end when the parent does")
    parser.add_argument("--agent-user", type=int, metavar="UID", help="user that programs run as")
    add_key_options(parser)
    parser.add_argument("--lease-s", type=float, default=LEASE_S, help="how long a claim lasts without a heartbeat")
    parser.add_argument("--heartbeat-s", type=float, default=HEARTBEAT_INTERVAL_S, help="seconds between heartbeats")
    parser.add_argument("--blocked-s", type=float, default=60.0, help="how long an agent may block the event loop")
    parser.add_argument(
        "--drain-timeout-s", type=float, default=5.0, help="what running attempts get when the worker drains"
    )
    parser.add_argument("--abandon-s", type=float, default=5.0, help="what an interrupted agent gets before it is hung")
    return parser


def _places(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
