"""engine.device and dtype `auto`, over what a probe says the machine has; the bound of keys and values."""

import pytest

from agentlightning.engines.local.model import Hardware, settle


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
