"""Children that hang are killed, those that work or have nothing to do are not."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from agentlightning.runtime.children import stop_child
from agentlightning.runtime.watchdog import HangLimits, RunningTime, Watchdog

LONG_S = 300.0


def start(watchdog: Watchdog, doing: str, log: Path) -> subprocess.Popen[bytes]:
    return watchdog.start("child", ["hanging_child", doing], env={"PYTHONPATH": str(Path(__file__).parent)}, log=log)


def limits(hang: float = LONG_S, stall: float = LONG_S, start: float = LONG_S) -> HangLimits:
    return HangLimits(hang_timeout_s=hang, stall_timeout_s=stall, start_timeout_s=start)


def test_a_child_that_was_stopped_is_killed(tmp_path: Path) -> None:
    watchdog = Watchdog(limits(hang=2.0))
    child = start(watchdog, "idles", tmp_path / "log")
    while b"ready" not in (tmp_path / "log").read_bytes():
        assert child.poll() is None
    child.send_signal(signal.SIGSTOP)
    assert child.wait() == -signal.SIGKILL
    stop_child(child)
    assert watchdog.kills == {"child": 1}


@pytest.mark.parametrize(("doing", "given"), [("stalls", limits(stall=2.0)), ("silent", limits(hang=1.0, start=4.0))])
def test_a_child_whose_work_stands_still_or_that_never_begins_to_beat_is_killed(
    tmp_path: Path, doing: str, given: HangLimits
) -> None:
    watchdog = Watchdog(given)
    child = start(watchdog, doing, tmp_path / "log")
    assert child.wait() == -signal.SIGKILL
    stop_child(child)
    assert watchdog.kills == {"child": 1}


@pytest.mark.parametrize("doing", ["beats", "idles"])
def test_a_child_that_works_or_has_nothing_to_do_lives(doing: str, tmp_path: Path) -> None:
    watchdog = Watchdog(limits(stall=1.0))
    child = start(watchdog, doing, tmp_path / "log")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(4.0)
    stop_child(child)
    assert not watchdog.kills


def test_time_in_which_the_process_stood_still_is_not_counted() -> None:
    now = 0.0
    silent = RunningTime(2.0, lambda: now)
    for _ in range(5):
        now += 1.0
        silent.tick()
    now += 8 * 3600.0  # the machine slept
    assert silent.tick() == 7.0
    silent.reset()
    assert silent.seconds == 0.0
