"""VerlWorkers: verl's training workers and rollout servers on Ray, as the operations of one policy.

Which token is trained and how much it counts is decided here; verl has the weights, the gradients and the updates. Every
training worker imports it. Requires verl, ray and torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerManager

from agentlightning.engines.base import SKIPPED
from agentlightning.engines.folders import (
    LEARNER_FOLDER,
    LEARNER_STATE,
    context_length,
    copy_tokenizer,
    first_line,
    replace_folder,
    seal,
)
from agentlightning.engines.local.batches import check_sequences
from agentlightning.engines.losses import known_tokens, needs_calls, sampled_token_loss, summary
from agentlightning.engines.verl.engine import VerlOptions, merged
from agentlightning.errors import AgentLightningError, ConfigError, EngineError, ModelError
from agentlightning.runtime.disk import sync
from agentlightning.training_types import Loss, TrainingSequence


def summed_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """verl's loss function: the SUM over the micro-batch's tokens of weight × loss, and its report. verl averages over the
    data-parallel ranks, so that a sum counts once for each of them."""
    sequences: list[TrainingSequence] = tu.get(data, "sequence")
    logprobs_T, entropies_T = model_output["log_probs"].values(), model_output["entropy"].values()
    places, start = [], 0
    for sequence in sequences:  # a token's log-probability stands at the place before it
        places += [start + at - 1 for at, trained in enumerate(sequence.mask) if trained]
        start += len(sequence.tokens)
    if not places:  # rows that fill up a batch: every rank computes a backward pass, or the others wait for ever
        return logprobs_T.sum() * 0.0, {"reports": []}
    loss = tu.get(data, "loss")
    known = known_tokens(sequences, str(logprobs_T.device), calls=needs_calls(loss))
    total, report = sampled_token_loss(loss, logprobs_T[places], entropies_T[places], known)
    return total * tu.get(data, "dp_size"), {"reports": [report.tolist()]}


class TrainingWorker(TinkerActorRolloutRefWorker):  # type: ignore[misc]
    """One rank of the policy, with its part of the reference and its way to the rollout server."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def clip_at(self, norm: float) -> None:
        """Bound of the gradient's norm from the next update on."""
        engine = self.actor.engine
        for config in (engine.optimizer_config, getattr(engine.optimizer, "config", None)):
            if config is not None:
                config.clip_grad = norm

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def process(self) -> tuple[str, int]:
        """The node that this worker is on, and its process id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


METHODS = ("forward_backward", "logprobs", "reference_logprobs", "optim_step", "publish", "save", "load")
UNLISTED = ("mixed_precision",)
"""Fields of verl's configuration that its own tree leaves out."""
OPEN = ("ray_init", "runtime_env")
"""Tables of verl's tree that take more keys than they have there, as empty ones do."""


class VerlWorkers:
    """The workers of one policy, started; its servers have no weights until `publish`."""

    def __init__(self, options: VerlOptions) -> None:
        self.config = verl_config(options)
        self._folder = Path(self.config.actor_rollout_ref.model.path)
        self._model = AutoConfig.from_pretrained(self._folder).get_text_config()
        self.context = self.config.actor_rollout_ref.rollout.max_model_len or context_length(self._model)
        self._pending = False
        own = get_ppo_ray_runtime_env(self.config)
        own.pop("working_dir", None)
        given = OmegaConf.to_container(self.config.ray_kwargs.ray_init)
        given["runtime_env"] = merged(own, given.get("runtime_env") or {})
        # A cluster of its own unless told otherwise: whatever else runs on this machine is somebody's.
        ray.init(**{"address": "local", "include_dashboard": False, **given})
        self._start(options)

    def _start(self, options: VerlOptions) -> None:
        config, trainer = self.config, self.config.trainer
        colocated = config.actor_rollout_ref.rollout.nnodes == 0
        role = "actor_rollout_ref" if options.reference else "actor_rollout" if colocated else "actor"
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=True, max_colocate_count=3)
        worker = RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config.actor_rollout_ref, role=role)
        self._group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, device_name=get_device_name())
        self._group.init_model()
        self._group.set_loss_fn(summed_loss)
        self._group.optimizer_zero_grad()
        manager = LLMServerManager.create(
            config=config, worker_group=self._group if colocated else None, rollout_resource_pool=pool
        )
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        replicas = manager.get_replicas()
        self._servers = CheckpointEngineManager(config=engine, actor_wg=self._group, replicas=replicas)
        self.servers = [server for replica in replicas for server in replica.servers]
        """Ray actors of the rollout servers."""
        self.client = manager.get_client()
        """Samples on the rollout servers."""

    @property
    def device(self) -> str:
        """Torch device of the workers."""
        return str(get_device_name())

    def pids(self) -> dict[str, int]:
        """Process ids of the workers on this machine."""
        here = ray.get_runtime_context().get_node_id()
        return {f"learner-{rank}": pid for rank, (node, pid) in enumerate(self._group.process()) if node == here}

    def call(self, method: str, *arguments: Any) -> Any:
        """Carries out one of `METHODS`. Another error than ours leaves workers out of step with each other."""
        if method not in METHODS:
            raise EngineError(f"the verl engine has no method {method!r}")
        with _worker_errors():
            return getattr(self, method)(*arguments)

    def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Loss) -> dict[str, float]:
        """Adds the gradient of SUM over tokens of weight × loss; see Engine.forward_backward for the metrics."""
        self._check(sequences)
        trained = [sequence for sequence in sequences if any(sequence.mask)]
        if not trained:
            return summary(loss, [], 0)
        if loss.kl and any(sequence.ref_logprobs is None for sequence in trained):
            raise EngineError("the loss has a KL term, and its sequences have no ref_logprobs; see reference_logprobs")
        self._pending = True
        rows = self._rows(trained, loss=loss, calculate_entropy=True)
        metrics = tu.get(self._group.forward_backward(rows).get(), "metrics")
        reports = torch.tensor(_flat(metrics["reports"]), dtype=torch.float64).view(-1, 9)
        return summary(loss, list(reports), sum(sum(sequence.mask) for sequence in trained))

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Log-probability of every token given those before it, at the sequence's temperature; 0 for the first."""
        self._check(sequences)
        return self._logprobs(sequences, self._group.compute_log_prob)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """The same under the weights that the engine was made with."""
        self._check(sequences)
        return self._logprobs(sequences, self._group.compute_ref_log_prob)

    def optim_step(self, learning_rate: float, grad_clip: float) -> dict[str, float]:
        """Clips the accumulated gradient to the norm, updates, zeroes it. grad_norm is before clipping."""
        self._group.clip_at(float(grad_clip))
        norm = next(
            metrics["grad_norm"] for metrics in self._group.optimizer_step({"lr": float(learning_rate)}) if metrics
        )
        self._pending = False
        return {"grad_norm": float(norm)} if math.isfinite(norm) else {**SKIPPED}  # the workers skip it themselves

    def publish(self, version: int) -> None:
        """The current weights serve from now on, stamped `version`; calls in flight stop and are continued over them."""
        if self._servers.backend != "naive":  # its own transfer stops and continues calls
            self._servers.update_weights(version)
            return
        self._servers.abort_replicas()
        try:
            self._servers.update_weights(version)
        finally:
            self._servers.resume_generation_replicas()

    def save(self, path: Path) -> None:
        """Writes a transformers folder and the workers' shards; whole or not at all. On several nodes they share it."""
        if self._pending:
            raise EngineError("a learner is saved between updates; call optim_step first")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            self._group.save_checkpoint(str(temporary / LEARNER_FOLDER))
            for file in (temporary / LEARNER_FOLDER / "huggingface").iterdir():
                file.rename(temporary / file.name)
            copy_tokenizer(self._folder, temporary)
            torch.save({"workers": self._group.world_size}, temporary / LEARNER_STATE)
            _name_dtype(temporary)
            seal(temporary)
            replace_folder(temporary, path)
            sync(path.parent)
        except OSError as cause:
            raise EngineError(f"the checkpoint {path} cannot be written: {first_line(cause)}") from cause
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def load(self, path: Path) -> None:
        """Back to a saved state: the next update is bit for bit the one that would have followed the save."""
        state = Path(path) / LEARNER_FOLDER
        if not state.is_dir():
            raise ModelError(
                f"checkpoint {path}: it has no folder {LEARNER_FOLDER}, so it was not written by this engine"
            )
        wrote = torch.load(Path(path) / LEARNER_STATE, weights_only=True)["workers"]
        if (state / "fsdp_config.json").is_file() and wrote != self._group.world_size:
            raise ModelError(f"checkpoint {path}: {wrote} workers wrote it; expected {self._group.world_size}")
        self._group.load_checkpoint(str(state))
        self._group.optimizer_zero_grad()
        self._pending = False

    def _logprobs(self, sequences: Sequence[TrainingSequence], compute: Any) -> list[list[float]]:
        if not sequences:
            return []
        found = compute(self._rows(sequences, compute_loss=False, calculate_entropy=False))["log_probs"]
        rows = [row.float().tolist() for row in found.unbind()]
        return [[0.0, *row[:-1]] for row, _ in zip(rows, sequences, strict=False)]  # without those that fill up

    def _rows(self, sequences: Sequence[TrainingSequence], **settings: Any) -> Any:
        """verl's batch: as many rows for each worker, filled up by copies of the shortest in which nothing is trained."""
        shortest = min(sequences, key=lambda sequence: len(sequence.tokens))
        idle = replace(shortest, mask=[False] * len(shortest.tokens))
        rows = [*sequences, *[idle] * (-len(sequences) % self._group.world_size)]

        def nested(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)

        ids = [torch.tensor(row.tokens) for row in rows]
        tensors = {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(one)) for one in ids]),
            "loss_mask": nested([torch.tensor(row.mask, dtype=torch.int64) for row in rows]),
            "temperature": torch.tensor([row.temperature or 1.0 for row in rows]),  # greedy ones report plain ones
            "sequence": rows,
        }
        budget = self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        settings["max_token_len_per_gpu"] = max(budget, max(len(one) for one in ids))
        return tu.get_tensordict(tensors, {**settings, "distillation_use_topk": False, "distillation_only": False})

    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
        """EngineError where a sequence would fail in some worker while the others wait for it."""
        check_sequences(sequences, self._model)
        for sequence in sequences:
            if sequence.images or any(sequence.decodings):
                raise EngineError(
                    f"a sequence of rollout {sequence.rollout_id} has images or masks of logits, which the verl engine does "
                    "not support"
                )


def _name_dtype(folder: Path) -> None:
    """Have the configuration name the type of the weights beside it: verl writes bfloat16 there whatever they are."""
    with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
        name = next(iter(file.keys()))
        dtype = str(file.get_tensor(name).dtype).removeprefix("torch.")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}, indent=2))


def verl_config(options: VerlOptions) -> Any:
    """verl's configuration with ours above its defaults. ConfigError, naming the key, where verl has none of that name."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"model_engine={options.model_engine}"])
    OmegaConf.set_struct(config, False)
    _check_keys(OmegaConf.to_container(config, resolve=False, throw_on_missing=False), options.tree, "engine.options")
    config = OmegaConf.merge(config, options.tree)
    OmegaConf.resolve(config)
    return config


def _check_keys(known: Mapping[str, Any], given: Mapping[str, Any], path: str) -> None:
    for key, value in given.items():
        if key not in known and key not in UNLISTED:
            raise ConfigError(f"{path}.{key} is not known to verl; expected one of {', '.join(map(str, known))}")
        below = known.get(key)
        if isinstance(below, Mapping) and below and isinstance(value, Mapping) and key not in OPEN:
            _check_keys(below, value, f"{path}.{key}")


@contextmanager
def _worker_errors() -> Iterator[None]:
    """An error of ours that a worker raised, as itself: Ray gives it another class."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AgentLightningError):
            raise type(error.cause)(str(error.cause)) from error
        raise


def _flat(values: Any) -> list[float]:
    return [number for value in values for number in _flat(value)] if isinstance(values, list) else [values]
