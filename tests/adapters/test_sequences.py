from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapters.sequences import Aggregation, by_call, merge, token_weights, until_last_signal
from agentlightning.training_types import Trajectory, Transition
from call_tree import linked

NUMBERS = itertools.count()


def transition(prompt: list[int], sampled: list[int], temperature: float = 1.0) -> Transition:
    return Transition(
        call_id=f"c{next(NUMBERS)}",
        suffix_ids=prompt,
        sampled_ids=sampled,
        logprobs=[-float(token) for token in sampled],
        versions=[],
        temperature=temperature,
    )


def trajectory(*transitions: Transition) -> Trajectory:
    return Trajectory(rollout_id="r", group_id="g", reward=1.0, transitions=list(transitions))


def test_a_conversation_becomes_one_row_and_another_prompt_a_second() -> None:
    transitions = [transition([1, 2], [3]), transition([1, 2, 3, 4], [5, 6]), transition([9], [8])]
    first, second = merge("r", linked(transitions), [0.5, -1.0, 2.0], [0.1, 0.2, 0.3])
    assert first.tokens == [1, 2, 3, 4, 5, 6]
    assert first.mask == [False, False, True, False, True, True]
    assert first.logprobs == [0, 0, -3.0, 0, -5.0, -6.0]
    assert first.advantages == [0, 0, 0.5, 0, -1.0, -1.0]
    assert first.weights == [0, 0, 0.1, 0, 0.2, 0.2]
    assert first.segments == [(2, 3), (4, 6)]
    assert (second.tokens, second.mask, second.segments) == ([9, 8], [False, True], [(1, 2)])
    assert {first.rollout_id, second.rollout_id} == {"r"}


def test_a_row_is_cut_behind_its_last_call_that_has_an_advantage() -> None:
    calls = [transition([1, 2], [3]), transition([1, 2, 3, 4], [5, 6]), transition([1, 2, 3, 4, 5, 6, 7], [8])]
    calls[1:] = [replace(call, decoding={"grammar": "g"}) for call in calls[1:]]
    [row] = merge("r", linked(calls), [0.0, -0.5, 0.0], [0.1] * 3, {"kl_weights": [0.2] * 3})
    cut = until_last_signal(row)
    assert cut is not None
    assert cut == merge("r", linked(calls[:2]), [0.0, -0.5], [0.1] * 2, {"kl_weights": [0.2] * 2})[0]
    assert cut.calls == [call.call_id for call in calls[:2]]
    assert until_last_signal(cut) is cut
    forced = replace(calls[0], decoding={"forced": [[0, 1]]})
    assert until_last_signal(merge("r", [forced], [0.7], [1.0])[0]) is None


def test_a_branch_is_continued_by_its_own_next_call() -> None:
    transitions = [
        transition([1], [2]),
        transition([1, 2, 3], [4]),
        transition([1, 2, 5], [6]),
        transition([1, 2, 5, 6, 7], [8]),
    ]
    rows = merge("r", linked(transitions), [1.0] * 4, [1.0] * 4)
    assert [row.tokens for row in rows] == [[1, 2, 3, 4], [1, 2, 5, 6, 7, 8]]
    assert rows[1].mask == [False, False, False, True, False, True]  # the shared answer is trained once


def test_calls_of_different_temperatures_never_share_a_row() -> None:
    rows = merge("r", linked([transition([1], [2], 1.0), transition([1, 2, 3], [4], 0.5)]), [1.0] * 2, [1.0] * 2)
    assert [(row.tokens, row.mask, row.temperature) for row in rows] == [
        ([1, 2], [False, True], 1.0),
        ([1, 2, 3, 4], [False, False, False, True], 0.5),
    ]


def forced(call: Transition, *spans: list[int]) -> Transition:
    """The call with a grammar that forced these of its sampled tokens."""
    return replace(call, decoding={"grammar": {}, "forced": [*spans]})


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [[1 / 5, 0.0, 1 / 5], [1 / 5], [0.0]]),  # 5 trained tokens: 1, none, 1 and 3
        ("sequence_mean", [[1 / 3, 0.0, 1 / 3], [1 / 9], [0.0]]),  # 3 calls with trained tokens
        ("rollout_mean", [[1 / 4, 0.0, 1 / 4], [1 / 6], [0.0]]),  # 2 rollouts with 2 and 3 trained tokens
        ("fixed_length", [[1 / 20, 0.0, 1 / 20], [1 / 20], [0.0]]),
    ],
)
def test_tokens_that_a_grammar_forced_count_in_no_weight(aggregation: Aggregation, expected: list[list[float]]) -> None:
    batch = [
        trajectory(
            forced(transition([1], [2, 3, 4]), [0, 1], [2, 3]),
            forced(transition([1], [5, 6]), [0, 2]),
            transition([9], [8]),
        ),
        trajectory(transition([1], [2, 3, 4])),
        trajectory(forced(transition([1], [2]), [0, 1])),
    ]
    assert token_weights(batch, aggregation, 10) == [pytest.approx(row) for row in expected]
    assert token_weights(batch[2:], aggregation, 10) == [[0.0]]
    with pytest.raises(ValueError, match="fixed_length"):
        token_weights(batch, "fixed_length")


def test_tokens_that_a_grammar_forced_are_context_in_merged_rows_and_in_rows_of_their_own() -> None:
    calls = linked([transition([1, 2], [3, 4, 5]), transition([1, 2, 3, 4, 5, 6], [7, 8])])
    calls = [forced(calls[0], [0, 2]), forced(replace(calls[1], parent=None, suffix_ids=calls[1].prompt_ids), [0, 2])]
    calls[1] = replace(calls[1], parent=calls[0], suffix_ids=[6])
    [row] = merge("r", calls, [0.0, 1.0], [0.5, 0.25], {"returns": [[1.0, 2.0, 3.0], 4.0]})
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.mask == [False] * 4 + [True] + [False] * 3
    assert (row.weights, row.returns) == ([0, 0, 0, 0, 0.5, 0, 0, 0], [0, 0, 0, 0, 3.0, 0, 0, 0])
    assert (row.segments, len(row.decodings)) == ([(2, 5), (6, 8)], 2)
    assert by_call([row], [[float(token) for token in row.tokens]]) == [[3.0, 4.0, 5.0], [7.0, 8.0]]
    first, second = merge("r", calls, [0.0, 1.0], [0.5, 0.25], apart=True)
    assert (first.mask, second.mask) == ([False] * 4 + [True], [False] * 8)


@st.composite
def call_trees(draw: st.DrawFn) -> list[Transition]:
    """Calls that continue an earlier call or start afresh, over an alphabet so small that prefixes meet by chance."""
    ids = st.lists(st.integers(1, 2), min_size=1, max_size=3)
    calls: list[Transition] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *calls]))
        suffix = draw(ids if parent is None else st.lists(st.integers(1, 2), max_size=2))
        call = transition(suffix, draw(ids), draw(st.sampled_from([1.0, 1.0, 0.5])))
        calls.append(replace(call, call_id=str(number), parent=parent))
    return calls


@given(call_trees(), st.sampled_from(["token_mean", "sequence_mean", "rollout_mean"]))
def test_merging_trains_each_sampled_token_once_in_its_own_context(
    calls: list[Transition], aggregation: Aggregation
) -> None:
    [weights] = token_weights([trajectory(*calls)], aggregation)
    advantages = [float(index + 1) for index in range(len(calls))]

    def trained(rows: list) -> list[tuple]:
        """Each trained token with everything that its gradient depends on."""
        return sorted(
            (row.tokens[: at + 1], row.temperature, row.logprobs[at], row.advantages[at], row.weights[at])
            for row in rows
            for at, masked in enumerate(row.mask)
            if masked
        )

    merged = merge("r", calls, advantages, weights)
    plain = merge("r", calls, advantages, weights, apart=True)
    assert trained(merged) == trained(plain)
    assert sum(map(len, trained(plain))) // 5 == sum(len(call.sampled_ids) for call in calls)
    assert math.fsum(w for row in merged for w in row.weights) == pytest.approx(1.0)
    for row in merged:
        assert not row.mask[0]
        assert {len(row.tokens), len(row.mask), len(row.logprobs), len(row.advantages), len(row.weights)} == {
            len(row.tokens)
        }
        in_segments = [any(start <= at < end for start, end in row.segments) for at in range(len(row.tokens))]
        assert in_segments == row.mask
        assert all(row.weights[at] == 0.0 for at, masked in enumerate(row.mask) if not masked)


def merged_by_comparing(calls: list[Transition]) -> list[tuple[list[int], list[bool], list[tuple[int, int]], float]]:
    """The slow definition: a call continues the longest row that its prompt, rebuilt, begins with."""
    rows: list[tuple[list[int], list[bool], list[tuple[int, int]], float]] = []
    for call in calls:
        prompt = call.prompt_ids
        fitting = [row for row in rows if row[3] == call.temperature and prompt[: len(row[0])] == row[0]]
        if not fitting:
            rows.append(([], [], [], call.temperature))
        tokens, mask, segments, _ = max(fitting, key=lambda row: len(row[0])) if fitting else rows[-1]
        mask += [False] * (len(prompt) - len(tokens)) + [True] * len(call.sampled_ids)
        tokens += prompt[len(tokens) :] + call.sampled_ids
        segments.append((len(prompt), len(tokens)))
    return rows


@given(call_trees())
def test_rows_from_the_tree_equal_rows_from_comparing_prompts(calls: list[Transition]) -> None:
    fresh = itertools.count(10)  # no token twice: prompts that are equal by chance are no conversation
    known: dict[str, Transition] = {}
    for call in calls:
        own = [next(fresh) for _ in call.suffix_ids], [next(fresh) for _ in call.sampled_ids]
        parent = None if call.parent is None else known[call.parent.call_id]
        known[call.call_id] = replace(call, suffix_ids=own[0], sampled_ids=own[1], parent=parent)
    distinct = list(known.values())
    rows = merge("r", distinct, [1.0] * len(distinct), [1.0] * len(distinct))
    assert [(row.tokens, row.mask, row.segments, row.temperature) for row in rows] == merged_by_comparing(distinct)


def test_numbers_may_differ_by_token_and_fill_further_columns() -> None:
    transitions = [transition([1], [2, 3]), transition([1, 2, 3, 4], [5])]
    others = {"returns": [[0.25, 0.5], [1.0]], "kl_weights": [0.1, 0.2]}
    for apart, expected in ((False, [[1, 2, 3, 4, 5]]), (True, [[1, 2, 3], [1, 2, 3, 4, 5]])):
        rows = merge("r", linked(transitions), [[1.0, 2.0], 3.0], [0.5, 0.5], others, apart=apart)
        assert [row.tokens for row in rows] == expected
        assert rows[0].advantages[:3] == [0, 1.0, 2.0]
        assert rows[0].returns is not None
        assert rows[0].returns[:3] == [0, 0.25, 0.5]
        assert rows[-1].kl_weights is not None
        assert (rows[-1].advantages[-1], rows[-1].kl_weights[-1]) == (3.0, 0.2)
        assert rows[0].ref_logprobs is None
        assert all(len(row.returns or ()) == len(row.tokens) for row in rows)
    with pytest.raises(ValueError, match=r"returns: expected 2 numbers for call c\d+, got 1"):
        merge("r", transitions[:1], [0.0], [0.0], {"returns": [[0.5]]})


@pytest.mark.parametrize("apart", [False, True])
def test_numbers_of_rows_are_found_again_by_call(apart: bool) -> None:
    transitions = [transition([1], [2, 3]), transition([9], [8]), transition([1, 2, 3, 4], [5, 6])]
    rows = merge("r", linked(transitions), range(3), [0.0] * 3, apart=apart)
    assert by_call(rows, [[float(token) for token in row.tokens] for row in rows]) == [[2, 3], [8], [5, 6]]
