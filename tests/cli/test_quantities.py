"""Sizes and times that people give to commands."""

from __future__ import annotations

import pytest

from agentlightning.cli.options import bytes_of, seconds_of, shown_bytes
from agentlightning.errors import ConfigError


@pytest.mark.parametrize(("text", "size"), [("10GB", 10**10), ("1.5 mb", 1_500_000), ("7", 7), (None, None)])
def test_sizes_are_read(text: str | None, size: int | None) -> None:
    assert bytes_of(text, "--keep-size") == size


@pytest.mark.parametrize("text", ["10 GiB", "much", "-1GB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--keep-size: expected a size"):
        bytes_of(text, "--keep-size")


def test_sizes_are_shown_for_people() -> None:
    assert [shown_bytes(size) for size in (0, 999, 1200, 3_400_000_000)] == ["0 B", "999 B", "1.2 KB", "3.4 GB"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400.0), ("7d", 604_800.0), ("1.5h", 5400.0), ("45s", 45.0), ("8w", 8 * 604_800.0), (None, None)],
)
def test_times_are_read(text: str | None, seconds: float | None) -> None:
    assert seconds_of(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["7", "7 days", "-7d", "soon", ""])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires: expected a time such as 90m"):
        seconds_of(text, "--expires")
