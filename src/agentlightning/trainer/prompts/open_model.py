"""The optimiser model of a run, as its configuration names it; `agl optimize` and training schedules open it here."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from agentlightning.config.optimizer import POLICY, SCRIPTED, model_name
from agentlightning.config.run import Config
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.prompts.optimizer_model import (
    TIMEOUT_S,
    GatewayModel,
    ModelAddress,
    OptimizerModel,
    scripted_model,
)


async def open_model(config: Config, run_id: str, processes: Processes, stack: AsyncExitStack) -> OptimizerModel:
    """The model that writes new texts; `stack` closes it. ConfigError where a grammar cannot be read."""
    optimize = config.optimize
    assert optimize is not None  # nobody asks without
    if optimize.model == SCRIPTED:
        assert optimize.grammar is not None  # a configuration has it with this model
        return scripted_model(Path(optimize.grammar))
    if optimize.model == POLICY:
        model, protocol = str(processes.policy["model"]), "openai"
    else:
        external = config.external[optimize.model]
        model, protocol = model_name(optimize.model, external), external.protocol
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False))
    asked = GatewayModel(
        processes.store,
        run_id,
        ModelAddress(server_url=processes.server_url, model=model, protocol=protocol),
        client,
        config.external,
    )
    await asked.open(await processes.store.resources(run_id))
    stack.push_async_callback(asked.close)
    return asked
