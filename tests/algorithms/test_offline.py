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


ROUNDED = 0.7 - 0.4  # 0.29999999999999993


@pytest.mark.parametrize(
    ("algorithm", "record", "wanted", "unwanted"),
    [
        (SFT(), [candidate("b", 0.0), candidate("a", None), candidate("c")], "bac", "---"),  # in the record's order
        (SFT(threshold=0.5), [candidate("a", 0.4), candidate("b", 0.5), candidate("c", None)], "b", "-"),
        (SFT(threshold=0.3), [candidate("a", ROUNDED), candidate("b", 0.2)], "a", "-"),
        (RFT(per_task=1), [candidate("u", 1.0, "u"), candidate("v", 1.0, "u"), candidate("w", 0.0, "w")], "u", "-"),
        (
            DPO(),  # of one task only
            [candidate("a", 1.0), candidate("b", 0.0, "u"), candidate("c", 0.0), candidate("d", 1.0, "u")],
            "ad",
            "cb",
        ),
        (KTO(threshold=0.7), [candidate("a", 0.7), candidate("b", 0.6), candidate("c", None)], "a-", "-b"),
        (KTO(threshold=0.3), [candidate("a", ROUNDED), candidate("b", 0.2)], "a-", "-b"),
    ],
)
def test_examples_are_chosen_by_reward_and_task(
    algorithm: OfflineAlgorithm, record: list[Candidate], wanted: str, unwanted: str
) -> None:
    found = algorithm.examples(record)
    assert "".join(one.wanted or "-" for one in found) == wanted
    assert "".join(one.unwanted or "-" for one in found) == unwanted


@pytest.mark.parametrize(
    ("algorithm", "rewards", "sentence"),
    [
        (RFT(), (0.25, 0.0), r"algorithm\.threshold: none of 2 .* at least 0\.5; the highest is 0\.25"),
        (DPO(), (1.0, 1.0), r"algorithm\.margin: 2 recorded rollouts give no pair"),
        (KTO(threshold=2.0), (0.7, 0.6), "none of 2 recorded rollouts with a reward reaches"),
        (KTO(threshold=0.0), (0.7, 0.6), "each of 2 recorded rollouts with a reward reaches"),
    ],
)
def test_a_record_without_examples_is_an_error(
    algorithm: OfflineAlgorithm, rewards: tuple[float, float], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        algorithm.examples([candidate("a", rewards[0]), candidate("b", rewards[1])])


def test_the_best_of_a_task_come_first_and_the_same_words_count_once() -> None:
    group = [candidate("a", 0.5, answer="x"), candidate("b", 1.0, answer="y"), candidate("c", 0.9, answer="y")]
    assert [one.rollout_id for one in best(group, None)] == ["b", "a"]
    assert [one.rollout_id for one in best(group, 1)] == ["b"]
    rounded = [candidate("b", 0.1 + 0.2), candidate("a", 0.3)]
    assert [one.rollout_id for one in best(rounded, None)] == ["a", "b"]


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


@pytest.mark.parametrize(
    ("one", "other", "margin"),
    [
        (candidate("a"), candidate("b"), 0.0),
        (candidate("a", 1.0, answer="x"), candidate("b", 0.0, answer="x"), 0.0),
        (candidate("a"), candidate("b", None), 0.0),
        (candidate("a", 0.8), candidate("b", 0.5), 0.3),  # but for rounding
        (candidate("a", 0.1 + 0.2), candidate("b", 0.3), 0.0),
    ],
)
def test_equal_rewards_equal_words_unknown_rewards_and_the_very_margin_are_no_pair(
    one: Candidate, other: Candidate, margin: float
) -> None:
    assert pairs([one, other], margin) == []


def test_the_rarer_kind_is_weighed_up() -> None:
    assert (balance(30, 10), balance(10, 30), balance(0, 3), balance(3, 0)) == ((1, 3), (3, 1), (1, 1), (1, 1))
    loss = KTO(beta=0.2).loss([Example(wanted="a"), Example(unwanted="b"), Example(unwanted="c")])
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
        (Distill, {"models": "gpt-5"}, "models"),
        (DPO, {"margin": -1}, "margin"),
        (KTO, {"threshold": float("nan")}, "threshold"),
    ],
)
def test_a_setting_out_of_range_is_named(kind: type[OfflineAlgorithm], settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field}: "):
        kind(**settings)
