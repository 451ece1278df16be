"""The clock by which leases end: it goes on while the machine sleeps, where the system has such a clock."""

from __future__ import annotations

import time


def elapsed_s() -> float:
    """Seconds since some moment, of use in differences only; comparable between processes of a machine."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; elsewhere a suspended machine is seen by its server alone
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
