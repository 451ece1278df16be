"""The contract of engines, on every engine that comes with the package."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.testing.engine_contract import *  # noqa: F403

ENGINES = {"local": {}, "local-tree": {"packing": "prefix_tree"}}


@pytest.fixture(scope="module", params=ENGINES)
def engine_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ENGINES[request.param]
