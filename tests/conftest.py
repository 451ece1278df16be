"""What all tests share: hypothesis judges answers, never how long they took on a machine that others use too."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from agentlightning.demo.pretrained import is_fetched, model_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of learners: a run that is repeated adds in the same order
pytest.register_assert_rewrite("agentlightning.testing.engine_contract")

# In CI the same examples every time, so that a refusal is the doing of what changed; everywhere else new ones every time.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("untimed")

# A shell has what it starts in the background ignore Ctrl-C, which children inherit: those of the tests must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pretrained() -> Path:
    """Folder of SmolLM2-135M-Instruct, which `make test` fetches where it can."""
    if not is_fetched():
        pytest.skip("the pretrained model is not here: make model")
    return model_folder()
