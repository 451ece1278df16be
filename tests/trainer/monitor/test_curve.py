"""The curve of a run that learns from the record."""

from pathlib import Path
from typing import Any

import pytest

from agentlightning.trainer.display import draw_curve

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
