"""Hardware of a learner: device and number format of `auto`, threads on cores that nobody else uses, bounds of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.model import Hardware, settle
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


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({"cuda", "bfloat16"}, ("cuda", "bfloat16")),
        ({"cuda"}, ("cuda", "float32")),  # a GPU too old for bfloat16
        ({"cuda", "mps", "bfloat16"}, ("cuda", "bfloat16")),
        ({"mps"}, ("mps", "float32")),
        (set(), ("cpu", "float32")),
    ],
)
def test_auto_takes_the_best_device_there_is(present: set[str], expected: tuple[str, str]) -> None:
    assert settle("auto", "auto", present.__contains__) == Hardware(device=expected[0], dtype=expected[1])


def test_what_is_named_is_taken_whatever_there_is() -> None:
    everything = {"cuda", "mps", "bfloat16"}.__contains__
    assert settle("cpu", "auto", everything) == Hardware(device="cpu", dtype="float32")
    assert settle("cuda:1", "auto", everything) == Hardware(device="cuda:1", dtype="bfloat16")
    assert settle("auto", "float32", everything) == Hardware(device="cuda", dtype="float32")


def test_keys_and_values_are_bound_by_the_device() -> None:
    def memory(device: str) -> int:
        return {"cuda": 80 * 10**9, "cuda:1": 20 * 10**9}[device]

    devices = (Hardware(device=name, dtype="float32") for name in ("cuda", "cuda:1", "cpu"))
    assert [one.cache_bytes(memory) / 1e9 for one in devices] == [16, 4, 4]
