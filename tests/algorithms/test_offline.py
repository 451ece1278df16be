"""What is chosen from the record to be imitated or compared, worked by hand."""

from __future__ import annotations

import pytest

from agentlightning.algorithms.offline import (
    DPO,
    KTO,
    RFT,
    SFT,
    Candidate,
    Distill,
    Example,
    OfflineAlgorithm,
    balance,
    best,
    pairs,
)
from agentlightning.errors import ConfigError


def candidate(name: str, reward: float | None = 1.0, task: str = "t", answer: str | None = None) -> Candidate:
    return Candidate(rollout_id=name, task=task, reward=reward, answer=name if answer is None else answer)


def names(examples: list[Example]) -> list[tuple[str | None, str | None]]:
    return [(example.wanted, example.unwanted) for example in examples]


def test_sft_imitates_every_rollout_in_the_order_of_the_record() -> None:
    found = SFT().examples([candidate("b", 0.0), candidate("a", None), candidate("c", 1.0)])
    assert names(found) == [("b", None), ("a", None), ("c", None)]


def test_sft_with_a_threshold_leaves_out_what_is_worse_and_what_has_no_reward() -> None:
    found = SFT(threshold=0.5).examples([candidate("a", 0.4), candidate("b", 0.5), candidate("c", None)])
    assert names(found) == [("b", None)]


def test_a_threshold_that_nothing_reaches_is_an_error_with_the_highest_reward() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.threshold: none of 2 .* at least 0\.5; the highest is 0\.25"):
        RFT().examples([candidate("a", 0.25), candidate("b", 0.0)])


def test_the_best_of_a_task_come_first_and_the_same_words_count_once() -> None:
    group = [candidate("a", 0.5, answer="x"), candidate("b", 1.0, answer="y"), candidate("c", 0.9, answer="y")]
    assert [one.rollout_id for one in best(group, None)] == ["b", "a"]
    assert [one.rollout_id for one in best(group, 1)] == ["b"]


def test_rft_takes_so_many_rollouts_of_each_task() -> None:
    record = [candidate(f"{task}{n}", 1.0, task) for task in "uv" for n in range(3)] + [candidate("w", 0.0, "w")]
    assert names(RFT(per_task=2).examples(record)) == [("u0", None), ("u1", None), ("v0", None), ("v1", None)]


def test_distillation_takes_external_models_unless_it_is_told_which() -> None:
    assert Distill().teaches(policy="", model="gpt-5")
    assert not Distill().teaches(policy="default", model="gpt-5")
    chosen = Distill(models=["big-*"])
    assert chosen.teaches(policy="default", model="big-model")
    assert not chosen.teaches(policy="", model="judge")


def test_the_best_is_paired_with_the_worst_and_nobody_twice() -> None:
    group = [candidate(str(reward), reward) for reward in (0.5, 1.0, 0.0, 0.75, 0.625)]
    assert [(a.rollout_id, b.rollout_id) for a, b in pairs(group, 0.0)] == [("1.0", "0.0"), ("0.75", "0.5")]
    assert [(a.rollout_id, b.rollout_id) for a, b in pairs(group, 0.25)] == [("1.0", "0.0")]


def test_equal_rewards_equal_words_and_unknown_rewards_are_no_pair() -> None:
    assert pairs([candidate("a"), candidate("b")], 0.0) == []
    assert pairs([candidate("a", 1.0, answer="x"), candidate("b", 0.0, answer="x")], 0.0) == []
    assert pairs([candidate("a", 1.0), candidate("b", None)], 0.0) == []


@pytest.mark.parametrize(("better", "worse", "margin"), [(1.0, 0.5, 0.5), (0.8, 0.5, 0.3), (0.1 + 0.2, 0.3, 0.0)])
def test_a_difference_of_exactly_the_margin_but_for_rounding_is_no_pair(
    better: float, worse: float, margin: float
) -> None:
    assert pairs([candidate("a", better), candidate("b", worse)], margin) == []


def test_a_reward_that_reaches_the_threshold_but_for_rounding_is_good() -> None:
    record = [candidate("a", 0.7 - 0.4), candidate("b", 0.2)]  # 0.29999999999999993
    assert names(KTO(threshold=0.3).examples(record)) == [("a", None), (None, "b")]
    assert names(SFT(threshold=0.3).examples(record)) == [("a", None)]


def test_rollouts_whose_rewards_differ_by_rounding_alone_keep_the_order_of_their_ids() -> None:
    assert [one.rollout_id for one in best([candidate("b", 0.1 + 0.2), candidate("a", 0.3)], None)] == ["a", "b"]


def test_dpo_pairs_rollouts_of_one_task_only() -> None:
    record = [candidate("a", 1.0, "t"), candidate("b", 0.0, "u"), candidate("c", 0.0, "t"), candidate("d", 1.0, "u")]
    assert names(DPO().examples(record)) == [("a", "c"), ("d", "b")]


def test_a_record_without_a_pair_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.margin: 2 recorded rollouts give no pair"):
        DPO().examples([candidate("a", 1.0), candidate("b", 1.0)])


@pytest.mark.parametrize(("threshold", "which"), [(2.0, "none"), (0.0, "each")])
def test_kto_needs_both_kinds(threshold: float, which: str) -> None:
    with pytest.raises(ConfigError, match=f"{which} of 2 recorded rollouts with a reward reaches"):
        KTO(threshold=threshold).examples([candidate("a", 0.7), candidate("b", 0.6)])


def test_the_rarer_kind_is_weighed_up() -> None:
    assert balance(30, 10) == (1.0, 3.0)
    assert balance(10, 30) == (3.0, 1.0)
    assert balance(0, 3) == balance(3, 0) == (1.0, 1.0)


def test_kto_weighs_both_kinds_alike() -> None:
    examples = [Example(wanted="a"), Example(unwanted="b"), Example(unwanted="c")]
    loss = KTO(beta=0.2).loss(examples)
    assert (loss.beta, loss.chosen_weight, loss.rejected_weight) == (0.2, 2.0, 1.0)


def test_tasks_are_held_out_whole_and_the_same_ones_each_time() -> None:
    record = [candidate(f"{task}-{n}", float(n), f"task {task}") for task in range(400) for n in range(2)]
    held = [example.wanted for example in SFT(held_out=0.1).examples(record) if example.held_out]
    again = [example.wanted for example in DPO(held_out=0.1).examples(record[::-1]) if example.held_out]
    tasks = {str(name).split("-")[0] for name in held}
    assert len(held) == 2 * len(tasks)
    assert {str(name).split("-")[0] for name in again} == tasks
    assert 20 <= len(tasks) <= 60
    assert not any(example.held_out for example in SFT(held_out=0.0).examples(record))


@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        (SFT, {"held_out": 1.0}, "held_out"),
        (SFT, {"threshold": "high"}, "threshold"),
        (RFT, {"threshold": None}, "threshold"),
        (RFT, {"per_task": 0}, "per_task"),
        (Distill, {"models": []}, "models"),
        (Distill, {"models": "gpt-5"}, "models"),
        (DPO, {"beta": 0}, "beta"),
        (DPO, {"margin": -1}, "margin"),
        (KTO, {"threshold": float("nan")}, "threshold"),
    ],
)
def test_a_setting_out_of_range_is_named(kind: type[OfflineAlgorithm], settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field}: "):
        kind(**settings)
