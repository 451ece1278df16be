"""What a person sees of long work, piped and in a terminal."""

import io

import pytest
from rich.console import Console

from agentlightning.cli.display import Display


def test_a_step_that_taught_nothing_is_shown_like_any_other() -> None:
    """All groups without variance: no update, and so no loss."""
    metrics = {"reward_mean": 0.0, "mixed_groups": 0.0, "turns": 1.0, "tokens_per_second": 10.0, "seconds": 1.0}
    for terminal in (False, True):
        shown = io.StringIO()
        with Display("run", Console(file=shown, force_terminal=terminal, width=120)) as display:
            display.step(1, 2, metrics)
        assert "1/2" in shown.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_learns_from_the_record_shows_its_loss(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Display("run", console) as display:
        display.step(1, 3, {"loss": 0.5, "accuracy": 0.75, "margin": 0.25, "epoch": 0.5, "seconds": 1.0})
    assert isinstance(console.file, io.StringIO)
    assert "loss 0.5000  accuracy 0.7500  margin 0.2500  epoch 0.50  1.0 s" in console.file.getvalue()
