"""Files of ours: for their owner alone, whatever the umask, and what a group was given stays."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.runtime.disk import close_to_others, make_private_folder, open_private


@pytest.fixture(autouse=True)
def permissive() -> Iterator[None]:
    """A user who lets everybody read and write."""
    former = os.umask(0)
    yield
    os.umask(former)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_made_for_their_owner_whatever_the_umask(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "folder")
    with open_private(tmp_path / "folder" / "file", "ab") as file:
        file.write(b"1")
    with open_private(tmp_path / "folder" / "file", "ab") as file:
        file.write(b"2")
    assert (mode(tmp_path / "folder"), mode(tmp_path / "folder" / "file")) == (0o700, 0o600)
    assert (tmp_path / "folder" / "file").read_bytes() == b"12"


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o600), (0o666, 0o600), (0o640, 0o640), (0o600, 0o600)])
def test_what_everybody_may_use_is_closed_and_said_once_and_what_a_group_may_use_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, after: int
) -> None:
    caplog.set_level(logging.WARNING)
    file = tmp_path / "file"
    file.touch()
    file.chmod(before)
    close_to_others(file)
    close_to_others(file)
    assert mode(file) == after
    assert len(caplog.records) == (before != after)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_others_own_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.chown(file, 12345, -1)
    file.chmod(0o644)
    close_to_others(file)
    assert mode(file) == 0o644
