"""Upstreams of a run: the models that its agents call and nobody trains, as the gateway finds them in the store.

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
    for name, upstream in config.upstreams.items():
        if upstream.key_env is not None and not os.environ.get(upstream.key_env, "").strip():
            raise ConfigError(
                f"upstreams.{name}.key_env: the environment variable {upstream.key_env} is not set; it holds the key of "
                f"{upstream.url}"
            )


async def put_upstreams(config: Config, run_id: str, store: LightningStore) -> None:
    """Tell the gateway; a resumed run says again only what has changed."""
    known = {one.name: one.value for one in await store.resources(run_id) if one.kind == "upstream"}
    tables = {name: upstream.model_dump(mode="json") for name, upstream in config.upstreams.items()}
    changed = [
        Resource(run_id=run_id, name=name, kind="upstream", value=table)
        for name, table in tables.items()
        if known.get(name) != table
    ]
    if changed:
        await store.put_resources(changed)
