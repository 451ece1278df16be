"""The contract of engines, on the local learner with a vLLM server that samples."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_process import PYTHON

from agentlightning.testing import engine_contract
from agentlightning.testing.engine_contract import *  # noqa: F403

pytestmark = [engine_contract.pytestmark, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine_settings() -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: `make test-vllm` installs vLLM there")
    arguments = ["--kv-cache-memory-bytes", "140000000"]
    return {"sampler": {"type": "vllm", "python": str(PYTHON), "arguments": arguments}}
