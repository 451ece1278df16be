"""What end-to-end tests share: the doubles of the gateway's tests, and a folder of one's own to run commands in."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # its scripted engine and its toy model
sys.path.append(str(Path(__file__).parents[1] / "store"))  # its invariants

from command_line import Folder
from house import House, open_house
from training import build_model
from typer.testing import CliRunner, Result

from agentlightning.cli.app import app


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder to run ``agl`` in; everything started in it is gone at the end."""
    made = Folder(tmp_path)
    yield made
    made.close()


@pytest.fixture
def invoke(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``agl arguments…`` in this process, which has loaded everything: for what is refused before anything starts."""
    monkeypatch.chdir(folder.path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.fixture
async def house(folder: Folder) -> AsyncIterator[House]:
    """A server with one run whose model is scripted."""
    async with open_house(folder) as opened:
        yield opened


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lookup demo's warm-started policy, made once."""
    return build_model(tmp_path_factory.mktemp("end-to-end") / "model")
