"""Threads for torch: the cores that nobody else uses, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.threads import Threads, busy_seconds
from build import learner_setup


class Machine:
    """A clock and CPU times that a test moves."""

    def __init__(self) -> None:
        self.now = self.own = self.busy = 100.0

    def threads(self, cores: int) -> Threads:
        return Threads(cores, clock=lambda: self.now, own=lambda: self.own, busy=lambda: self.busy)

    def passes(self, seconds: float, own: float, others: float) -> None:
        """So many seconds, in which we used `own` cores and others used `others`."""
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds


@pytest.mark.parametrize(
    ("others", "expected"), [(0.0, 4), (0.3, 4), (0.7, 3), (1.0, 3), (2.6, 1), (4.0, 1), (9.0, 1), (-0.1, 4)]
)
def test_there_are_as_many_threads_as_idle_cores(others: float, expected: int) -> None:
    machine = Machine()
    threads = machine.threads(cores=4)
    machine.passes(1.0, own=1.0, others=others)
    assert threads.adjust() == expected


def test_what_this_process_uses_itself_does_not_count_as_somebody_else() -> None:
    machine = Machine()
    threads = machine.threads(cores=4)
    machine.passes(1.0, own=4.0, others=0.0)
    assert threads.adjust() == 4


def test_it_starts_with_one_thread_follows_the_others_and_looks_only_now_and_then() -> None:
    machine = Machine()
    threads = machine.threads(cores=2)
    machine.passes(0.1, own=1.0, others=0.0)
    assert threads.adjust() == 1
    machine.passes(0.2, own=1.0, others=0.0)
    assert threads.adjust() == 2
    machine.passes(0.2, own=1.0, others=1.0)
    assert threads.adjust() == 2
    machine.passes(0.1, own=1.0, others=1.0)
    assert threads.adjust() == 1


def test_busy_seconds_are_those_of_the_cores_in_question_without_idle_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  999 9 9 999 9 9 9 9 0 0\n"
        "cpu0 100 10 50 7000 300 20 15 5 0 0\n"
        "cpu1 500 0 0 1000 0 0 0 0 0 0\n"
        "cpu10 900 0 0 1000 0 0 0 0 0 0\n"
        "intr 5\n"
    )  # fmt: skip
    assert busy_seconds({0}, stat) == pytest.approx(2.0)
    assert busy_seconds({0, 1}, stat) == pytest.approx(7.0)


def test_a_learner_that_is_told_no_number_finds_one_between_its_micro_batches(llama: Path) -> None:
    import torch

    from agentlightning.testing.engine_contract import sequence

    learner = Learner(llama, learner_setup(threads=None))
    assert torch.get_num_threads() == 1
    machine = Machine()
    learner.threads = machine.threads(cores=2)
    machine.passes(1.0, own=1.0, others=0.0)
    learner.logprobs([sequence([4, 5, 6], [(1, 3)])])
    assert torch.get_num_threads() == 2
    machine.passes(1.0, own=1.0, others=2.0)
    learner.logprobs([sequence([4, 5, 6], [(1, 3)])])
    assert torch.get_num_threads() == 1
