"""verl's replay buffer, which looks for finished groups more often, and keeps what it gives the trainer in a file."""

from __future__ import annotations

import json
import os

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

FIELDS = ["input_ids", "prompts", "response_mask", "rollout_log_probs", "rm_scores"]


class RecordingBuffer(ReplayBuffer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "poll_interval": 0.05})

    def sample(self, global_steps, partition_id, batch_size):
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=FIELDS)
        with open(os.environ["AGL_ROWS"], "a") as file:
            for place, key in enumerate(batch.keys):
                row = {name: data[name][place].tolist() for name in FIELDS}
                print(json.dumps({"key": key, "partition": partition_id, **row}), file=file)
        return batch, metrics
