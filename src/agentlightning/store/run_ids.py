"""Ids of runs: readable, sorted by time, and good names of folders."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from agentlightning.errors import InputError


def check_run_id(run_id: str) -> None:
    """Run ids name folders."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", run_id):
        raise InputError(f"run_id: expected letters, digits, '.', '_' and '-', got {run_id!r}")


def run_ids(now_ns: int) -> Iterator[str]:
    """The UTC second, then the part of it in 1/65536ths: for this moment, then for those after it, without end."""
    while True:
        second, rest = divmod(now_ns, 10**9)
        yield f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(second))}-{rest * 65536 // 10**9:04x}"
        now_ns += 10**9 // 65536 + 1
