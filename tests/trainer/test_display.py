"""Progress of long work, piped and in a terminal."""

import io

import pytest
from rich.console import Console

from agentlightning.trainer.display import Display


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
