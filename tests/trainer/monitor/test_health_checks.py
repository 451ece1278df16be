"""The collapse guard over rows that were made up: each rule warns of its own collapse, and of nothing in a healthy run."""

import math
from functools import partial
from typing import Any

import pytest

from agentlightning.trainer.monitor import health_checks
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, Alarm
from agentlightning.trainer.monitor.metrics import path_of

Row = dict[str, Any]
alarms = partial(health_checks.alarms, rules=HEALTH_CHECKS)

HEALTHY = {
    "train/reward_mean": 0.4,
    "train/reward_std": 0.5,
    "train/groups_with_signal": 0.7,
    "train/solved_groups": 0.1,
    "train/unsolved_groups": 0.2,
    "train/zero_variance": 0.3,
    "policy/entropy": 0.5,
    "policy/kl": 0.002,
    "policy/sampler_gap": 0.0001,
    "rollout/cause/infra": 0.0,
    "rollout/cause/verifier": 0.0,
    "policy/ratio_max": 0.6,
    "policy/clip_share": 0.05,
    "policy/ref_kl": 0.03,
    "train/grad_norm": 0.8,
    "rollout/count": 512.0,
    "rollout/turns": 3.0,
    "rollout/forked_share": 0.01,
    "rollout/failed": 4.0,
    "train/tokens_sampled": 40_000.0,
}


def base(kind: str = "sampled", **values: float) -> Row:
    name = f"eval/{kind}"
    numbers = {"reward_mean": 0.3, "share_above_min": 0.3, "share_below_max": 0.7} | values
    return {"step": 0, "kind": name, "time": 1.0} | {f"{name}/{key}": value for key, value in numbers.items()}


def run(*parts: tuple[int, Row]) -> list[Row]:
    """Steps of a healthy run, but for what each part says of that many steps."""
    rows = [base()]
    for count, changed in parts:
        for _ in range(count):
            rows.append({"step": len(rows), "kind": "step", "time": 1.0} | HEALTHY | changed)
    return rows


LEARNED = """
reward_mean reward_std zero_variance solved_groups turns entropy kl clip_share grad_norm
0.262 0.44 0.0938 0 2.26 0.258 0.000912 0.00578 0.122
0.379 0.486 0 0 2.38 0.237 0.00212 0.00727 0.182
0.414 0.493 0.0469 0.0156 2.45 0.211 0.00144 0.00805 0.173
0.531 0.5 0.0625 0.0625 2.46 0.203 0.00273 0.0158 0.285
0.68 0.467 0.0469 0.0469 2.3 0.175 0.000884 0.00692 0.315
0.746 0.436 0.203 0.188 2.48 0.156 0.00261 0.0081 0.436
0.816 0.388 0.156 0.156 2.56 0.135 8.6e-05 0.000577 0.447
0.787 0.41 0.172 0.141 2.52 0.116 0.000352 0.000809 0.315
0.832 0.374 0.328 0.312 2.53 0.115 0.000206 0.000718 0.408
0.885 0.32 0.438 0.422 2.41 0.102 6.15e-05 0.000292 0.438
0.885 0.32 0.469 0.469 2.53 0.0965 1.51e-05 0 0.364
"""
"""What `agl demo --task lookup` recorded while it learned, from 0.26 to 0.88; some of its steps."""


def names(rows: list[Row]) -> list[str]:
    return [alarm.name for alarm in alarms(rows)]


def test_a_real_run_that_learned_warns_of_nothing_at_any_step() -> None:
    header, *lines = LEARNED.split("\n")[1:-1]
    rows = [base()]
    for step, line in enumerate(lines, start=1):
        values = dict(zip(map(path_of, header.split()), map(float, line.split()), strict=True))
        rows.append({"step": step, "kind": "step", "time": 1.0} | values)
    assert [names(rows[:count]) for count in range(len(rows) + 1)] == [[]] * (len(rows) + 1)
    healthy = run(*((1, {"train/reward_mean": 0.4 + step / 100}) for step in range(40)))
    assert [names(healthy[:count]) for count in range(len(healthy) + 1)] == [[]] * (len(healthy) + 1)


SOLVED = {
    "train/reward_mean": 0.95,
    "policy/entropy": 0.02,
    "rollout/turns": 1.2,
    "train/solved_groups": 0.8,
    "train/groups_with_signal": 0.2,
    "train/zero_variance": 0.8,
}
RISING = [(1, {"train/reward_mean": 0.09 + 0.035 * step}) for step in range(14)]
"""SmolLM2 on word problems: .09 to .58 in 15 steps, then nothing more."""
FEW_TASKS = [0.6, 0.3, 0.5, 0.7, 0.4, 0.6, 0.3, 0.5, 0.4, 0.2, 0.4, 0.3]


@pytest.mark.parametrize(
    "rows",
    [
        run((10, {}), (10, SOLVED)),  # entropy, turns and variance go down because the tasks are solved
        run(*RISING, *((1, {"train/reward_mean": 0.57 + 0.02 * (step % 2)}) for step in range(20))),
        run((10, {}), (5, {"rollout/turns": 1.2, "train/reward_mean": 0.8})),
        run(*((1, {"train/reward_mean": reward}) for reward in FEW_TASKS)),
        [{"step": step, "kind": "step", "time": 1.0, "train/loss": 0.1} for step in range(1, 30)],
    ],
    ids=["succeeds", "rose and levelled off", "fewer turns, more reward", "noise of few tasks", "missing numbers"],
)
def test_what_only_looks_like_a_collapse_is_not_warned_of(rows: list[Row]) -> None:
    assert names(rows) == []


COLLAPSES = {
    "not_finite": run((12, {}), (1, {"train/loss": math.nan})),
    "updates_skipped": run((12, {}), (1, {"train/skipped_updates": 1.0})),
    "processes_hung": run((12, {}), (1, {"processes/hung": 1.0})),
    "calls_refused": run((12, {}), (1, {"rollout/refused_share": 0.02})),
    "entropy_gone": run((10, {}), (5, {"policy/entropy": 0.04})),
    "gradient_exploding": run((12, {}), (3, {"train/grad_norm": 40.0})),
    "kl_running_away": run((12, {}), (3, {"policy/ref_kl": 0.7})),
    "turns_collapsing": run((10, {}), (5, {"rollout/turns": 1.2})),
    "answers_growing": run((10, {}), (5, {"train/tokens_sampled": 130_000.0})),
    "reward_falling": run((10, {}), (5, {"train/reward_mean": 0.1})),
    "reward_flat": run(*((1, {"train/reward_mean": 0.4 + 0.02 * (step % 2)}) for step in range(20))),
    "rollouts_failing": run((12, {}), (3, {"rollout/failed": 300.0})),
    "infrastructure_failing": run((12, {}), (3, {"rollout/cause/infra": 0.2})),
    "verifier_failing": run((12, {}), (3, {"rollout/cause/verifier": 0.06})),
    "prompts_forking": run((12, {}), (3, {"rollout/forked_share": 0.5})),
    "sampler_gap": run((12, {}), (3, {"policy/sampler_gap": 0.05})),
    "ratio_exploding": run((12, {}), (3, {"policy/kl": 0.4})),
    "no_signal": run((12, {}), (3, {"train/zero_variance": 1.0})),
    "base_success_low": [base(share_above_min=0.02), *run((1, {}))[1:]],
    "base_success_perfect": [base(reward_mean=0.99, share_below_max=0.01), *run((1, {}))[1:]],
}


AT_ONCE = {"reward_flat", "base_success_low", "base_success_perfect", "not_finite", "updates_skipped"} | {
    "processes_hung",
    "calls_refused",
}


@pytest.mark.parametrize("name", sorted(HEALTH_CHECKS))
def test_each_collapse_is_warned_of_by_its_name_alone_and_a_trend_only_once_it_lasts(name: str) -> None:
    """One step of it is noise: the rows up to the first one that is ill warn of nothing."""
    assert names(COLLAPSES[name]) == [name]
    healthy = sum(all(row.get(key) == value for key, value in HEALTHY.items()) for row in COLLAPSES[name])
    assert name in AT_ONCE or names(COLLAPSES[name][: 1 + healthy + 1]) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (run((3, {"train/zero_variance": 1.0, "train/solved_groups": 0.9})), "end here, or take harder tasks"),
        (run((3, {"train/zero_variance": 1.0, "train/unsolved_groups": 0.9})), "take easier tasks"),
        (run((3, {"train/zero_variance": 1.0})), "algorithm.dynamic_sampling"),
        ([base(share_above_min=0.02, tasks=50.0)], "2% of 50 held-out tasks earn more than the lowest reward"),
        (run((3, {"policy/sampler_gap": 0.05})), "engine.dtype"),
        (run((3, {"policy/sampler_gap": 0.05, "rollout/staleness_mean": 1.5})), "trainer.max_staleness"),
        (run((3, {"policy/clip_share": 0.5})), "50% of the tokens are clipped"),
        (run((10, {"train/reward_mean": 0.6}), (5, {"train/reward_mean": 0.1})), "checkpoint nearest to step 3"),
    ],
)
def test_a_warning_says_what_to_change(rows: list[Row], said: str) -> None:
    (alarm,) = alarms(rows)
    assert said in alarm.text


@pytest.mark.parametrize(
    ("evaluated", "expected"),
    [
        (base(reward_mean=0.0, share_above_min=0.0, share_below_max=0.0), ["base_success_low"]),
        (base(reward_mean=1.0, share_above_min=0.0, share_below_max=0.0), ["base_success_perfect"]),
        (
            base(reward_mean=-0.9, share_above_min=0.02, share_below_max=0.98),
            ["base_success_low"],
        ),  # rewards of -1 and 1
        (
            base(reward_mean=0.02, share_above_min=1.0, share_below_max=0.99),
            [],
        ),  # rewards that are shares: small, and all differ
    ],
)
def test_base_success_is_judged_before_the_first_step_whatever_the_rewards_scale(
    evaluated: Row, expected: list[str]
) -> None:
    assert names([evaluated]) == expected


def test_a_greedy_evaluation_counts_after_the_first_step_where_there_is_no_other() -> None:
    greedy, step = base("greedy", share_above_min=0.0), run((1, {}))[1]
    assert names([greedy]) == []
    assert names([greedy, step]) == ["base_success_low"]
    assert names([greedy, base("sampled"), step]) == []


def test_a_divergence_that_was_there_before_the_first_update_is_not_laid_to_the_updates() -> None:
    assert names(run((5, {"policy/kl": 0.5, "policy/sampler_gap": 0.45}))) == ["sampler_gap"]


def test_one_update_that_goes_a_nat_too_far_is_an_alarm_by_itself() -> None:
    assert names(run((2, {}), (1, {"policy/kl": 1.4}))) == ["ratio_exploding"]


def test_a_run_that_collapsed_within_a_step_is_warned_of_before_long() -> None:
    """The demo's lookup task with ten times its learning rate: what it recorded, to three digits."""
    gone = {"train/reward_mean": 0.0, "train/reward_std": 0.0, "train/zero_variance": 1.0}
    gone |= {"train/solved_groups": 0.0, "train/unsolved_groups": 1.0}
    header = "reward_mean reward_std zero_variance turns kl grad_norm"
    numbers = [
        "0.307 0.463 0.083 2.24 0.051 0.41",
        "0.313 0.465 0.125 2.42 0.185 0.81",
        "0.005 0.072 0.958 1.36 1.459 3.98",
    ]
    first, second, third = (
        dict(zip(map(path_of, header.split()), map(float, line.split()), strict=True)) for line in numbers
    )
    steps = [first, second, gone | third, *[gone | {"rollout/turns": 1.0} for _ in range(7)]]
    rows = [{"step": step, "kind": "step", "time": 1.0} | row for step, row in enumerate(steps, start=1)]
    told: dict[str, int] = {}
    for count in range(1, 11):
        told = {alarm.name: count for alarm in alarms(rows[:count])} | told
    assert told == {"ratio_exploding": 3, "no_signal": 5, "reward_falling": 6, "turns_collapsing": 10}


def test_with_several_policies_each_is_watched_by_itself() -> None:
    rows = [
        {"step": step, "kind": "step", "time": 1.0}
        | {f"black/{name}": value for name, value in HEALTHY.items()}
        | {f"policies/white/{name}": value for name, value in (HEALTHY | {"policy/ref_kl": 2.0}).items()}
        for step in range(1, 6)
    ]
    (alarm,) = alarms(rows)
    assert alarm == Alarm("white/kl_running_away", alarm.text)
