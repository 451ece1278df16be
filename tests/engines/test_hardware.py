"""Hardware of a learner: device and number format of `auto`, number of threads, bounds of memory."""

from __future__ import annotations

import pytest
import torch

from agentlightning.engines.local.learner import take_threads
from agentlightning.engines.local.model import Hardware, settle


def test_a_learner_takes_the_threads_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    take_threads(None)
    assert torch.get_num_threads() == 2
    take_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


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
