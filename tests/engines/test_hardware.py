"""Hardware of a learner: device and number format of `auto`, number of threads, bounds of memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agentlightning.engines.local.model import Hardware, free_memory, settle
from agentlightning.engines.machine import cores, default_threads


@pytest.mark.parametrize(
    ("given", "turns", "tiny", "sampler", "learner"),
    [
        ("3", True, False, 3, 3),
        ("3", False, True, 3, 3),
        (None, True, False, cores(), cores()),
        (None, False, False, 1, max(1, cores() // 2)),
        (None, True, True, 1, max(1, cores() // 2)),
    ],
)
def test_threads_go_to_whoever_works(
    given: str | None, turns: bool, tiny: bool, sampler: int, learner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_threads("sampler", turns=turns, tiny=tiny) == sampler
    assert default_threads("learner", turns=turns, tiny=tiny) == learner


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ({"cuda", "bfloat16"}, ("cuda", "bfloat16")),
        ({"cuda"}, ("cuda", "float32")),  # a GPU too old for bfloat16
        ({"cuda", "mps", "bfloat16"}, ("cuda", "bfloat16")),
        ({"mps"}, ("mps", "float32")),
        ({"cpu_bfloat16"}, ("cpu", "bfloat16")),
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


def test_a_tiny_model_is_float32_on_a_cpu() -> None:
    assert settle("cpu", "auto", {"cpu_bfloat16"}.__contains__, tiny=True) == Hardware(device="cpu", dtype="float32")
    assert settle("auto", "auto", {"cuda", "bfloat16"}.__contains__, tiny=True).dtype == "bfloat16"


def test_keys_and_values_are_bound_by_the_device() -> None:
    def memory(device: str) -> int:
        return {"cuda": 80 * 10**9, "cuda:1": 20 * 10**9, "cpu": 24 * 10**9}[device]

    devices = (Hardware(device=name, dtype="float32") for name in ("cuda", "cuda:1", "cpu"))
    assert [one.cache_bytes(memory) / 1e9 for one in devices] == [16, 4, 1]
    assert Hardware(device="cpu", dtype="float32").cache_bytes(lambda _: 10**12) == 4 * 10**9


@pytest.mark.parametrize(
    ("hardware", "gigabytes", "expected"),
    [
        # SmolLM2-135M keeps 30 x 25 x 576 numbers a token, .86 MB in bfloat16: a 12th of 24 GB is 2,314 of them.
        (("cpu", "bfloat16"), 24, 2048),
        (("cpu", "float32"), 24, 1024),
        (("cpu", "bfloat16"), 200, 4096),
        (("cpu", "float32"), 0.5, 256),
        (("cuda", "bfloat16"), 8, 4096),
    ],
)
def test_micro_batches_are_bound_by_free_memory(hardware: tuple[str, str], gigabytes: float, expected: int) -> None:
    smollm2 = SimpleNamespace(num_hidden_layers=30, hidden_size=576)
    found = Hardware(device=hardware[0], dtype=hardware[1])
    assert found.microbatch_tokens(4096, smollm2, lambda _: int(gigabytes * 1e9)) == expected
    assert found.microbatch_tokens(100, smollm2, lambda _: int(gigabytes * 1e9)) == 100


def test_free_memory_is_that_of_the_container_without_its_files(tmp_path: Path) -> None:
    for name, text in {"max": "3000000", "current": "2500000", "stat": "anon 5\ninactive_file 1000000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) == 1_500_000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory(tmp_path) > 1_500_000
