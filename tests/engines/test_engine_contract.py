"""The contract of engines, on every engine that comes with the package, and on the example of one of somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.testing.engine_contract import *  # noqa: F403

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine" / "plain_torch.py"
ENGINES: dict[str, dict[str, Any]] = {
    "local": {},
    "fsdp": {"learner": {"type": "fsdp", "processes": 2}},
    "example": {"name": f"{EXAMPLE}:PlainTorch"},
    "local-cuda": {"device": "cuda"},
    "local-tree-cuda": {"device": "cuda", "packing": "prefix_tree"},
}
SLOW = {"fsdp"}


def marks(name: str) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.slow] if name in SLOW else []
    if name.endswith("-cuda"):
        found.append(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
    return found


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in ENGINES])
def engine_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ENGINES[request.param]
