"""Folders at a URL, on a shared disk and on a real S3 server: whole or not there, and errors that say what is wrong."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.engines.folders import UrlFolder, damage, seal
from agentlightning.errors import ConfigError, StoreError
from s3_server import BUCKET, s3_environment, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that nothing is in yet."""
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    for name, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(name, value)
    return f"{BUCKET}/{tmp_path.name}"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "sealed"
    (folder / "learner").mkdir(parents=True)
    for name in ("model.safetensors", "learner.pt", "learner/shard-0.pt"):
        (folder / name).write_bytes(name.encode() * 1000)
    seal(folder)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def test_a_folder_comes_back_as_it_was(url: str, sealed: Path, tmp_path: Path) -> None:
    manifest_hash = await UrlFolder(f"{url}/step-1").upload(sealed)
    assert await UrlFolder(f"{url}/step-1").download(manifest_hash, tmp_path / "copy") is None
    assert content(tmp_path / "copy") == content(sealed)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


async def test_a_folder_that_is_not_there_is_not_damaged_but_absent(url: str, tmp_path: Path) -> None:
    folder = UrlFolder(f"{url}/step-1")
    assert await folder.download("0" * 64, tmp_path / "copy") == ""
    assert await folder.names() == []
    await folder.delete("manifest.json")


@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        ("model.safetensors", b"x", "model.safetensors is not what was written"),
        ("learner/shard-0.pt", None, "learner/shard-0.pt is missing"),
        ("manifest.json", b"x", "manifest.json is not what was written"),
        ("manifest.json", None, ""),
    ],
)
async def test_what_is_not_as_it_was_written_is_never_a_folder_here(
    url: str, sealed: Path, tmp_path: Path, file: str, change: bytes | None, found: str
) -> None:
    remote = UrlFolder(f"{url}/step-1")
    manifest_hash = await remote.upload(sealed)
    if change is None:
        await remote.delete(file)
    else:
        flipped = tmp_path / "flipped"
        whole = (sealed / file).read_bytes()
        flipped.write_bytes(whole[:10] + change + whole[11:])
        await remote._put(flipped, file, 0)
    assert await remote.download(manifest_hash, tmp_path / "copy") == found
    assert not (tmp_path / "copy").exists()


async def test_a_copy_that_replaces_another_does_not_keep_its_manifest_meanwhile(url: str, sealed: Path) -> None:
    """Killed in between, it must not vouch for a mixture of both."""
    remote = UrlFolder(f"{url}/step-1")
    await remote.upload(sealed)
    (sealed / "model.safetensors").unlink()
    with pytest.raises(StoreError, match="cannot be written"):
        await remote.upload(sealed)
    assert "manifest.json" not in await remote.names()


async def test_folders_are_listed_and_deleted_by_name(url: str, sealed: Path) -> None:
    for name in ("step-1", "step-2", "step-10"):
        await UrlFolder(f"{url}/{name}").upload(sealed)
    run = UrlFolder(url)
    await run.delete("step-1")
    assert await run.names() == ["step-10", "step-2"]
    assert "learner" in await UrlFolder(f"{url}/step-2").names()


async def test_a_manifest_names_no_file_of_another_folder(url: str, sealed: Path, tmp_path: Path) -> None:
    """Its hash is in the store, which others may write to."""
    manifest = (sealed / "manifest.json").read_bytes().replace(b"learner/shard-0.pt", b"../../outside.x...")
    (sealed / "manifest.json").write_bytes(manifest)
    (tmp_path / "outside.x...").write_bytes(b"x")
    remote = UrlFolder(f"{url}/a/b/step-1")
    for name in ("model.safetensors", "learner.pt", "manifest.json"):
        await remote._put(sealed / name, name, 0)
    found = await remote.download(hashlib.sha256(manifest).hexdigest(), tmp_path / "x" / "y" / "copy")
    assert found == "manifest.json names ../../outside.x..., which is in another folder"


async def test_a_server_that_does_not_answer_is_tried_again_for_a_while_and_named_as_late(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in s3_environment(f"http://127.0.0.1:{silent.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match=rf"{BUCKET}/step-1: .* failed [2-4] times: not done within 0.3 s"):
            await UrlFolder(f"{BUCKET}/step-1", answer_timeout_s=0.3, retry_s=1.0).upload(sealed)


async def test_a_bucket_that_does_not_exist_is_one_sentence_at_once(
    server: dict[str, str], sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        StoreError, match=r"s3://nobodys/step-1: .* cannot be written: The specified bucket does not exist"
    ):
        await UrlFolder("s3://nobodys/step-1").upload(sealed)


@pytest.mark.parametrize(
    "url",
    ["/mnt/runs", "file://runs", "http://host/runs", "s3://", "s3://b/x#y", "simplecache::s3://b/x", "memory://x"],
)
def test_what_is_no_folder_of_a_store_or_a_disk_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected file:///FOLDER, s3://BUCKET/FOLDER or abfs://"):
        UrlFolder(url)


async def test_a_folder_is_whole_here_or_not_at_all(url: str, sealed: Path, tmp_path: Path) -> None:
    """What is here already stays where the new one is damaged."""
    remote = UrlFolder(url)
    manifest_hash = await remote.upload(sealed)
    assert await remote.download(manifest_hash, tmp_path / "copy") is None
    await remote.delete("learner.pt")
    assert await remote.download(manifest_hash, tmp_path / "copy") == "learner.pt is missing"
    assert damage(tmp_path / "copy") is None
