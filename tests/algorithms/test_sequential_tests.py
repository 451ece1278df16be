"""Sequential tests: wealth by hand, no rise on average under the hypothesis, and errors though one looks at every result."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentlightning.algorithms.sequential_tests import EFFECTS, MeanDifferenceTest, nearest_means, sign_test_wealth


@pytest.mark.parametrize(
    ("wins", "losses", "wealth"),
    [
        (0, 0, Fraction(1)),
        (1, 0, Fraction(3, 2)),  # the mean of 2p over p in [1/2, 1]
        (0, 1, Fraction(1, 2)),
        (1, 1, Fraction(2, 3)),  # the mean of 4 p (1 - p): 8 (p²/2 - p³/3) from 1/2 to 1
        (5, 0, Fraction(63, 6)),
        (6, 1, Fraction(247, 56)),  # C(8, 0) + … + C(8, 6) = 247, over 8 * 7
    ],
)
def test_the_wealth_by_hand(wins: int, losses: int, wealth: Fraction) -> None:
    assert sign_test_wealth(wins, losses) == pytest.approx(float(wealth), rel=1e-12)


def test_the_wealth_is_a_martingale_where_both_are_equally_likely() -> None:
    for wins, losses in product(range(12), range(12)):
        after = (sign_test_wealth(wins + 1, losses) + sign_test_wealth(wins, losses + 1)) / 2
        assert after == pytest.approx(sign_test_wealth(wins, losses), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("chance", [0.5, 0.4])
def test_the_wealth_seldom_reaches_its_bound_though_one_looks_after_every_pair(alpha: float, chance: float) -> None:
    # Exact: every sequence of 300 pairs is followed, by the number of its wins.
    running, reached = {0: 1.0}, 0.0
    for pairs in range(1, 301):
        following: dict[int, float] = {}
        for wins, weight in running.items():
            for more, probability in ((1, chance), (0, 1 - chance)):
                following[wins + more] = following.get(wins + more, 0.0) + weight * probability
        done = {wins for wins in following if sign_test_wealth(wins, pairs - wins) >= 1 / alpha}
        reached += sum(following.pop(wins) for wins in done)
        running = following
    assert 0 < reached <= alpha


def fed(shift: float, *results: tuple[str, float]) -> MeanDifferenceTest:
    test = MeanDifferenceTest(shift)
    for name, result in results:
        test.record(**{name: result})
    return test


MEANS = st.floats(0.01, 0.99)


@given(means=st.tuples(MEANS, MEANS), counts=st.tuples(st.integers(1, 30), st.integers(1, 30)), d=st.floats(-0.9, 0.9))
def test_no_other_means_with_the_same_difference_are_nearer(
    means: tuple[float, float], counts: tuple[int, int], d: float
) -> None:
    def distance(b: float) -> float:
        return sum(
            n * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
            for p, q, n in zip(means, (b + d, b), counts, strict=True)
        )

    a, b = nearest_means(means, counts, d)
    assert 0 < b < 1
    assert 0 < a < 1
    assert a - b == pytest.approx(d, abs=1e-12)
    low, high = max(0.0, -d), min(1.0, 1 - d)
    others = [low + (high - low) * place / 400 for place in range(1, 400)]
    assert distance(b) <= min(map(distance, others)) + 1e-9


def whole_blocks(results: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The results, and one more where a block was left begun."""
    begun: set[str] = set()
    for name, _ in results:
        begun = set() if {*begun, name} == {"a", "b"} else {name}
    return [*results, *((name, 0.0) for name in {"a", "b"} - begun if begun)]


RESULTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.3, 1.0])), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    history=RESULTS,
    shift=st.sampled_from([0.0, -0.05, -0.3, 0.1]),
    mean_b=st.floats(0, 1),
    below=st.floats(0, 1),
    sizes=st.sampled_from([(1, 1), (2, 1), (4, 1)]),
)
def test_whatever_came_before_the_wealth_does_not_rise_on_average_under_the_hypothesis(
    history: list[tuple[str, float]], shift: float, mean_b: float, below: float, sizes: tuple[int, int]
) -> None:
    # Exact: every outcome of a block, with means a <= b + shift anywhere in the unit square.
    size_a, size_b = sizes
    assume(mean_b + shift >= 0)
    mean_a = min(1.0, mean_b + shift) * below
    history = whole_blocks(history)
    before, expected = fed(shift, *history), 0.0
    order = ["a"] * size_a + ["b"] * size_b  # the block ends where it has both
    for outcome in product((0.0, 1.0), repeat=len(order)):
        chance = math.prod(
            mean if result else 1 - mean
            for name, result in zip(order, outcome, strict=True)
            for mean in [mean_a if name == "a" else mean_b]
        )
        expected += chance * fed(shift, *history, *zip(order, outcome, strict=True)).wealth
    assert expected <= before.wealth * (1 + 1e-9)


@pytest.mark.parametrize(("mean", "bound"), [(0.2, 1.3), (0.5, 1.6), (0.9, 1.3)])
def test_the_wealth_seldom_reaches_its_bound_exactly_counted(mean: float, bound: float) -> None:
    # Every sequence of four pairs between equals, with a look after each.
    reached = 0.0
    for sequence in product(product((0, 1), repeat=2), repeat=4):
        test, chance, hit = MeanDifferenceTest(), 1.0, False
        for a, b in sequence:
            chance *= (mean if a else 1 - mean) * (mean if b else 1 - mean)
            test.record(a=a, b=b)
            hit = hit or test.wealth >= bound
        reached += chance * hit
    assert 0 < reached <= 1 / bound


def first_alarm(seed: int, means: tuple[float, float], share: float, sessions: int, shift: float) -> int | None:
    """The number of results of b, a `share` of all, after which the wealth first reached 20; None where it never did."""
    source, test, count = random.Random(seed), MeanDifferenceTest(shift), 0
    for _ in range(sessions):
        of_b = source.random() < share
        count += of_b
        result = float(source.random() < means[of_b])
        test.record(**{"b" if of_b else "a": result})
        if test.wealth >= 20:
            return count
    return None


@pytest.mark.parametrize("mean", [0.35, 0.75, 0.95])
def test_equal_streams_seldom_raise_an_alarm_and_one_that_is_worse_does(mean: float) -> None:
    alarms = [first_alarm(seed, (mean, mean), 0.3, 150, 0.0) for seed in range(40)]
    assert sum(one is not None for one in alarms) <= 3  # 2 expected at most
    found = [first_alarm(seed, (mean, mean - 0.3), 0.3, 600, 0.0) for seed in range(10)]
    assert None not in found


def test_results_beside_0_to_1_and_shifts_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a number from 0 to 1, got 1\.5"):
        MeanDifferenceTest().record(a=1.5)
    with pytest.raises(ValueError, match="shift: expected a number"):
        MeanDifferenceTest(0.5)


def test_a_second_pair_is_bet_on_with_what_the_first_one_taught() -> None:
    # After (1, 1) the means are 3/4 and 3/4: a guess of 3/4 and 3/4 under the condition that they differ by e.
    first = fed(0, ("a", 1), ("b", 1))
    assert first.wealth == pytest.approx(sum(1 - e * e for e in EFFECTS) / len(EFFECTS))
    wealth = 0.0
    for effect in EFFECTS:
        a, b = nearest_means((0.75, 0.75), (2, 2), effect)
        null = (a + b) / 2
        wealth += (1 - effect * effect) * (a / null) * (1 - b) / (1 - null)
    first.record(a=1, b=0)
    assert first.wealth == pytest.approx(wealth / len(EFFECTS))


def test_a_long_certain_difference_stays_within_a_float() -> None:
    test = MeanDifferenceTest()
    for _ in range(3000):
        test.record(a=1, b=0)
    assert 1e200 < test.wealth < float("inf")
