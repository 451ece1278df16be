"""Sizes and times that people give to commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentlightning.cli.options import bytes_of, seconds_of
from agentlightning.errors import ConfigError

Read = Callable[[str | None, str], float | None]


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        *((bytes_of, "10GB", 10**10), (bytes_of, "1.5 mb", 1_500_000), (bytes_of, "7", 7), (bytes_of, None, None)),
        *((seconds_of, "90m", 5400.0), (seconds_of, "1.5h", 5400.0), (seconds_of, "8w", 8 * 604_800.0)),
        (seconds_of, None, None),
    ],
)
def test_sizes_and_times_are_read(read: Read, text: str | None, value: float | None) -> None:
    assert read(text, "--option") == value


@pytest.mark.parametrize(
    ("read", "text"), [(bytes_of, "10 GiB"), (bytes_of, ""), (seconds_of, "7"), (seconds_of, "-7d"), (seconds_of, "")]
)
def test_what_is_no_size_or_time_is_refused(read: Read, text: str) -> None:
    with pytest.raises(ConfigError, match=r"--option: expected a (size|time such as 90m)"):
        read(text, "--option")
