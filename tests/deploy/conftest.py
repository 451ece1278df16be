"""What tests of deployments share: a project in a folder of its own, and the processes of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deployed_project import make_project

for name in ("end_to_end", "store"):  # their processes, their PostgreSQL
    sys.path.append(str(Path(__file__).parents[1] / name))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The configuration of a project called bot."""
    return make_project(tmp_path / "bot")
