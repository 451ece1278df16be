"""External models of a run: those that its agents call and nobody trains, as the gateway finds them in the store.

The trainer, the evaluation and the check use it before the first worker starts. Keys stay in the environment of the server.
"""

from __future__ import annotations

import os

from agentlightning.config import Config
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.types import Resource


def check_keys(config: Config) -> None:
    """ConfigError where a key is missing in this environment, which a server that is started here inherits."""
    for name, model in config.external.items():
        if model.key_env is not None and not os.environ.get(model.key_env, "").strip():
            raise ConfigError(
                f"external.{name}.key_env: the environment variable {model.key_env} is not set; it holds the key of "
                f"{model.url}"
            )


async def put_external_models(config: Config, run_id: str, store: LightningStore) -> None:
    """Tell the gateway; a resumed run says again only what has changed."""
    known = {one.name: one.value for one in await store.resources(run_id) if one.kind == "external"}
    tables = {name: model.model_dump(mode="json") for name, model in config.external.items()}
    changed = [
        Resource(run_id=run_id, name=name, kind="external", value=table)
        for name, table in tables.items()
        if known.get(name) != table
    ]
    if changed:
        await store.put_resources(changed)
