"""What agents say is shown to people: no terminal obeys it, and no line of it passes for one of ours."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from attack_scene import SERVER_KEY, Scene
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import one_line, printable
from agentlightning.gateway import log
from agentlightning.records import Finish
from agentlightning.runtime.log_lines import line_handler
from agentlightning.trainer.display import screen

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


FORGED = f"GET {NASTY}\r\n2026-01-01 [info] server key accepted\u2028x"


def logged(stream: io.StringIO) -> str:
    """What a logger writes that quotes hostile text in its sentence, its fields and an error."""
    logger = logging.getLogger("agentlightning.gateway")
    logger.warning("refused: %s", FORGED, extra={"agent": FORGED, "headers": {"user-agent": FORGED}})
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed")
    return stream.getvalue()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """Logging is set up as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("agentlightning")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_line_of_the_servers_log_is_forged_or_obeyed(stream: type[io.StringIO], kept_logging: None) -> None:
    out = stream()
    log.configure("info", [], out)
    said = logged(out).replace("\x1b[", "") if stream is Terminal else logged(out)  # colours of its own
    assert [one for one in OBEYED[1:] if one in said] == []
    assert "\u2028" not in said
    assert "\r" not in said
    assert "]0;owned" in said
    assert "\x1b" not in said
    starts = [line for line in said.splitlines() if not line.startswith("    ")]
    assert len(starts) == 2, said
    if stream is not Terminal:
        assert json.loads(starts[0])["event"] == f"refused: {FORGED}"


def test_no_line_of_a_childs_log_is_forged_or_obeyed(kept_logging: None) -> None:
    out = io.StringIO()
    handler = line_handler("%(asctime)s sampler %(message)s")
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(out)
    logging.getLogger().handlers[:] = [handler]
    said = logged(out)
    assert [one for one in (*OBEYED, "\r", "\u2028") if one in said] == []
    assert len([line for line in said.splitlines() if not line.startswith("    ")]) == 2


def test_warnings_of_a_process_without_handlers_are_escaped() -> None:
    program = f"""
import logging
from agentlightning.runtime.log_lines import escape_last_resort

escape_last_resort()
logging.getLogger("agentlightning.runner").warning("the agent said %s", {FORGED!a})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == f"the agent said {one_line(FORGED)}\n"
