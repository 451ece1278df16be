"""Processes: everything that runs beside the trainer for one run, started and ended together.

The trainer, the evaluation and the check use it. It knows which process needs what; not what any of them does.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from agentlightning.config.engine import EngineConfig, VllmServerSampler
from agentlightning.config.external import secret_variables
from agentlightning.config.prompts import CONFIG_SOURCE
from agentlightning.config.run import LIMITS_RESOURCE, Config, LimitsConfig, ModelConfig, run_record
from agentlightning.engines.base import (
    DEFAULT_POLICY,
    Endpoints,
    Engine,
    EngineNeeds,
    EngineSetup,
    PolicyEngines,
    Support,
    make_engine,
)
from agentlightning.engines.folders import MANIFEST, check_model, find_model, window_note
from agentlightning.errors import AgentLightningError, ConfigError, MissingExtraError, RunTakenError
from agentlightning.gateway.external_keys import host_of
from agentlightning.records import JSON, Resource, RunState
from agentlightning.runner.sandboxes import CommandAgent, check_sandbox, store_folders
from agentlightning.runtime.disk import make_private_folder
from agentlightning.runtime.watchdog import STALL_TIMES, HangLimits, Watchdog
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.tracing.frameworks import find_instrumentations
from agentlightning.trainer.agent_source import check_source
from agentlightning.trainer.checkpoint import RunFolder, make_default_folder
from agentlightning.trainer.environments import worker_python
from agentlightning.trainer.interrupts import run_watched
from agentlightning.trainer.policies import opponent_configs, policy_configs
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.supervisor import Supervisor, console_process

T = TypeVar("T")
WORKERS = "workers of the trainer"
"""Name of the token that a trainer's own workers hold."""
UPDATE_TIMEOUT_S = 5.0
"""The server may be what failed: its client would try for half a minute to reach it."""

log = logging.getLogger(__name__)


class Processes:
    """The processes of one run, started and ended together: server, store client, engine, workers.

    With an external model there are no engine and no policies; with a store at ``http://…`` no server is started. Making
    one starts nothing: it raises ModelError, MissingExtraError or ConfigError where something is missing.
    """

    store: LightningStore
    engine: Engine
    policies: dict[str, JSON]
    """Values of the policies' resources, by alias."""
    model: Path
    """Folder of the first policy's model; unset where there is none."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        *,
        needs: Mapping[str, EngineNeeds] | None = None,
        register: Callable[[LightningStore], Awaitable[object]] | None = None,
        progress: Progress | None = None,
        console: bool = False,
        beside: Processes | None = None,
        learns: bool = True,
    ) -> None:
        """needs: by policy, parts that its engine keeps because its algorithm asks for them. register: makes the run known
        to the store, which learns how it ended, too; None: it is known, and its state stays as it is. console: also start
        the web console. beside: processes of another run that have begun, whose server serves this run, too. learns: False
        starts no learner, where the engine can do without."""
        url = config.store.url if beside is None else beside.server_url
        self._config, self._folder = config, folder
        self._register, self._console = register, console
        self._progress = progress or Silent()
        self._trained = policy_configs(config)
        self._configs = self._trained | opponent_configs(config)
        self._learns = learns
        self._server = url if url.startswith(("http://", "https://")) else None
        self._elsewhere = self._server is not None and beside is None
        self._watchdog = _watchdog(config)
        table = config.model_dump()
        self._secret_variables = secret_variables(table)
        self._supervisor = Supervisor(
            folder.path,
            url,
            None if beside is None else beside.server_key,
            watchdog=self._watchdog,
            keys={
                "server": _values(secret_variables({name: table[name] for name in ("external", "engine", "policies")})),
                "worker": _values(secret_variables(table["agent"])),  # of judges at endpoints of their own
            },
            withhold=self._secret_variables,
        )
        self._stack = AsyncExitStack()
        self._check()
        self._needs = needs or {}
        self._engines = {alias: self._engine(alias) for alias in self._configs}
        self._check_opponents()
        self.engine = self._joined_engines()

    def _joined_engines(self) -> Engine:
        several = self._config.policies or self._config.agent_model is not None
        return PolicyEngines(self._engines) if several else self._engines[DEFAULT_POLICY]

    def _work_dir(self, alias: str) -> Path:
        folder = self._folder.path
        return folder / "policies" / alias if self._config.policies else folder

    def _engine(self, alias: str, model: Path | None = None) -> Engine:
        own, needed = self._configs[alias], self._needs.get(alias, EngineNeeds())
        learns = self._learns or not engine_support(own, needed).serves
        setup = engine_setup(
            own,
            needed,
            model=model,
            work_dir=self._work_dir(alias),
            watchdog=self._watchdog,
            withhold=self._secret_variables,
            learns=learns and alias in self._trained,
        )
        return make_engine(setup)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._folder.held())
            self._folder.create(self._config)
            # The server goes last: it finishes what it accepted.
            stack.push_async_callback(self._supervisor.stop)
            models = await self._find_models()
            stack.push_async_callback(self.engine.close)
            starting = asyncio.ensure_future(self.engine.start())
            stack.push_async_callback(_abandon, starting)
            self._progress.phase("starting: server", 1, 3)
            if self._server is None:
                make_default_folder(self._config.store.url)
                self._server = await self._supervisor.start_server(arguments=key_arguments(self._config))
            client = LightningStoreClient(self._server, self._supervisor.server_key)
            self.store = await stack.enter_async_context(client)
            # From here on the store has the run, and how it ended: one whose engine cannot start is listed as failed.
            if self._register is not None:
                await self._register(self.store)
                await stack.enter_async_context(record_run_status(self.store, self._folder.run_id))
            await put_gateway_settings(self._config, self._folder.run_id, self.store)
            if self._console:
                # Beside the server where it can be, so that who looks takes nothing from it.
                read = self._server if self._config.store.url.startswith("memory:") else self._config.store.url
                log = self._folder.path / "logs" / "console.log"
                shown = console_process(read, self._supervisor.server_key, log, self._secret_variables)
                self._progress.note(f"console {await stack.enter_async_context(shown)}")
            if self._configs:
                parts = "sampler and learner" if self._learns else "sampler"
                self._progress.phase(f"starting: {parts}", 2, 3)
            served = await starting
            engines = (
                engine for alias, engine in self._engines.items() if self._configs[alias].engine.device == "auto"
            )
            for device in sorted({engine.device for engine in engines} - {""}):
                self._progress.note(f"device {device} (auto)")
            self.policies = {
                alias: self._policy(alias, await self._tokenizer(model), served[alias])
                for alias, model in models.items()
            }
            if models:
                self.model = next(iter(models.values()))
            self._stack = stack.pop_all()
        return self

    async def _find_models(self) -> dict[str, Path]:
        if self._configs:
            self._progress.phase("starting: model", 0, 3)
        for name in self._hub_models:
            self._progress.note(f"model.path {name}: no such folder here; asking the Hugging Face hub")
        found: dict[str, Path] = {}
        for alias, own in self._configs.items():
            # In a thread: a download takes minutes in which Ctrl-C must be heard.
            model = (await asyncio.to_thread(find_model, own.model.path)).resolve()
            said, found[alias] = await asyncio.to_thread(
                with_chat_template, model, own.model, self._work_dir(alias) / "model"
            )
            for sentence in filter(None, [*said, window_note(model)]):
                self._progress.note(f"{alias}: {sentence}" if self._config.policies else sentence)
            if found[alias] != model:
                self._engines[alias] = self._engine(alias, found[alias])
                self.engine = self._joined_engines()
        return found

    @property
    def policy(self) -> JSON:
        """Of the first policy that is trained: the one whose name agents get as `llm.model`."""
        return next(iter(self.policies.values()))

    @property
    def agent_model(self) -> str:
        """The model name that agents get as `llm.model`."""
        return self._config.agent_model or str(self.policy["model"])

    async def __aexit__(self, *exception: Any) -> None:
        await self._stack.__aexit__(*exception)

    async def start_workers(self, tell: Callable[[str], None]) -> None:
        """Start the configured workers, who hold a token of this run until they have ended; where there are none, tell how
        to start one."""
        agent = self._config.agent
        arguments = [word for spec in agent.reward_specs for word in ("--reward", spec)]
        arguments += ["--server", str(self._server), "--run", self._folder.run_id]
        if agent.workers == 0:
            line = shlex.join(["agl", "worker", agent.run or str(agent.command), *arguments])
            tell(f"waiting for workers; start one with: AGL_SERVER_KEY=… {line}")
            token = shlex.join(["agl", "tokens", "create", "--role", "worker", "--run", self._folder.run_id])
            tell(f"a key for workers of this run is made by: {token} --server {self._server}")
            return
        arguments += ["--agent", agent.run] if agent.run is not None else ["--command", str(agent.command)]
        if agent.command is not None:
            arguments += ["--hidden", str(self._folder.path.parent.resolve())]
        arguments += ["--concurrency", str(agent.concurrency), "--model", self.agent_model]
        token = await self._stack.enter_async_context(worker_token(self.store, self._folder.run_id))
        self._stack.push_async_callback(self._supervisor.stop_workers)
        self._supervisor.start_workers(agent.workers, arguments, token, worker_python(self._config))

    @property
    def server_url(self) -> str:
        """Address of the run's server."""
        return str(self._server)

    @property
    def server_key(self) -> str:
        """The key of the run's server."""
        return self._supervisor.server_key

    def hung(self) -> int:
        """Number of processes that hung and were killed."""
        return self._watchdog.kills.total()

    def pids(self) -> dict[str, int]:
        """Process ids of the server and the workers, by name."""
        return self._supervisor.pids()

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; if a child cannot be kept running meanwhile, cancel it and raise that child's error."""
        return await run_watched(work, self._supervisor.watch(), *(one.watch() for one in self._engines.values()))

    async def _tokenizer(self, model: Path) -> str | dict[str, str]:
        """The folder, for a server of this host; one that ran already may be elsewhere, and finds files in the store."""
        return await put_tokenizer(self.store, self._folder.run_id, model) if self._elsewhere else str(model)

    def _policy(self, alias: str, tokenizer: str | dict[str, str], served: Endpoints) -> JSON:
        config, seed = self._config, self._config.trainer.seed
        model = alias if config.policies else Path(config.model.path).name
        if config.policies:  # two policies that are asked the same must not draw the same
            seed = int.from_bytes(hashlib.blake2b(f"{seed} {alias}".encode(), digest_size=4).digest(), "big")
        return policy_value(config, model, tokenizer, served, self._engines[alias].support, seed)

    def _check(self) -> None:
        self._hub_models = []
        for own in self._configs.values():
            local = Path(own.model.path).expanduser()
            # Where the folder above is here, a folder is meant, and no hub is asked.
            beside = local.parent != Path() and local.parent.is_dir()
            if local.exists() or beside or own.model.path.startswith((".", "/", "~")):
                check_model(local)
            else:
                self._hub_models.append(own.model.path)
        for package in ("fastapi", "structlog"):  # the first alone comes with other extras, too
            if self._server is None and importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, "server")
        if self._config.agent.workers:
            find_instrumentations(self._config.agent.instrumentations)
        check_source(self._config)
        self._check_sandbox()
        if self._server is None:
            check_keys(self._config)
        if self._config.agent.workers == 0 and self._server is None and not os.environ.get("AGL_SERVER_KEY"):
            raise ConfigError(
                "agent.workers: 0 means that workers are started elsewhere, and they need a key: set AGL_SERVER_KEY, with "
                "which `agl tokens create` makes one for them"
            )

    def _check_opponents(self) -> None:
        for alias in self._configs.keys() - self._trained.keys():
            if not self._engines[alias].support.serves:
                raise ConfigError(
                    f"policies.{alias}: the engine {self._configs[alias].engine.name!r} samples only what it trains; name "
                    f'another one, such as engine = {{ name = "local" }}'
                )

    def _check_sandbox(self) -> None:
        """Workers that are started here make sandboxes here."""
        agent = self._config.agent
        if agent.command is None or agent.workers == 0:
            return
        hidden = [self._folder.path.parent, *store_folders(run_record(self._config), self._server)]
        command = CommandAgent(
            command=agent.command,
            sandbox=self._config.sandbox,
            server_url=self._server or "http://127.0.0.1:8765",
            hidden=hidden,
        )
        if described := check_sandbox(command):
            self._progress.note(described)


def _watchdog(config: Config) -> Watchdog:
    hang_s, start_s = config.trainer.hang_timeout_s, config.trainer.start_timeout_s
    return Watchdog(HangLimits(hang_timeout_s=hang_s, stall_timeout_s=STALL_TIMES * hang_s, start_timeout_s=start_s))


def _values(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


async def _abandon(work: asyncio.Future[Any]) -> None:
    """End it: an engine whose start is cancelled ends what it started."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@asynccontextmanager
async def record_run_status(
    store: LightningStore, run_id: str, cancelled: RunState = "interrupted"
) -> AsyncIterator[None]:
    """Work that raises leaves its run as failed, or in the state `cancelled` where it was; that it is done, it says
    itself. What was raised goes on, even where the store cannot be told."""
    try:
        yield
    except RunTakenError:
        raise  # how the run ends is its new trainer's to say
    except BaseException as error:
        state: RunState = cancelled if isinstance(error, asyncio.CancelledError) else "failed"
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                await store.update_run(run_id, state=state)
        except (AgentLightningError, TimeoutError) as untold:
            log.warning("run %s is %s, which could not be recorded: %s", run_id, state, str(untold) or "no answer")
        raise


@asynccontextmanager
async def worker_token(store: LightningStore, run_id: str) -> AsyncIterator[str]:
    """The secret of a token for workers of this run, until they have ended.

    It does not expire, since a run may last for weeks. Those of a trainer that was killed are revoked first.
    """
    for token in await store.tokens(run_id):
        if token.name == WORKERS and token.role == "worker" and token.revoked_ns is None:
            await store.revoke_token(token.id)
    made = await store.create_token(WORKERS, "worker", run_id)
    try:
        yield made.secret
    finally:
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                await store.revoke_token(made.token.id)
        except (AgentLightningError, TimeoutError) as why:
            log.warning("token %s of the workers could not be revoked: %s", made.token.id, str(why) or "no answer")


def check_keys(config: Config) -> None:
    """ConfigError where a key is missing in this environment, which a server that is started here inherits."""
    for name, model in config.external.items():
        if model.key_env is not None and not os.environ.get(model.key_env, "").strip():
            raise ConfigError(
                f"external.{name}.key_env: the environment variable {model.key_env} is not set; it holds the key of "
                f"{model.url}"
            )


def key_arguments(config: Config) -> list[str]:
    """Arguments of a server of this run alone: who runs it is its operator, too, so its keys go where its configuration
    says."""
    keyed = [(model.key_env, host_of(model.url)) for model in config.external.values() if model.key_env is not None]
    for own in (policy_configs(config) | opponent_configs(config)).values():
        if own.engine.key_env is not None:
            keyed += [(own.engine.key_env, host) for host in _sampler_hosts(own.engine)]
    return [word for variable, host in keyed for word in ("--external-key", f"{variable}={host}")]


def _sampler_hosts(engine: EngineConfig) -> list[str]:
    """Returns where gateways reach the samplers of a policy; those that an engine starts have a port each."""
    sampler = engine.sampler
    if urls := engine.advertise or (sampler.urls if isinstance(sampler, VllmServerSampler) else ()):
        return [host_of(url) for url in urls]
    if engine.listen is None:
        return ["127.0.0.1"]
    host, _, port = engine.listen.rpartition(":")
    return [f"{host}:{int(port) + number}" for number in range(sampler.count)]


async def put_gateway_settings(config: Config, run_id: str, store: LightningStore) -> None:
    """Tell gateways and workers of external models, limits and prompts; a resumed run says again only what has changed."""
    resources = await store.resources(run_id)
    known = {one.name: one.value for one in resources if one.kind in ("external", "limits")}
    tables = {name: model.model_dump(mode="json") for name, model in config.external.items()}
    tables[LIMITS_RESOURCE] = config.limits.model_dump(mode="json")
    known = {LIMITS_RESOURCE: LimitsConfig().model_dump(mode="json")} | known
    changed = [
        Resource(run_id=run_id, name=name, kind="limits" if name == LIMITS_RESOURCE else "external", value=table)
        for name, table in tables.items()
        if known.get(name) != table
    ]
    for name, one in config.prompts.templates.items():
        found = await store.resources(run_id, name, latest=False)
        versions, value = [each for each in found if each.kind == "prompt_template"], one.template.value()
        made = [each.value for each in versions if each.value.get("source") == CONFIG_SOURCE]
        if not made or value != made[-1]:  # versions that others made since stay the newest
            parent = versions[-1].version if versions else None
            changed.append(Resource(run_id=run_id, name=name, kind="prompt_template", value=value, parent=parent))
    if changed:
        await store.put_resources(changed)


async def put_tokenizer(store: LightningStore, run_id: str, model: Path) -> dict[str, str]:
    """Keep the files with which gateways render prompts in the store; their hashes by name."""
    from agentlightning.rendering.model_folder import rendering_files  # here, since it loads tokenizers

    files = await asyncio.to_thread(rendering_files, model)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    await store.put_files(run_id, None, {hashes[name]: data for name, data in files.items()})
    return hashes


def policy_value(
    config: Config, model: str, tokenizer: str | dict[str, str], served: Endpoints, support: Support, seed: int
) -> JSON:
    """The value of a policy's resource, by which gateways sample it."""
    return {
        "model": model,
        "endpoints": list(served.urls),
        "tokenizer": tokenizer,
        "seed": seed if served.seeded else None,
        "served_model": served.served_model,
        "key_env": served.key_env,
        "logprobs": served.logprobs,
        "unsupported_params": config.agent.unsupported_params,
        # Calls with a grammar, penalties or cuts:
        "structured": "mask"
        if support.masks
        else ("context_only" if config.agent.unsupported_params == "drop" else "refuse"),
        "images": support.images,
    }


def with_chat_template(model: Path, config: ModelConfig, folder: Path) -> tuple[list[str], Path]:
    """Sentences about what the model's chat template lacks, and the model's folder; where another template than its own is
    used, `folder`, which is made of links to its files. ModelError where it has none and none is given."""
    from agentlightning.rendering.model_folder import CHAT_TEMPLATES  # here, since it loads tokenizers
    from agentlightning.rendering.renderer import Renderer

    own = Renderer(model, chat_template=config.chat_template, tool_syntax=config.tool_syntax)
    said = own.left_out()
    if own.chat_template is None:
        return said, model
    shutil.rmtree(folder, ignore_errors=True)
    make_private_folder(folder)
    for file in model.iterdir():
        if file.name not in ("chat_template.jinja", MANIFEST) and not file.name.startswith(CHAT_TEMPLATES):
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(own.chat_template, encoding="utf-8")
    return said, folder


def engine_setup(config: Config, needs: EngineNeeds, model: Path | None = None, **given: Any) -> EngineSetup:
    """The setup of one policy's configured engine; `given` are its fields that no configuration knows, `model` the model's
    folder where that is another than the configured one."""
    trainer = config.trainer
    if trainer.learning_rate is not None:
        given["learning_rate"] = trainer.learning_rate
    given["turns"] = trainer.max_staleness == 0  # else the learner updates while the sampler samples
    return EngineSetup(model=model or config.model.path, config=config.engine, seed=trainer.seed, needs=needs, **given)


def engine_support(config: Config, needs: EngineNeeds) -> Support:
    """Abilities of one policy's configured engine, before any of it is started."""
    return make_engine(engine_setup(config, needs, work_dir=Path())).support
