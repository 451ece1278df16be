"""The catalog has every part that there is."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from agentlightning.adapters.sequences import Aggregation
from agentlightning.algorithms.advantage import ADVANTAGES
from agentlightning.algorithms.catalog import catalog, named_in
from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.losses import LOSSES
from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS
from agentlightning.trainer.schedules import OFFLINE_ALGORITHMS

FILE = Path(__file__).parents[2] / "examples" / "own_algorithm" / "own_algorithm.py"


def test_every_built_in_part_is_listed_with_a_source() -> None:
    found = {(entry.kind, entry.name) for entry in catalog() if entry.where == "built-in"}
    assert found == {
        *(("algorithm", name) for name in ("lightning_rl", *OFFLINE_ALGORITHMS, *PROMPT_ALGORITHMS)),
        *(("credit", name) for name in CREDIT),
        *(("advantage", name) for name in (*ADVANTAGES, "gae")),
        *(("loss", name) for name in LOSSES),
        *(("aggregation", name) for name in get_args(Aggregation)),
    }
    assert all(entry.source for entry in catalog())


def test_settings_of_a_rule_have_their_defaults() -> None:
    settings = {(entry.kind, entry.name): entry.settings for entry in catalog()}
    assert settings["credit", "discounted"] == ("gamma = 0.95",)
    assert settings["loss", "gspo"] == ("clip_low = 0.0003", "clip_high = 0.0004")
    assert settings["aggregation", "fixed_length"] == ("length",)


def test_parts_of_files_are_described_by_themselves_also_those_of_a_schedule() -> None:
    table = {
        "type": f"{FILE}:HardTasks",
        "loss": {"type": f"{FILE}:sapo"},
        "schedule": [{"from_step": 2, "advantage": f"{FILE}:median"}, {"from_step": 3, "credit": f"{FILE}:nobody"}],
    }
    found = {entry.kind: entry for entry in named_in(table)}
    algorithm, loss, advantage, missing = (found[kind] for kind in ("algorithm", "loss", "advantage", "credit"))  # type: ignore[index]
    assert "too_easy" in algorithm.settings
    assert loss.settings == ("positive = 1.0", "negative = 1.05")
    assert loss.source.startswith("-4/τ")
    assert advantage.settings == ("scale = 1.0",)
    assert "there is no 'nobody'" in missing.source
