"""What agents say is shown to people: no terminal obeys it, and no line of it passes for one of ours."""

from __future__ import annotations

import asyncio
import io

import pytest
from attack_scene import SERVER_KEY, Scene
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import printable
from agentlightning.trainer.display import screen
from agentlightning.types import Finish

NASTY = "\x1b[2J\x1b]0;owned\x07 \x9b31m \x08\x7f \u202egnihtyna"
OBEYED = ("\x1b", "\x07", "\x9b", "\x08", "\x7f", "\u202e")


@pytest.mark.parametrize("kind", [str, Text, lambda text: _table(text)])
def test_nothing_on_the_screen_is_obeyed_by_the_terminal(kind: type) -> None:
    console = screen()
    console.file = io.StringIO()
    console.print(kind(f"before {NASTY} after\nsecond\tline"), soft_wrap=True)
    shown = console.file.getvalue()
    assert [one for one in OBEYED if one in shown] == []
    assert "\\x1b[2J" in shown
    assert "after\n" in shown or kind not in (str, Text)


def _table(text: str) -> Table:
    table = Table(text)
    table.add_row(text)
    return table


def test_line_ends_and_tabs_stay() -> None:
    assert printable("a\r\nb\tc\n\rd é 😀") == "a\nb\tc\n\\rd é 😀"


async def test_a_rollout_whose_agent_says_anything_is_shown(scene: Scene) -> None:
    finish = Finish(lease=scene.mine.lease, state="failed", error=f"it said {NASTY}", output=NASTY)
    await scene.store.finish([finish])
    arguments = ["rollouts", "show", scene.mine.rollout.id, "--store", scene.server.url]
    done = await asyncio.to_thread(CliRunner(env={"AGL_SERVER_KEY": SERVER_KEY}).invoke, app, arguments)
    assert done.exit_code == 0, done.output
    assert "owned" in done.output
    assert [one for one in OBEYED if one in done.output] == []
