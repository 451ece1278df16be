"""What becomes of a run's numbers: store, metrics.jsonl, summary, and the notes of the guard."""

import math
from pathlib import Path

import pytest
from loop_doubles import Noting

from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.health_checks import begun_alarms
from agentlightning.trainer.monitor.metric_logger import QUIET, MetricLogger
from agentlightning.trainer.monitor.metrics import (
    METRICS,
    derived,
    group_of,
    in_order,
    numbers,
    path_of,
    policy_of,
)


def watch(store: InMemoryLightningStore, root: Path) -> tuple[MetricLogger, Noting]:
    folder, notes = RunFolder(root, "run"), Noting()
    folder.make()
    return MetricLogger(run_id="run", folder=folder, store=store, progress=notes), notes


async def test_a_row_is_in_the_store_the_file_and_the_summary_with_what_follows_from_it(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, _ = watch(store, tmp_path)
    rows: list[int] = []
    watched.on_row = lambda: rows.append(len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()))
    recorded = await watched.record(
        3,
        "step",
        {
            "train/reward_mean": 0.5,
            "time/step_s": 4.0,
            "time/update_s": 1.0,
            "train/tokens_sampled": 8.0,
            "train/tokens_trained": 6.0,
        },
    )
    assert recorded["train/trained_token_share"] == 0.75
    assert recorded["time/update_share"] == 0.25
    assert {metric.name: metric.value for metric in await store.metrics("run")} == recorded
    (row,) = RunFolder(tmp_path, "run").metrics()
    assert numbers(row) == recorded
    assert (row["step"], row["kind"]) == (3, "step")
    assert rows == [1]  # told after the row is there
    (run,) = await store.runs(ids=["run"])
    assert run.summary == {"step": 3, "train/reward_mean": 0.5, "alarms": {}}


async def test_what_is_wrong_is_told_once_and_stays_in_the_summary_while_it_lasts(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = watch(store, tmp_path)
    reported: list[tuple[int, str]] = []
    watched.on_alarm = lambda step, alarm: reported.append((step, alarm.name))
    for step in range(1, 6):
        await watched.record(step, "step", {"policy/kl": 0.9})
    assert reported == [(3, "ratio_exploding")]
    assert len(notes.notes) == 1
    assert notes.notes[0].startswith("warning ratio_exploding: ")
    (run,) = await store.runs(ids=["run"])
    assert list(run.summary["alarms"]) == ["ratio_exploding"]
    for step in range(6, 8):
        await watched.record(step, "step", {"policy/kl": 0.0})
    (run,) = await store.runs(ids=["run"])
    assert run.summary["alarms"] == {}
    assert [one[:2] for one in begun_alarms(run)] == [(3, "ratio_exploding")]


async def test_a_resumed_run_repeats_no_warning_and_forgets_what_was_undone(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, _ = watch(store, tmp_path)
    for step in range(1, 5):
        await watched.record(step, "step", {"policy/kl": 0.9})
    again, notes = watch(store, tmp_path)
    again.resumed(4)
    await again.record(5, "step", {"policy/kl": 0.9})
    assert notes.notes == []
    undone, notes = watch(store, tmp_path)
    undone.resumed(1)
    await undone.record(2, "step", {"policy/kl": 0.9})
    assert notes.notes == []  # two steps are left, and a trend takes three
    await undone.record(3, "step", {"policy/kl": 0.9})
    assert len(notes.notes) == 1
    assert [one[:2] for one in begun_alarms(*await store.runs(ids=["run"]))] == [(3, "ratio_exploding")]  # once


async def test_a_number_that_is_not_finite_ends_nothing_and_is_warned_of(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = watch(store, tmp_path)
    await watched.record(1, "step", {"train/loss": math.nan, "policy/kl": math.inf})
    assert notes.notes[0].startswith("warning not_finite: policy/kl, train/loss of step 1")


def test_shares_are_those_of_each_policy() -> None:
    named = {
        "policies/white/train/tokens_trained": 1.0,
        "policies/white/train/tokens_sampled": 4.0,
        "train/tokens_trained": 3.0,
        "train/tokens_sampled": 6.0,
    }
    assert derived(named) == {"train/trained_token_share": 0.5, "policies/white/train/trained_token_share": 0.25}


def test_names_are_ordered_by_group_and_unknown_ones_come_last() -> None:
    assert in_order(
        ["zebra", "time/step_s", "policies/black/policy/entropy", "policy/entropy", "train/reward_mean"]
    ) == [
        "train/reward_mean",
        "policies/black/policy/entropy",
        "policy/entropy",
        "time/step_s",
        "zebra",
    ]
    assert (group_of("policies/black/policy/entropy"), group_of("zebra")) == ("policy", "other")


@pytest.mark.parametrize(("trackers", "said"), [(["tensorbord"], "trackers.0"), ("tensorboard", "trackers")])
def test_a_tracker_that_does_not_exist_is_an_error_that_names_the_setting(trackers: object, said: str) -> None:
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
    with pytest.raises(ConfigError, match=said):
        parse_config(table | {"trainer": {"trackers": trackers}})


def test_a_policy_that_is_called_like_a_group_of_metrics_collides_with_none() -> None:
    """Its metrics stand below policies/ALIAS/, where no group of the run is."""
    for alias in sorted({path.partition("/")[0] for path in METRICS}):
        for path in METRICS:
            own = path_of(path, alias)
            assert own not in METRICS
            assert (policy_of(own), group_of(own)) == (f"policies/{alias}/", path.partition("/")[0])


async def test_an_alarm_that_comes_back_at_once_is_not_told_again_and_later_it_is(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = watch(store, tmp_path)
    gaps = [1.4, *[0.0] * 3, 1.4, *[0.0] * (QUIET + 1), 1.4]
    for step, gap in enumerate(gaps, 1):
        await watched.record(step, "step", {"policy/kl": gap})
    assert len(notes.notes) == 2
