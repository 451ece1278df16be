"""AgentLoopManager: agents behind our gateway for verl's own trainer, which stays in charge.

    python -m verl.trainer.main_ppo … +agentlightning.agent.run=agent.py:solve \\
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=agentlightning.verl_agent_loop.AgentLoopManager

Each of verl's prompts becomes a group of rollouts, whose calls verl's own rollout servers answer behind the gateway; what
they sampled goes into TransferQueue, token for token, with the rewards. All else is verl's. Requires verl.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson
import torch
import transfer_queue
from aiohttp import web
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agentlightning.adapters.sequences import merge
from agentlightning.adapters.trajectories import trajectories
from agentlightning.config.run import Config, parse_config
from agentlightning.engines.folders import find_model
from agentlightning.engines.sampler_address import SamplerAddress
from agentlightning.engines.verl.sampler_app import create_app
from agentlightning.errors import ConfigError, EngineError
from agentlightning.records import JSON, Mode, NewRollout, RetryPolicy, Sampling
from agentlightning.rendering.model_folder import end_ids
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.load_trajectories import read_inputs, with_failures
from agentlightning.trainer.processes import WORKERS, Processes
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.trainer.serving import serve_model
from agentlightning.trainer.training import new_run_id
from agentlightning.training_types import TrainingSequence, Trajectory

TABLE = "agentlightning"
"""Table of verl's configuration that has our settings."""
TABLES = ("agent", "store", "engine", "external", "limits", "sandbox", "tracing")
"""Those of a run's tables that have an effect here."""
ENGINE_SETTINGS = ("listen", "advertise", "key_env")
"""Those of [engine] that do: gateways on other hosts sample verl's policy there."""
END_S = 10.0
"""Seconds for the store to record that verl is done."""
ENGINE = "agentlightning.engines.verl.engine:ServedPolicy"

log = logging.getLogger("agentlightning.verl")


class _Logged(Silent):
    """Notes as warnings: verl's console leaves out anything less."""

    def note(self, text: str) -> None:
        log.warning("%s", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of verl's batch: one group of rollouts."""

    uid: str
    task: JSON
    step: int
    mode: Mode
    rollouts: int
    sampling: Sampling

    @property
    def partition(self) -> str:
        """verl's name of the mode."""
        return "train" if self.mode == "train" else "val"


class AgentLoopManager:
    """verl's agent loop: a run of ours that its trainer feeds. A thread of its own has the run's event loop."""

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> Self:
        """Starts the gateway, unless the settings name one that runs, and the workers. Called by verl."""
        if teacher_client is not None:
            raise ConfigError("distillation: expected none; a teacher is not asked about rollouts of agents")
        if reward_loop_worker_handles is None or config.reward.custom_reward_function.path is not None:
            raise ConfigError(
                "reward: expected neither a reward model nor a custom_reward_function; the agent, or "
                "agentlightning.agent.reward, says what a rollout is worth"
            )
        rollout = config.actor_rollout_ref.rollout
        if max(rollout.top_k, rollout.val_kwargs.top_k) > 0:
            raise ConfigError(
                "actor_rollout_ref.rollout.top_k: expected -1, of val_kwargs too; calls are sampled without"
            )
        return cls(config, llm_client)

    def __init__(self, config: Any, llm_client: Any) -> None:
        self._verl = config
        self._client = llm_client
        self._loop = asyncio.new_event_loop()
        self._collector: RolloutCollector
        self._run: Processes
        self._settings: Config
        self._started: Future[None] = Future()
        self._failure: BaseException | None = None
        threading.Thread(target=self._live, name="agentlightning", daemon=True).start()
        self._started.result()
        atexit.register(self._end)  # verl does not say when it is done

    def generate_sequences(self, batch: Any) -> None:
        """Starts a group of rollouts for each prompt, and waits for none: their rows come by TransferQueue."""
        if self._failure is not None:
            raise EngineError(f"the run of agents ended: {self._failure}") from self._failure
        for prompt in _prompts(batch, self._verl.actor_rollout_ref.rollout):
            asyncio.run_coroutine_threadsafe(self._group(prompt), self._loop).add_done_callback(self._look)

    def _look(self, group: Future[None]) -> None:
        """Keeps the error of a group whose marks verl would wait for: its next step raises it."""
        if (error := group.exception()) is not None:
            self._failure = self._failure or error
            log.error("a group of rollouts was lost: verl could not be told of it", exc_info=error)

    def _end(self) -> None:
        """Records that the run is finished. Its processes end with this one."""
        if self._failure is None:
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(END_S)

    async def _finish(self) -> None:
        store, run_id = self._run.store, self._collector.run_id
        for token in await store.tokens(run_id):
            if token.name == WORKERS and token.revoked_ns is None:
                await store.revoke_token(token.id)
        await store.update_run(run_id, state="finished")

    def _live(self) -> None:
        """Until the process ends. Children end with this thread."""
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            if not self._started.done():
                self._started.set_exception(error)
            log.exception("the run of agents ended")
            self._loop.run_forever()  # groups that were under way fail, and say so

    async def _serve(self) -> None:
        rollout = self._verl.actor_rollout_ref.rollout
        model = await asyncio.to_thread(find_model, self._verl.actor_rollout_ref.model.path)
        context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        address = SamplerAddress.of(run_settings(self._verl, model, "").engine)
        app = create_app(
            self._client, context=context, end_ids=end_ids(model), on_error=_log_error, sampling_key=address.key
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = address.listen()
        await web.SockSite(runner, listener).start()
        self._settings = run_settings(self._verl, model, address.url(listener))
        folder = RunFolder(Path(self._verl.trainer.default_local_dir) / TABLE, new_run_id())
        name = f"verl {self._verl.trainer.experiment_name}"
        async with serve_model(self._settings, folder, _Logged(), name) as (self._collector, self._run):
            log.warning("run %s of agents, in %s", folder.run_id, folder.path)
            self._started.set_result(None)
            await self._run.beside(asyncio.Event().wait())

    async def _group(self, prompt: Prompt) -> None:
        """One prompt's rollouts, and verl's marks of their state; failure if one has nothing to learn from."""
        status = "failure"
        try:
            await self._mark(prompt, "running")
            rows = await self._sampled(prompt)
            if rows:
                await self._put(prompt, rows)
            if len(rows) == prompt.rollouts:
                status = "finished"
        except Exception:
            log.exception("the group of prompt %s failed", prompt.uid)
        finally:
            await self._mark(prompt, status)

    async def _sampled(self, prompt: Prompt) -> dict[int, tuple[Trajectory, list[TrainingSequence]]]:
        """By replica, a rollout and its rows."""
        agent = self._settings.agent
        rollouts = await self._collector.collect(
            [
                NewRollout(
                    run_id=self._collector.run_id,
                    task=prompt.task,
                    group_id=prompt.uid,
                    replica=replica,
                    mode=prompt.mode,
                    step=prompt.step,
                    sampling=prompt.sampling,
                    retry=RetryPolicy(max_attempts=agent.max_attempts, timeout_s=agent.timeout_s),
                )
                for replica in range(prompt.rollouts)
            ]
        )
        inputs = await read_inputs(self._run.store, rollouts, {})
        kept, left_out = trajectories(with_failures(rollouts, agent.on_failure), inputs.calls, inputs.rewards)
        for rollout_id, reason in left_out.items():
            log.warning("rollout %s of prompt %s is left out: %s", rollout_id, prompt.uid, reason)
        replicas = {rollout.id: rollout.replica for rollout in rollouts}
        nothing = [[0.0] * len(trajectory.transitions) for trajectory in kept]  # verl weighs them
        return {
            replicas[trajectory.rollout_id]: (
                trajectory,
                merge(trajectory.rollout_id, trajectory.transitions, zeros, zeros),
            )
            for trajectory, zeros in zip(kept, nothing, strict=True)
        }

    async def _put(self, prompt: Prompt, rows: Mapping[int, tuple[Trajectory, list[TrainingSequence]]]) -> None:
        keys, fields, tags = [], [], []
        for replica, (trajectory, sequences) in rows.items():
            for index, sequence in enumerate(sequences):
                keys.append(f"{prompt.uid}_{replica}_{index}")
                fields.append(row_fields(prompt, trajectory, sequence))
                tags.append(row_tags(prompt, trajectory, sequence))
        await asyncio.to_thread(
            transfer_queue.kv_batch_put,
            keys=keys,
            partition_id=prompt.partition,
            fields=list_of_dict_to_tensordict(fields),
            tags=tags,
        )

    async def _mark(self, prompt: Prompt, status: str) -> None:
        await asyncio.to_thread(
            transfer_queue.kv_batch_put,
            keys=[prompt.uid],
            partition_id=prompt.partition,
            tags=[{"status": status}],
        )


def run_settings(verl: Any, model: Path, url: str) -> Config:
    """The run that verl's configuration describes: our tables as they are, the policy served at `url`."""
    given = OmegaConf.to_container(verl.get(TABLE) or OmegaConf.create(), resolve=True)
    for name in given:
        if name not in TABLES:
            raise ConfigError(f"{TABLE}.{name} has no effect here; expected one of {', '.join(TABLES)}")
    own = given.get("engine", {})
    for name in own:
        if name not in ENGINE_SETTINGS:
            raise ConfigError(f"{TABLE}.engine.{name} has no effect here; expected one of {', '.join(ENGINE_SETTINGS)}")
    table = {
        **given,
        "model": {"path": str(model)},
        "engine": {**own, "name": ENGINE, "options": {"url": url}},
        "data": {"train": str(verl.data.train_files)},
    }
    return parse_config(table, TABLE)


def row_fields(prompt: Prompt, trajectory: Trajectory, sequence: TrainingSequence) -> dict[str, Any]:
    """A row as verl's trainer reads it: the prompt ends where the first call's completion begins. verl takes the reward of a
    rollout of several rows from the last."""
    start = sequence.segments[0][0]
    ids = torch.tensor(sequence.tokens)
    mask = torch.tensor(sequence.mask[start:], dtype=torch.int64)
    scores = torch.zeros(len(mask))
    scores[-1] = trajectory.reward
    return {
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(sequence.logprobs[start:]),
        "rm_scores": scores,
        "uid": prompt.uid,
        "num_turns": len(trajectory.transitions),
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": trajectory.rewards},
        "reward_model": prompt.task.get("reward_model") or {},
        "data_source": str(prompt.task.get("data_source")),
    }


def row_tags(prompt: Prompt, trajectory: Trajectory, sequence: TrainingSequence) -> dict[str, Any]:
    """Sizes, and the weights' versions over which the rollout was sampled: verl's bound of staleness reads them."""
    start = sequence.segments[0][0]
    versions = [span.version for transition in trajectory.transitions for span in transition.versions]
    return {
        "status": "success",
        "prompt_len": start,
        "response_len": len(sequence.tokens) - start,
        "seq_len": len(sequence.tokens),
        "global_steps": prompt.step,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }


def _prompts(batch: Any, rollout: Any) -> list[Prompt]:
    """The rows of verl's batch. A task has those of its fields that are no tensors."""
    plain: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if isinstance(value, NonTensorStack):
            columns[name] = value.tolist()
        elif isinstance(value, NonTensorData):
            plain[name] = value.data
    validate, step = bool(plain.pop("validate", False)), int(plain.pop("global_steps"))
    drawn = rollout.val_kwargs if validate else rollout
    found = []
    for place, uid in enumerate(columns.pop("uid")):
        row = {**plain, **{name: values[place] for name, values in columns.items()}}
        count, greedy = int(row.pop("__rollout_n__", drawn.n)), not row.pop("__do_sample__", True)
        found.append(
            Prompt(
                uid=str(uid),
                task=orjson.loads(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)),
                step=step,
                mode="eval" if validate else "train",
                rollouts=count,
                sampling=Sampling(
                    temperature=0.0 if greedy else drawn.temperature,
                    top_p=1.0 if greedy else drawn.top_p,
                    max_tokens=rollout.response_length,
                ),
            )
        )
    return found


def _log_error(error: Exception) -> None:
    log.error("sampling failed: %s", error)
