"""VerlEngine: one policy on verl, in a process of its own that drives Ray, its workers and its rollout servers.

Sampler and learner live and die together: if a part of verl ends, all of it is started again. Imports neither verl nor
torch: the process may run in another interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from agentlightning.config.engine import BETAS, EngineConfig
from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, EngineSetup, ForwardingEngine, Support
from agentlightning.engines.folders import find_model
from agentlightning.engines.pipe import ChildPipe, PipeEndedError
from agentlightning.engines.sampler_address import SAMPLING_KEY, SamplerAddress
from agentlightning.errors import ConfigError, EngineError, LearnerLostError, MissingExtraError
from agentlightning.runtime.children import end_session, stop_child
from agentlightning.runtime.disk import make_private_folder

SETTINGS = (
    *("options", "optimizer", "dtype", "device", "max_tokens_per_microbatch", "gradient_checkpointing"),
    *("listen", "advertise", "key_env"),
)
"""Settings of the table [engine] that the verl engine reads."""
KEYS: dict[str, tuple[str, ...]] = {
    "": ("python", "model_engine", "actor_rollout_ref", "trainer", "ray_kwargs"),
    "trainer": ("n_gpus_per_node", "nnodes"),
    "ray_kwargs": ("ray_init",),
    "actor_rollout_ref": ("hybrid_engine", "nccl_timeout", "model", "actor", "ref", "rollout"),
}
"""Keys of `options`: python is the interpreter, the others are verl's."""
OURS: dict[str, tuple[str, ...]] = {
    "model": ("path", "enable_gradient_checkpointing", "lora_rank", "lora"),
    "actor": (
        *("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
        *("use_dynamic_bsz", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "policy_loss"),
        *("loss_agg_mode", "loss_scale_factor", "entropy_coeff", "calculate_entropy", "use_kl_loss", "kl_loss_coef"),
        *("kl_loss_type", "ppo_epochs", "shuffle", "grad_clip", "checkpoint", "tau_pos", "tau_neg", "rollout_n"),
    ),
    "rollout": (
        *("temperature", "top_k", "top_p", "n", "do_sample", "prompt_length", "response_length", "val_kwargs", "agent"),
        *("multi_turn", "calculate_log_probs", "free_cache_engine", "enable_sleep_mode"),
    ),
}
"""Keys of verl below actor_rollout_ref that would have no effect: the loss, the batches and the calls are not verl's."""
DEVICE_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlOptions:
    """Options of the process that drives verl; see engines/verl/workers.py."""

    tree: dict[str, Any]
    """Values that take the place of verl's defaults."""
    model_engine: str = "dp"
    """verl's model engine: dp is FSDP."""
    reference: bool = False
    """Keep the weights that the engine was made with beside the policy's."""


def support(reference: bool) -> Support:
    """Without a value head, images and masks of logits."""
    return Support(
        engine="verl",
        losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
        terms=True,
        reference=reference,
    )


def check_options(config: EngineConfig) -> None:
    """ConfigError, naming the key, for an option that is not known; those of verl's own tree are checked by its process."""
    if config.optimizer.type != "adamw":
        raise ConfigError(f"engine.optimizer: expected adamw with the engine 'verl', got {config.optimizer.type!r}")
    options = config.options
    for place, known in KEYS.items():
        table = options.get(place, {}) if place else options
        path = f"engine.options.{place}." if place else "engine.options."
        if not isinstance(table, Mapping):
            raise ConfigError(f"engine.options.{place}: expected a table, got {table!r}")
        if unknown := [key for key in table if key not in known]:
            raise ConfigError(
                f"{path}{unknown[0]} is not known to the engine 'verl'; expected one of {', '.join(known)}"
            )
    for place, ours in OURS.items():
        if ignored := [key for key in options.get("actor_rollout_ref", {}).get(place, {}) if key in ours]:
            raise ConfigError(
                f"engine.options.actor_rollout_ref.{place}.{ignored[0]} has no effect or is not supported; the settings of "
                "this package say what is trained and sampled, leave it out"
            )
    python = options.get("python")
    if python is not None and not (isinstance(python, str) and Path(python).expanduser().is_file()):
        raise ConfigError(
            f"engine.options.python: expected the path of an interpreter that has verl installed, got {python!r}"
        )


def verl_options(setup: EngineSetup, model: Path) -> VerlOptions:
    """Options for a model in a folder."""
    engine = setup.config
    given = engine.options
    betas = list(engine.optimizer.betas or BETAS)
    actor: dict[str, Any] = {
        "use_dynamic_bsz": True,  # rows of any number, unlike verl's fixed micro-batches
        "ppo_max_token_len_per_gpu": engine.max_tokens_per_microbatch,
        "optim": {"lr": setup.learning_rate, "weight_decay": engine.optimizer.weight_decay, "betas": betas},
        "checkpoint": {
            "save_contents": ["model", "optimizer", "extra", "hf_model"],
            "load_contents": ["model", "optimizer", "extra"],
        },
    }
    ref: dict[str, Any] = {}
    # It samples while the policy learns, so that its weights and cache stay where they are.
    rollout: dict[str, Any] = {"name": "vllm", "tensor_model_parallel_size": 1, "free_cache_engine": False}
    rollout |= {"skip_tokenizer_init": False}  # stop texts are found in text
    model_engine = given.get("model_engine", "dp")
    if model_engine == "dp":
        actor["strategy"] = "fsdp2"
    if engine.dtype != "auto":
        rollout["dtype"] = engine.dtype
        for part in (actor, ref):
            if model_engine == "dp":
                precision = {"param_dtype": DEVICE_DTYPE[engine.dtype]}
                part["fsdp_config"] = {"dtype": engine.dtype, "mixed_precision": precision}
            else:
                part[model_engine] = {"dtype": engine.dtype}
    trainer: dict[str, Any] = {"n_gpus_per_node": 1, "nnodes": 1}
    if engine.device != "auto":
        trainer["device"] = engine.device
    ours = {
        "actor_rollout_ref": {
            "model": {"path": str(model), "enable_gradient_checkpointing": engine.gradient_checkpointing},
            "actor": actor,
            "ref": ref,
            "rollout": rollout,
        },
        "trainer": trainer,
    }
    tree = merged(ours, {key: value for key, value in given.items() if key not in ("python", "model_engine")})
    return VerlOptions(tree=tree, model_engine=model_engine, reference=setup.needs.reference)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one; where both have a value, `above` has it. {a: {x: 1, y: 2}}, {a: {y: 3}} -> {a: {x: 1, y: 3}}."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


WATCH_S = 0.1
MAX_RESTARTS = 5
"""Ends of verl within `RESTARTS_S`, after which it is not started again: the fault is not a passing one."""
RESTARTS_S = 600.0
GRACE_S = 20.0
"""Seconds in which Ray ends its processes."""

log = logging.getLogger(__name__)


class VerlEngine(ForwardingEngine):
    """The engine of `engine.name = "verl"`: made of a setup, whose `options` are verl's configuration."""

    def __init__(self, setup: EngineSetup) -> None:
        setup.expect_only(*SETTINGS)
        self._address = SamplerAddress.of(setup.config)
        check_options(setup.config)
        python = setup.config.options.get("python")
        self._python = None if python is None else str(Path(python).expanduser())
        if self._python is None and importlib.util.find_spec("verl") is None:
            raise MissingExtraError("verl", "verl")
        self._setup = setup
        self._log_file = setup.work_dir.resolve() / "logs" / "verl.log"
        self._folder = Path()
        self._listener: socket.socket | None = None
        self._pipe: ChildPipe | None = None
        self._ready: dict[str, Any] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()
        self._calls = 0
        self._lost = self._told = False
        """The learner is gone with what it had learned; and whoever drives the engine knows it, and will ask for another."""
        self._saved: Path | None = None
        """Folder of the weights that were saved or loaded last; None: the model's own."""
        self._version = 0
        self._unsaved = self._unpublished = False
        """The learner's weights are no longer those of `_saved`, or of `_version`."""
        self._begin: tuple[Path | None, int] = (None, 0)
        """The last folder that was published too, and its version: these serve when verl is started again."""

    @property
    def device(self) -> str:
        return str(self._ready.get("device", ""))

    @property
    def support(self) -> Support:
        return support(self._setup.needs.reference)

    def pids(self) -> dict[str, int]:
        return {} if self._pipe is None else {"driver": self._pipe.child.pid, **self._ready.get("pids", {})}

    async def start(self) -> dict[str, Endpoints]:
        self._folder = find_model(self._setup.model).resolve()
        make_private_folder(self._setup.work_dir)
        self._log_file.parent.mkdir(exist_ok=True)
        self._listener = self._address.listen()
        try:
            await self._start()
            await self.publish(0)
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep())
        urls = self._address.advertise or [self._address.url(self._listener)]
        rollout = self._setup.config.options.get("actor_rollout_ref", {}).get("rollout", {})
        raw = str(rollout.get("logprobs_mode", "")).startswith("raw")
        logprobs: Literal["raw", "processed"] = "raw" if raw else "processed"
        key_env = self._address.key_env
        return {DEFAULT_POLICY: Endpoints(urls=urls, logprobs=logprobs, seeded=False, key_env=key_env)}

    async def watch(self) -> None:
        assert self._keeper is not None
        await asyncio.shield(self._keeper)  # a watch that is no longer needed is cancelled, the next one watches on

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):  # whoever watched was told
                await self._keeper
            self._keeper = None
        await self._stop()
        if self._listener is not None:
            self._listener.close()
        self._listener, self._ready = None, {}

    async def restart_learner(self) -> None:
        self._lost = self._told = True  # until it stands, nobody else is to start one
        await self._restart()
        self._lost = self._told = self._unsaved = False
        self._saved, self._unpublished = None, True

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        if policy != DEFAULT_POLICY:
            raise EngineError(f"the verl engine has one policy, {DEFAULT_POLICY!r}; {policy!r} is not known")
        if self._pipe is None:
            raise EngineError("the engine is not started")
        if self._lost:
            self._told = True
            raise LearnerLostError(f"verl ended; resume from the last checkpoint ({self._tail()})")
        self._calls += 1
        try:
            result = await self._call(operation, *arguments)
        except PipeEndedError as ended:
            self._lost = self._told = True
            raise LearnerLostError(
                f"verl ended during {operation}; resume from the last checkpoint ({self._tail()})"
            ) from ended
        finally:
            self._calls -= 1
        self._note(operation, arguments)
        return result

    async def _keep(self) -> None:
        """Starts verl again if it ended while nobody was waiting for it; a waiting operation raises its own error."""
        ends: list[float] = []
        while True:
            await asyncio.sleep(WATCH_S)
            if self._pipe is None or self._pipe.child.poll() is None or self._calls or self._told:
                continue
            ends = [at for at in ends if at > time.monotonic() - RESTARTS_S] + [time.monotonic()]
            if len(ends) > MAX_RESTARTS:
                raise EngineError(f"verl ended {len(ends)} times within {RESTARTS_S:g} s; {self._tail()}")
            log.warning("verl ended with code %s; starting it again", self._pipe.child.returncode)
            self._lost = True
            folder, version = self._begin
            try:
                await self._restart()
                if folder is not None:
                    await self._call("load", folder)
                await self._call("publish", version)
            except PipeEndedError:
                continue  # it ended again, and is found so
            except EngineError as error:
                if self._pipe is None or self._pipe.child.poll() is None:
                    raise
                log.warning("verl did not come back: %s", error)

    def _note(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Remember the weights that verl begins with, should it end."""
        if operation == "optim_step":
            self._unsaved = self._unpublished = True
        elif operation in ("save", "load"):
            self._saved, self._unsaved = arguments[0], False
            self._unpublished = self._unpublished or operation == "load"
        elif operation == "publish":
            self._version, self._unpublished = arguments[0], False
        if not (self._unsaved or self._unpublished):
            self._begin = self._saved, self._version

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self._pipe is not None
        return await asyncio.to_thread(self._pipe.call, method, *arguments)

    async def _restart(self) -> None:
        async with self._restarting:
            await self._stop()
            await self._start()

    async def _stop(self) -> None:
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            await asyncio.to_thread(stop_child, pipe.child, GRACE_S)
            end_session(pipe.child.pid)  # they may hold the GPUs that the next ones are to have
            pipe.close()

    async def _start(self) -> None:
        assert self._listener is not None
        ours, theirs = socket.socketpair()
        options = verl_options(self._setup, self._folder)
        descriptors = {"--pipe": theirs.fileno(), "--listen": self._listener.fileno()}
        limits = self._setup.watchdog.limits
        with theirs:
            child = self._setup.watchdog.start(
                "verl",
                [
                    "agentlightning.engines.verl.driver",
                    *(word for name, value in descriptors.items() for word in (name, str(value))),
                    *("--hang-timeout", str(limits.hang_timeout_s)),
                    *("--options", json.dumps(asdict(options))),
                ],
                python=self._python,
                secrets={SAMPLING_KEY: self._address.key},
                withhold=self._setup.withhold,
                pass_fds=list(descriptors.values()),
                env={"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"},
                log=self._log_file,
            )
        self._pipe = ChildPipe(child, Connection(ours.detach()))
        try:
            self._ready = await asyncio.wait_for(asyncio.to_thread(self._pipe.receive), limits.start_timeout_s)
        except TimeoutError as late:
            child.kill()  # which ends the thread that waits
            raise EngineError(
                f"verl is not ready after {limits.start_timeout_s:g} s; raise trainer.start_timeout_s, else see why: "
                f"{self._tail()}"
            ) from late
        except PipeEndedError as ended:
            code = await asyncio.to_thread(child.wait)
            raise EngineError(f"verl ended with code {code} before it was ready; {self._tail()}") from ended

    def _tail(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()[-5:] if self._log_file.is_file() else []
        return f"its log {self._log_file} ends: {' | '.join(lines)}" if lines else f"its log {self._log_file} is empty"
