"""Progress of long work, piped and in a terminal."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentlightning.trainer.display import Display, draw_curve


def test_a_step_that_taught_nothing_is_shown_like_any_other() -> None:
    """All groups without variance: no update, and so no loss."""
    metrics = {
        "train/reward_mean": 0.0,
        "train/groups_with_signal": 0.0,
        "rollout/turns": 1.0,
        "time/tokens_per_s": 10.0,
        "time/step_s": 1.0,
    }
    for terminal in (False, True):
        shown = io.StringIO()
        with Display("run", Console(file=shown, force_terminal=terminal, width=120)) as display:
            display.step(1, 2, metrics)
        assert "1/2" in shown.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_learns_from_the_record_shows_its_loss(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Display("run", console) as display:
        display.step(
            1,
            3,
            {"train/loss": 0.5, "train/accuracy": 0.75, "train/margin": 0.25, "train/epoch": 0.5, "time/step_s": 1.0},
        )
    assert isinstance(console.file, io.StringIO)
    assert "loss 0.5000  accuracy 0.7500  margin 0.2500  epoch 0.50  1.0 s" in console.file.getvalue()


def test_a_piped_display_shows_life_within_a_long_phase_and_the_time_left() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=False, width=120)
    display = Display("run", console, lambda: now[0])
    for at, done in ((2.0, 0), (10.0, 8), (26.0, 16), (28.0, 16), (52.0, 48)):
        now[0] = at
        display.phase("collect", done, 64)
        display.beat()
    now[0] = 60.0
    display.phase("learn", 0, 1)
    now[0] = 86.0
    display.beat()
    display.beat()
    metrics = {"train/loss": 0.5, "train/epoch": 0.5, "time/step_s": 90.0}
    display.step(1, 3, metrics)
    now[0] = 266.0
    display.step(2, 3, metrics)
    display.step(3, 3, metrics)
    assert isinstance(console.file, io.StringIO)
    assert [line[:57].rstrip() for line in console.file.getvalue().splitlines()] == [
        "[   2.0 s] collect",
        "[  28.0 s] collect 16/64 for 26 s, about 78 s left",
        "[  60.0 s] learn",
        "[  86.0 s] learn 0/1 for 26 s",
        "[  86.0 s] step 1/3, about 3 min left  loss 0.5000  epoch"[:57],
        "[ 266.0 s] step 2/3, about 3 min left  loss 0.5000  epoch"[:57],
        "[ 266.0 s] step 3/3  loss 0.5000  epoch 0.50  90.0 s",
    ]


LOSSES: list[dict[str, Any]] = [{"step": step, "eval/loss": 1.0 / (1 + step)} for step in (0, 5, 10)]


@pytest.mark.parametrize(
    "success", [[], [{"step": 0, "eval/greedy/reward_mean": 0.1}, {"step": 10, "eval/greedy/reward_mean": 0.9}]]
)
def test_the_held_out_loss_is_drawn_alone_or_beside_the_success(tmp_path: Path, success: list[dict[str, Any]]) -> None:
    without, found = tmp_path / "without.png", tmp_path / "with.png"
    draw_curve(success, "run", without)
    draw_curve([*LOSSES, *success], "run", found)
    assert found.read_bytes()[:4] == b"\x89PNG"
    assert found.read_bytes() != without.read_bytes()
