"""What end-to-end tests share: the doubles of the gateway's tests, and a folder of one's own to run commands in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # its scripted engine and its toy model

from command_line import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder to run ``agl`` in; everything started in it is gone at the end."""
    made = Folder(tmp_path)
    yield made
    made.close()
