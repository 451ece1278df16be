"""The rules that name what bounds a run, on rows of metrics."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.analysis.bottlenecks import MIN_GAIN, RULES, find_bottlenecks
from agentlightning.trainer.monitor.metrics import METRICS

HEALTHY = {
    "time/step_s": 10.0,
    "time/collect_s": 5.0,
    "time/prepare_s": 0.2,
    "time/update_s": 4.5,
    "time/publish_s": 0.2,
    "time/record_s": 0.1,
    "rollout/count": 64.0,
    "rollout/staleness_mean": 1.0,
    "rollout/queued_s": 0.1,
    "rollout/duration_s": 4.0,
    "rollout/duration_max_s": 5.0,
    "rollout/model_s": 1.5,
    "rollout/between_calls_s": 1.5,
    "rollout/after_calls_s": 1.0,
    "workers/slots": 64.0,
    "workers/running_mean": 25.6,
    "workers/busy_share": 0.4,
    "workers/queued_mean": 0.6,
    "gateway/busy_share": 0.55,
    "sampler/busy_share": 0.5,
    "sampler/calls_mean": 40.0,
    "sampler/slots": 64.0,
    "sampler/tokens_per_s": 900.0,
}
SLOW_TOOL = {
    "time/collect_s": 8.0,
    "time/update_s": 1.5,
    "rollout/duration_s": 7.0,
    "rollout/between_calls_s": 6.0,
    "rollout/model_s": 0.9,
    "rollout/after_calls_s": 0.1,
    "sampler/busy_share": 0.3,
}
PLANTED: dict[str, dict[str, float]] = {
    "slow_tools": SLOW_TOOL,
    "slow_rewards": SLOW_TOOL | {"rollout/between_calls_s": 0.1, "rollout/after_calls_s": 6.0},
    "few_workers": {
        "time/collect_s": 9.0,
        "time/update_s": 0.5,
        "workers/slots": 4.0,
        "workers/busy_share": 0.85,
        "rollout/queued_s": 4.5,
        "rollout/duration_s": 0.5,
        "rollout/duration_max_s": 0.6,
        "rollout/model_s": 0.2,
        "rollout/between_calls_s": 0.2,
        "rollout/after_calls_s": 0.1,
        "sampler/calls_mean": 2.0,
    },
    "small_batch": {"rollout/count": 4.0, "sampler/calls_mean": 2.0, "time/collect_s": 5.0, "time/update_s": 4.0},
    "sampler_full": {
        "time/collect_s": 9.0,
        "time/update_s": 0.8,
        "rollout/duration_s": 8.0,
        "rollout/model_s": 7.5,
        "rollout/between_calls_s": 0.3,
        "rollout/after_calls_s": 0.2,
        "sampler/calls_mean": 63.0,
        "workers/busy_share": 0.35,
    },
    "slow_sampler": {
        "time/collect_s": 9.0,
        "time/update_s": 0.8,
        "rollout/duration_s": 8.0,
        "rollout/model_s": 7.5,
        "rollout/between_calls_s": 0.3,
        "rollout/after_calls_s": 0.2,
    },
    "stragglers": {
        "time/collect_s": 9.0,
        "time/update_s": 0.5,
        "rollout/duration_s": 1.0,
        "rollout/duration_max_s": 8.9,
        "rollout/model_s": 0.35,
        "rollout/between_calls_s": 0.35,
        "rollout/after_calls_s": 0.3,
    },
    "slow_learner": {"time/collect_s": 0.5, "time/update_s": 9.0},
}


def without(name: str) -> dict[str, float]:
    return {key: value for key, value in HEALTHY.items() if key != name}


def test_a_run_whose_parts_all_work_is_bound_by_nothing() -> None:
    found = find_bottlenecks([HEALTHY] * 3)
    assert (found.steps, found.step_s, found.findings) == (3, 10.0, [])
    assert [(lane.name, round(lane.share, 3)) for lane in found.phases] == [
        ("collect", 0.5),
        ("prepare", 0.02),
        ("update", 0.45),
        ("publish", 0.02),
        ("record", 0.01),
        ("other", 0.0),
    ]
    assert [lane.name for lane in found.rollout] == ["queued", "model", "between calls", "after calls"]
    busy = {lane.name: lane.share for lane in found.busy}
    expected = {"sampler": 0.5, "gateway": 0.55, "workers": 0.4, "agents": 0.15, "reward": 0.1, "learner": 0.45}
    assert busy == pytest.approx(expected)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_the_first_that_is_named(name: str) -> None:
    first = find_bottlenecks([HEALTHY, HEALTHY | PLANTED[name]], latest=1).findings[0]
    assert first.name == name
    assert first.settings
    assert "nan" not in first.text
    assert MIN_GAIN <= first.gain <= 1


def test_sampling_and_learning_in_turns_are_told_unless_agents_run_ahead() -> None:
    [finding] = find_bottlenecks([without("rollout/staleness_mean")]).findings
    assert (finding.name, finding.settings, finding.gain) == ("learning_alone", ("trainer.max_staleness",), 0.45)
    assert "(50%)" in finding.text
    assert "(45%)" in finding.text


def test_the_arithmetic_stands_in_the_words() -> None:
    [slow, *_] = find_bottlenecks([HEALTHY | SLOW_TOOL]).findings
    assert "80% × 86% = 69%" in slow.text
    assert slow.gain == pytest.approx(0.8 * 6 / 7)
    [few, *_] = find_bottlenecks([HEALTHY | PLANTED["few_workers"]]).findings
    assert "16.0 rounds" in few.text
    assert few.gain == pytest.approx(0.9 * 15 / 16)
    [small, *_] = find_bottlenecks([HEALTHY | PLANTED["small_batch"]]).findings
    assert small.gain == pytest.approx(0.6 * 15 / 16)
    [full, *_] = find_bottlenecks([HEALTHY | PLANTED["sampler_full"]]).findings
    assert full.text.startswith("workers idle 61%, sampler full: 63 calls of 64")


def test_every_rule_is_planted_and_asks_for_metrics_that_there_are() -> None:
    assert set(RULES) == {*PLANTED, "learning_alone"}
    assert set(HEALTHY) <= set(METRICS)


def test_the_latest_steps_count_and_a_run_without_steps_says_nothing() -> None:
    rows = [HEALTHY | SLOW_TOOL] * 20 + [HEALTHY] * 10
    assert find_bottlenecks(rows).findings == []
    assert find_bottlenecks(rows, latest=30).findings[0].name == "slow_tools"
    empty = find_bottlenecks([{"step": 0.0, "eval/greedy/reward_mean": 1.0}])
    assert (empty.steps, empty.phases, empty.rollout, empty.busy, empty.findings) == (0, [], [], [], [])


NUMBERS = st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3), st.booleans(), st.floats(0, 1))
ROWS = st.lists(st.dictionaries(st.sampled_from(sorted(HEALTHY)), NUMBERS), max_size=4)


@given(ROWS)
def test_whatever_the_rows_hold_shares_are_shares_and_json_can_hold_them(rows: list[dict[str, Any]]) -> None:
    found = find_bottlenecks(rows)
    orjson.dumps(found)
    for lane in (*found.phases, *found.rollout, *found.busy):
        assert 0 <= lane.share <= 1
    gains = [finding.gain for finding in found.findings]
    assert all(MIN_GAIN <= gain <= 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)
    if found.steps:
        assert sum(lane.share for lane in found.phases) >= 1 - 1e-9
