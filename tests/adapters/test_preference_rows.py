from __future__ import annotations

from dataclasses import replace

from agentlightning.adapters.sequences import completion_rows, mismatched_rows
from agentlightning.training_types import ImageInput, TrainingSequence, Trajectory, Transition
from call_tree import linked


def rollout(name: str, *calls: tuple[list[int], list[int]], temperature: float = 0.7) -> Trajectory:
    transitions = [
        Transition(
            call_id=f"{name}{number}",
            suffix_ids=prompt,
            sampled_ids=sampled,
            logprobs=[-1.0] * len(sampled),
            versions=[],
            temperature=temperature,
        )
        for number, (prompt, sampled) in enumerate(calls)
    ]
    return Trajectory(rollout_id=name, group_id="g", reward=1.0, transitions=linked(transitions))


def trained(row: TrainingSequence) -> list[int]:
    return [token for token, sampled in zip(row.tokens, row.mask, strict=True) if sampled]


def test_a_mismatched_answer_stands_beside_the_opening_of_the_one_before_it() -> None:
    first = completion_rows(rollout("a", ([1, 1], [2]), ([1, 1, 2, 3], [4])))
    second = completion_rows(rollout("b", ([9], [8])))
    one, two = mismatched_rows([first, second], longest=99)
    assert (one.tokens, one.mask) == ([9, 2, 3, 4], [False, True, False, True])
    assert one.segments == [(1, 2), (3, 4)]
    assert (two.tokens, two.mask) == ([1, 1, 8], [False, False, True])
    assert len(one.logprobs) == len(one.weights) == len(one.advantages) == len(one.tokens)


def test_a_mismatched_answer_keeps_its_own_images_and_has_the_other_opening_s() -> None:
    def seen(row: TrainingSequence, *images: tuple[str, int]) -> list[TrainingSequence]:
        return [replace(row, images=[ImageInput(hash=name, start=at, end=at + 1) for name, at in images])]

    (long,) = completion_rows(rollout("a", ([1, 9, 1], [2]), ([1, 9, 1, 2, 9], [4])))
    (short,) = completion_rows(rollout("b", ([9], [8])))
    one, two = mismatched_rows([seen(long, ("red", 1), ("blue", 4)), seen(short, ("green", 0))], longest=99)
    assert (one.tokens, [(image.hash, image.start) for image in one.images]) == (
        [9, 2, 9, 4],
        [("green", 0), ("blue", 2)],
    )
    assert (two.tokens, [(image.hash, image.start) for image in two.images]) == ([1, 9, 1, 8], [("red", 1)])
