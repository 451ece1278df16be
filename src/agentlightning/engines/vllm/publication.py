"""Publication: how a vLLM server gets new weights, by reload, transfer or adapter, while its calls go on.

VllmServers drives it. Generation pauses between two steps, so that every token is of the version that it is stamped with;
requests keep their tokens, which are read again under the new weights. Knows nothing of who runs a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.engines.local.parts import PublishedWeights
from agentlightning.engines.saved_folders import damage
from agentlightning.engines.vllm.server import ServerRefusedError, VllmServer
from agentlightning.errors import EngineError

ADAPTER = "agentlightning"
"""Name under which servers sample with the adapter."""


class WeightsSource(Protocol):
    """A place from which servers fetch weights."""

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        """The update_info by which a server fetches these weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One of the three ways, and its times."""

    source: WeightsSource | None = None
    """With transfer."""
    adapter: bool = False
    step_timeout_s: float
    """For what waits for one step of the model at most."""
    load_timeout_s: float

    async def publish(self, server: VllmServer, weights: PublishedWeights) -> None:
        """Raises ServerRefusedError, aiohttp.ClientError or TimeoutError; it can be asked again then."""
        await self._ask(server, "/pause?mode=keep")
        await self._load(server, weights)
        await self._ask(server, "/update_weight_version", {"new_version": str(weights.version)})
        # What the old weights computed of prompts is theirs: nothing but this forgets it.
        reset = await self._ask(server, "/reset_prefix_cache?reset_running_requests=true")
        if not reset["success"]:
            raise ServerRefusedError(f"{server} did not reset its prefix cache", 503)
        await self._ask(server, "/resume")

    async def version(self, server: VllmServer) -> str:
        """Label of its weights; answered between two steps of the model, so that a model that hangs shows."""
        answer = await server.ask("GET", "/weight_info", self.step_timeout_s)
        return str(answer["weight_version"])

    async def _load(self, server: VllmServer, weights: PublishedWeights) -> None:
        if self.adapter:
            body: Any = {"lora_name": ADAPTER, "lora_path": str(weights.folder), "load_inplace": True}
            await self._ask(server, "/v1/load_lora_adapter", body, self.load_timeout_s)
        elif self.source is not None:
            await self._ask(server, "/start_weight_update")
            body = {"update_info": self.source.update(weights)}
            await self._ask(server, "/update_weights", body, self.load_timeout_s)
            await self._ask(server, "/finish_weight_update", {})
        else:
            method, folder = server.reload
            body = {"method": method, "kwargs": {folder: str(weights.folder)}}
            await self._ask(server, "/collective_rpc", body, self.load_timeout_s)

    async def _ask(self, server: VllmServer, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        return await server.ask("POST", path, timeout_s or self.step_timeout_s, {} if body is None else body)


def check_whole(weights: PublishedWeights) -> None:
    """EngineError where the folder is not as it was sealed: half of a model kills a vLLM server that reloads it."""
    if (lacks := damage(weights.folder)) is not None:
        raise EngineError(
            f"weights version {weights.version} in {weights.folder} are not whole, and are not published: {lacks}"
        )
