"""Terminals, pipes, working directories and files as other people have them. Real processes."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import build
from agentlightning.config.file import read_toml
from agentlightning.store.open import open_store

AGL = (sys.executable, "-P", "-m", "agentlightning")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with a run of an unusual name."""
    url = f"sqlite:///{tmp_path / 'agl.db'}"

    async def fill() -> None:
        async with open_store(url) as opened:
            for number in range(300):
                await opened.create_run(f"Größe λ {number}", {})

    asyncio.run(fill())
    return url


def test_a_terminal_of_another_encoding_gets_replacement_characters(store: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*AGL, "runs", "list", "--store", store]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


def test_a_reader_that_leaves_is_no_error(store: str) -> None:
    command = [*AGL, "runs", "list", "--store", store]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert done.stderr == b""


@pytest.mark.parametrize(("name", "sentence"), [(b"caf\xe9", "expected a name in UTF-8"), (b"gone", "it was deleted")])
def test_a_working_directory_that_nothing_can_name_is_one_sentence(tmp_path: Path, name: bytes, sentence: str) -> None:
    folder = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(folder)
    script = f"cd $1 && {'rmdir $1 && ' if name == b'gone' else ''}exec $2 -P -m agentlightning runs list"
    done = subprocess.run(
        ["sh", "-c", script, "sh", folder, sys.executable], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("error: working directory: ")
    assert sentence in line


def test_a_byte_order_mark_is_no_part_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_bytes(b"\xef\xbb\xbf[trainer]\nsteps = 3\n")
    assert read_toml(tmp_path / "train.toml") == {"trainer": {"steps": 3}}
    rows = tmp_path / "rows.JSONL"
    said = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    rows.write_bytes(b"\xef\xbb\xbf" + said)
    done = build.agl("record", "--traces", str(rows), "--store", f"sqlite:///{tmp_path / 'agl.db'}")
    assert done.exit_code == 0, done.output
