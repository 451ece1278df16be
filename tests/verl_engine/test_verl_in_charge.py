"""verl's own trainer over agents behind our gateway: its rows are what was recorded, and its new weights answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from verl_house import HERE, PYTHON

from agentlightning.adapters.trajectories import trajectories
from agentlightning.demo import tiny_model
from agentlightning.records import Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.training_types import Trajectory

STEPS, PROMPTS, GROUP = 6, 4, 8
KEY = "a-key-of-this-test-alone"
VERL = f"""
algorithm.adv_estimator=grpo data.train_batch_size={PROMPTS} data.max_prompt_length=128 data.max_response_length=16
data.dataloader_num_workers=0 data.filter_overlong_prompts=False data.return_raw_chat=True
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.dtype=float32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.optim.lr=1e-2
actor_rollout_ref.rollout.name=cpu actor_rollout_ref.rollout.n={GROUP} actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.calculate_log_probs=True
+actor_rollout_ref.rollout.agent.agent_loop_manager_class=agentlightning.verl_agent_loop.AgentLoopManager
trainer.v1.sampler.custom_sampler.path={HERE}/recording_buffer.py trainer.v1.sampler.custom_sampler.name=RecordingBuffer
reward.num_workers=1 trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
trainer.total_training_steps={STEPS} trainer.val_before_train=True trainer.test_freq=-1 trainer.save_freq=-1
trainer.resume_mode=disable transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=1000
ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
+agentlightning.agent.run={HERE}/verl_agent.py:solve +agentlightning.agent.workers=1
"""


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """`agl serve` over a file of the folder; its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "agentlightning", "serve", "--store", f"sqlite:///{folder}/agl.db"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, "AGL_SERVER_KEY": KEY},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def train(folder: Path, url: str) -> list[dict[str, Any]]:
    """verl's trainer to its end; the rows that it was given."""
    tasks = [{"prompt": [{"role": "user", "content": f"{place}"}], "data_source": "letters"} for place in range(64)]
    for name in ("train.jsonl", "val.jsonl"):
        rows = tasks if name == "train.jsonl" else tasks[:2]
        (folder / name).write_text("".join(json.dumps(task) + "\n" for task in rows))
    words = [*VERL.split(), f"+agentlightning.store.url={url}", f"trainer.default_local_dir={folder}/verl"]
    words += [f"data.train_files={folder}/train.jsonl", f"data.val_files={folder}/val.jsonl"]
    tiny_model.build(folder / "model", ["a letter and some 123 more!"])
    words += [f"actor_rollout_ref.model.path={folder}/model"]
    with (folder / "verl.log").open("wb") as log:
        done = subprocess.run(
            [PYTHON, "-m", "verl.trainer.main_ppo", *words],
            cwd=folder,
            env={**os.environ, "AGL_ROWS": str(folder / "rows.jsonl"), "AGL_SERVER_KEY": KEY},
            stdout=log,
            stderr=log,
        )
    assert done.returncode == 0, (folder / "verl.log").read_text()[-4000:]
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


async def recorded(folder: Path) -> tuple[dict[str, Rollout], dict[str, Trajectory]]:
    """All rollouts, and what would be learned from them, by the first words of the keys of their rows."""
    async with open_store(f"sqlite:///{folder}/agl.db") as store:
        (run,) = await store.runs()
        assert run.state == "finished"
        assert [token.revoked_ns is not None for token in await store.tokens(run.id)] == [True]
        rollouts = await store.rollouts(RolloutQuery(run_id=run.id))
        ids = [rollout.id for rollout in rollouts]
        kept, _ = trajectories(rollouts, await store.calls(ids), await store.rewards(ids))
    by_id = {rollout.id: f"{rollout.group_id}_{rollout.replica}" for rollout in rollouts}
    return {by_id[one.id]: one for one in rollouts}, {by_id[one.rollout_id]: one for one in kept}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_verl_trains_agents_behind_the_gateway_on_the_tokens_that_were_recorded(
    verl_environment: None, tmp_path: Path
) -> None:
    with server(tmp_path) as url:
        rows = train(tmp_path, url)
    rollouts, kept = asyncio.run(recorded(tmp_path))
    training = [row for row in rows if row["partition"] == "train"]
    assert len(training) == STEPS * PROMPTS * GROUP == len(rows) - 2
    for row in rows:
        first, second = kept[row["key"].rsplit("_", 1)[0]].transitions  # the second call continues the first: one row
        assert row["prompts"] == first.prompt_ids
        assert row["input_ids"] == second.prompt_ids + second.sampled_ids
        sampled = [
            value for value, masked in zip(row["rollout_log_probs"], row["response_mask"], strict=True) if masked
        ]
        assert sampled == pytest.approx(first.logprobs + second.logprobs)
        assert sum(row["rm_scores"]) == pytest.approx(rollouts[row["key"].rsplit("_", 1)[0]].reward)

    versions = {
        step: {
            span.version
            for key, one in kept.items()
            if (rollouts[key].mode, rollouts[key].step) == ("train", step)
            for transition in one.transitions
            for span in transition.versions
        }
        for step in range(1, STEPS + 1)
    }
    assert versions == {step: {step - 1} for step in range(1, STEPS + 1)}
    means = [
        statistics.mean(sum(row["rm_scores"]) for row in training[start : start + PROMPTS * GROUP])
        for start in range(0, len(training), PROMPTS * GROUP)
    ]
    assert means[-1] > means[0] + 0.1
