"""A rollout server of verl's with a transformers model on the CPU: what vLLM is on a GPU. Its process is cpu_server.py."""

from __future__ import annotations

import os

import ray
from cpu_server import CpuServer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica


class ServerAdapter(BaseRollout):
    """Lives in a training worker, and hands the gathered weights to its server."""

    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        named = [(name, value.detach().cpu().clone()) for name, value in weights]
        await ray.get_actor(f"cpu_server_{self.replica_rank}").load_weights.remote(named, global_steps)


class CpuReplica(RolloutReplica):
    async def launch_servers(self):
        options = {"name": f"cpu_server_{self.replica_rank}", "num_cpus": 0, "max_concurrency": 1000}
        server = CpuServer.options(**options).remote(self.model_config.path)
        self.servers, self._server_handle = [server], server
        self._server_address = f"cpu:{self.replica_rank}"
