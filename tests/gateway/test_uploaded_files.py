"""Uploaded files: named by id in every protocol, bounded, and of the attempt that uploaded them alone."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from gateway_house import House, path
from picture_requests import PART, RED, UPLOADED, bomb, padded, post, refused, user

from agentlightning.records import Resource

FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat, an image": (
        "chat/completions",
        {"messages": [user({"type": "input_image", "file_id": UPLOADED})]},
        f"{PART}.file_id",
    ),
    "chat, a file": (
        "chat/completions",
        {"messages": [user({"type": "file", "file": {"file_id": UPLOADED}})]},
        f"{PART}.file.file_id",
    ),
    "responses": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": UPLOADED, "detail": "auto"}]}]},
        "input[0].content[0].file_id",
    ),
    "messages": (
        "messages",
        {"max_tokens": 9, "messages": [user({"type": "image", "source": {"type": "file", "file_id": UPLOADED}})]},
        f"{PART}.source.file_id",
    ),
    "generateContent": (
        "models/policy:generateContent",
        {"contents": [{"parts": [{"fileData": {"mimeType": "image/png", "fileUri": f"files/{UPLOADED}"}}]}]},
        "contents[0].parts[0].fileData.fileUri",
    ),
}


async def test_an_uploaded_file_is_named_by_id_in_every_protocol_until_it_is_deleted(sighted: House) -> None:
    claim = await sighted.claim()
    client = sighted.openai(claim)
    made = await client.files.create(file=("red.png", RED), purpose="vision")
    assert (made.id, made.bytes, made.filename, made.purpose) == (UPLOADED, len(RED), "red.png", "vision")
    sighted.app = sighted.gateway()  # what was uploaded outlives the server
    client = sighted.openai(claim)
    assert await client.files.create(file=("again.png", RED), purpose="vision") == made
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == RED
    for route, body, _ in FILES.values():
        await post(sighted, claim, route, body)
    calls = await sighted.store.calls([claim.rollout.id])
    assert [[image.hash for image in call.images] for call in calls] == [[sha256(RED).hexdigest()]] * len(FILES)
    assert (await client.files.delete(made.id)).deleted
    for route, body, field in FILES.values():
        found = await post(sighted, claim, route, body, status=404)
        assert f"{field}: this attempt has no file '{UPLOADED}'" in found["error"]["message"]
    await client.files.create(file=RED, purpose="user_data")
    await post(sighted, claim, *FILES["responses"][:2])


async def test_a_file_belongs_to_the_attempt_that_uploaded_it(sighted: House) -> None:
    claim, other = await sighted.claim(), await sighted.claim(replica=1)
    await sighted.openai(claim).files.create(file=RED, purpose="vision")
    await post(sighted, other, *FILES["responses"][:2], status=404)
    with pytest.raises(openai.NotFoundError, match="this attempt has no file"):
        await sighted.openai(other).files.retrieve(UPLOADED)


async def test_files_that_a_request_names_count_as_its_bytes_each_as_often_as_it_is_shown(sighted: House) -> None:
    claim = await sighted.claim()
    client = sighted.openai(claim)
    file = await client.files.create(file=padded(1), purpose="vision")
    shown = {"type": "input_image", "file_id": file.id}
    error = await refused(sighted, claim, *[shown] * 3)
    assert error["message"].startswith("messages: expected images of at most 40 MiB in all")
    value = {"attempt": {"max_request_bytes": 10 << 20}}
    await sighted.store.put_resources([Resource(run_id=sighted.run_id, name="limits", kind="limits", value=value)])
    sighted.app = sighted.gateway()
    asked = {"messages": [user(shown)]}
    for route in ("chat/completions", "tokenize"):
        found = await post(sighted, claim, route, asked, status=413)
        assert "limits.attempt.max_request_bytes" in found["error"]["message"]
    assert not sighted.engine.requests


@pytest.mark.parametrize(
    ("given", "kept"), [("image/png", "image/png"), ("image/png\0\x1b[31m", "application/octet-stream")]
)
async def test_a_mime_type_is_kept_where_it_is_one(sighted: House, given: str, kept: str) -> None:
    claim = await sighted.claim()
    head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\nContent-Type: {given}\r\n\r\n'
    await sighted.http().post(
        f"{path(claim)}/v1/files",
        content=head.encode() + RED + b"\r\n--b--\r\n",
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    [span] = await sighted.store.spans([claim.rollout.id])
    assert span.attributes["mime_type"] == kept


async def test_anthropics_files_api_is_answered_in_its_own_form(sighted: House) -> None:
    claim = await sighted.claim()
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(sighted.app))
    base = f"http://gateway{path(claim)}"
    async with anthropic.AsyncAnthropic(api_key=claim.key, base_url=base, http_client=http, max_retries=0) as client:
        made = await client.beta.files.upload(file=("red.png", RED, "image/png"))
        assert (made.id, made.mime_type, made.size_bytes) == (UPLOADED, "image/png", len(RED))
        assert await client.beta.files.retrieve_metadata(made.id) == made
        assert (await client.beta.files.delete(made.id)).type == "file_deleted"
        with pytest.raises(anthropic.NotFoundError, match="this attempt has no file"):
            await client.beta.files.retrieve_metadata(made.id)


async def test_an_upload_that_is_no_form_with_one_image_is_refused_by_field(sighted: House) -> None:
    claim = await sighted.claim()
    red = ("file", ("a.png", RED))
    for given, said in (
        ({"files": [("file", ("a", b"%PDF"))]}, "file: expected an image file (PNG, JPEG, WEBP, GIF)"),
        ({"files": [("file", ("a.pdf", b"%PDF"))]}, 'file: expected an image, got "application/pdf"'),
        ({"files": [("file", ("a.mp3", b"ID3"))]}, "file: the trained policy hears no audio"),
        ({"files": [("file", ("a.png", RED[:40]))]}, "file: expected an image file (PNG, JPEG, WEBP, GIF)"),
        ({"files": [("file", ("a.png", bomb()))]}, "file: expected an image of at most 50000000 pixels"),
        ({"files": [("file", ("a.png", bytes((16 << 20) + 1)))]}, "file: expected an image of at most 16 MiB"),
        ({"files": [("picture", ("a.png", RED))]}, 'a form with one file, named "file"'),
        ({"files": [red, red]}, 'a form with one file, named "file", got 2'),
        ({"files": [red], "data": {"purpose": "batch"}}, "purpose: expected one of user_data, vision"),
        ({"files": [red], "data": {"expires_after[seconds]": "9"}}, "expires_after[seconds]: not supported"),
        ({"files": [red], "data": {str(index): "" for index in range(20)}}, "a form of at most 16 parts"),
        ({"json": {}}, 'expected multipart/form-data with a "file"'),
        ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, "not the form"),
        ({"content": b"a", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "not the form"),
    ):
        answer = await sighted.http().post(f"{path(claim)}/v1/files", **given)  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert not await sighted.store.spans([claim.rollout.id])
