from __future__ import annotations

from dataclasses import replace

import build
from agentlightning.adapters.sequences import completion_rows, mismatched_completions
from agentlightning.training_types import ImageInput, TrainingSequence, Trajectory
from call_tree import linked


def rollout(name: str, *calls: tuple[list[int], list[int]]) -> Trajectory:
    transitions = [
        build.transition(f"{name}{number}", suffix_ids=prompt, sampled_ids=sampled, temperature=0.7)
        for number, (prompt, sampled) in enumerate(calls)
    ]
    return build.trajectory(name, transitions=linked(transitions))


def trained(row: TrainingSequence) -> list[int]:
    return [token for token, sampled in zip(row.tokens, row.mask, strict=True) if sampled]


def test_an_answer_is_all_that_the_model_wrote_in_a_rollout_at_temperature_1_and_with_the_weights_given() -> None:
    (row,) = completion_rows(rollout("r", ([1, 2], [3]), ([1, 2, 3, 4], [5, 6])), weights=[0.25, 0.5])
    assert (row.tokens, trained(row), row.temperature) == ([1, 2, 3, 4, 5, 6], [3, 5, 6], 1.0)
    assert row.weights == [0, 0, 0.25, 0, 0.5, 0.5]


def test_a_mismatched_completion_stands_beside_the_opening_of_the_one_before_it() -> None:
    first = rollout("a", ([1, 1], [2]), ([1, 1, 2, 3], [4]))
    [[one], [two]] = mismatched_completions([first, rollout("b", ([9], [8]))], longest=99)
    assert (one.tokens, one.mask) == ([9, 2, 3, 4], [False, True, False, True])
    assert one.segments == [(1, 2), (3, 4)]
    assert (two.tokens, two.mask) == ([1, 1, 8], [False, False, True])
    assert len(one.logprobs) == len(one.weights) == len(one.advantages) == len(one.tokens)


def test_a_mismatched_completion_keeps_its_own_images_and_has_the_other_opening_s() -> None:
    def seen(one: Trajectory, *images: list[tuple[str, int]]) -> Trajectory:
        calls = [
            replace(call, images=[ImageInput(hash=name, start=at, end=at + 1) for name, at in shown])
            for call, shown in zip(one.transitions, images, strict=True)
        ]
        parents = [None, *calls]
        return replace(one, transitions=[replace(call, parent=parents[at]) for at, call in enumerate(calls)])

    long = seen(rollout("a", ([1, 9, 1], [2]), ([1, 9, 1, 2, 9], [4])), [("red", 1)], [("blue", 0)])
    short = seen(rollout("b", ([9], [8])), [("green", 0)])
    [[one], [two]] = mismatched_completions([long, short], longest=99)
    assert (one.tokens, [(image.hash, image.start) for image in one.images]) == (
        [9, 2, 9, 4],
        [("green", 0), ("blue", 2)],
    )
    assert (two.tokens, [(image.hash, image.start) for image in two.images]) == ([1, 9, 1, 8], [("red", 1)])


def test_a_completion_for_the_same_task_is_no_mismatch() -> None:
    same = [rollout(name, ([1], [token])) for name, token in (("a", 2), ("b", 3))]
    assert mismatched_completions(same, longest=99) == []
    found = mismatched_completions([*same, rollout("c", ([7], [4]))], longest=99)
    assert [[row.tokens for row in rows] for rows in found] == [[[7, 2]], [[7, 3]], [[1, 4]]]
    long = [rollout("a", ([1, 1, 1], [2, 2]), ([5], [6, 6, 6, 6])), rollout("b", ([9], [8]))]  # left out whole
    assert [[row.tokens for row in rows] for rows in mismatched_completions(long, longest=4)] == [[[1, 1, 1, 8]]]


def test_rows_of_one_completion_that_cannot_be_merged_are_one_mismatched_completion_and_keep_its_history() -> None:
    """A template that drops the first completion's reasoning (2): the second call begins a row of its own."""
    task = {"role": "user", "content": "Q"}
    calls = (([5, 1, 1, 0], [2, 3]), ([5, 1, 1, 3, 7, 0], [4]), ([6, 6], [8]))
    one = rollout("a", *calls)
    messages = [[task], [task, {"role": "assistant", "content": "3"}], [{"role": "user", "content": "another agent"}]]
    one = replace(one, transitions=[replace(c, messages=own) for c, own in zip(one.transitions, messages, strict=True)])
    rows, _ = mismatched_completions([one, rollout("b", ([5, 9, 0], [8]))], longest=99)
    assert [row.tokens for row in rows] == [[5, 9, 0, 2, 3], [5, 9, 3, 7, 0, 4], [5, 9, 0, 8]]
    assert [trained(row) for row in rows] == [[2, 3], [4], [8]]
