"""What tests of the pages about frameworks share: the doubles of other tests, and a folder of one's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for shared in ("gateway", "sdk", "end_to_end"):  # scripted engine, toy model; a template with tools; agl as a process
    sys.path.append(str(Path(__file__).parents[1] / shared))

from command_line import Folder  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder to run ``agl`` in; everything started in it is gone at the end."""
    made = Folder(tmp_path)
    yield made
    made.close()
