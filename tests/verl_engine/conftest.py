"""verl's environment, for all tests of this folder that start one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from verl_house import ENVIRONMENT, PYTHON


@pytest.fixture(scope="session")
def verl_environment() -> Iterator[None]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: `make test-verl` installs verl there")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
