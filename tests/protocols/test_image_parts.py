"""Image parts of every protocol: files that are no images, and the sizes in which images are to be read."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from agentlightning.protocols import chat, generate_content, messages, responses
from agentlightning.protocols.base import ApiError, CompletionRequest

DATA = base64.b64encode(b"a file").decode()
USER: dict[Any, tuple[str, str]] = {
    chat: ("messages", "content"),
    messages: ("messages", "content"),
    responses: ("input", "content"),
    generate_content: ("contents", "parts"),
}
"""By protocol the fields of its messages and of their parts."""


def uri(mime: str) -> str:
    return f"data:{mime};base64,{DATA}"


def parse(protocol: Any, part: dict[str, Any], **given: Any) -> CompletionRequest:
    outer, inner = USER[protocol]
    limits = {"max_tokens": 9} if protocol is messages else {}
    request: CompletionRequest = protocol.parse(
        {"model": "m", outer: [{"role": "user", inner: [part]}], **limits, **given}
    )
    return request


FILES: dict[str, tuple[Any, Any]] = {
    "chat, an image": (chat, lambda mime: {"type": "image_url", "image_url": {"url": uri(mime)}}),
    "chat, a file": (chat, lambda mime: {"type": "file", "file": {"file_data": uri(mime), "filename": "f"}}),
    "responses, an image": (responses, lambda mime: {"type": "input_image", "image_url": uri(mime)}),
    "responses, a file": (responses, lambda mime: {"type": "input_file", "file_data": uri(mime), "filename": "f"}),
    "messages": (
        messages,
        lambda mime: {"type": "image", "source": {"type": "base64", "media_type": mime, "data": DATA}},
    ),
    "generateContent": (generate_content, lambda mime: {"inlineData": {"mimeType": mime, "data": DATA}}),
}


@pytest.mark.parametrize("way", FILES)
def test_a_file_that_says_that_it_is_no_image_is_refused_as_what_it_is(way: str) -> None:
    protocol, part = FILES[way]
    for mime, said in (
        ("audio/mpeg", "the trained policy hears no audio"),
        ("application/pdf", 'expected an image, got "application/pdf"; the trained policy reads text and images'),
        ("Video/mp4", 'expected an image, got "Video/mp4"'),
    ):
        with pytest.raises(ApiError, match=said) as refusal:
            parse(protocol, part(mime))
        assert refusal.value.code == "unsupported_value"
    for mime in ("image/png", "IMAGE/PNG", "application/octet-stream", ""):
        assert len(parse(protocol, part(mime)).images) == 1


DETAILED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "chat": (chat, {"type": "image_url", "image_url": {"url": uri("image/png"), "detail": "low"}}, "detail"),
    "responses": (responses, {"type": "input_image", "image_url": uri("image/png"), "detail": "low"}, "detail"),
    "responses, a file": (responses, {"type": "input_file", "file_data": uri("image/png"), "detail": "low"}, "detail"),
    "generateContent": (
        generate_content,
        {
            "inlineData": {"mimeType": "image/png", "data": DATA},
            "mediaResolution": {"level": "MEDIA_RESOLUTION_LOW"},
        },
        "mediaResolution",
    ),
}


def detailed(way: str, value: Any) -> CompletionRequest:
    protocol, part, _ = DETAILED[way]
    if protocol is generate_content:
        return parse(protocol, {**part, "mediaResolution": {"level": value}})
    inner = part.get("image_url")
    changed = {"image_url": {**inner, "detail": value}} if isinstance(inner, dict) else {"detail": value}
    return parse(protocol, {**part, **changed})


@pytest.mark.parametrize("way", DETAILED)
def test_the_size_in_which_an_image_is_to_be_read_is_recorded_and_not_applied(way: str) -> None:
    protocol, part, field = DETAILED[way]
    low, auto = (
        ("MEDIA_RESOLUTION_LOW", "MEDIA_RESOLUTION_UNSPECIFIED") if field == "mediaResolution" else ("low", "auto")
    )
    assert parse(protocol, part).not_applied == {field: [low]}
    assert [detailed(way, neutral).not_applied for neutral in (auto, None)] == [{}, {}]
    for wrong in ("banana", 3, ["low"]):
        with pytest.raises(
            ApiError, match=rf"{'level' if protocol is generate_content else 'detail'}: expected one of"
        ):
            detailed(way, wrong)


def test_the_resolution_of_a_whole_request_is_recorded_and_not_applied() -> None:
    part = {"inlineData": {"mimeType": "image/png", "data": DATA}}

    def asked(value: Any) -> Any:
        return parse(generate_content, part, generationConfig={"mediaResolution": value}).not_applied

    assert asked("MEDIA_RESOLUTION_HIGH") == {"generationConfig.mediaResolution": "MEDIA_RESOLUTION_HIGH"}
    assert asked("MEDIA_RESOLUTION_UNSPECIFIED") == {}
    with pytest.raises(ApiError, match=r"generationConfig.mediaResolution: expected one of"):
        asked("banana")
    with pytest.raises(ApiError, match=r"contents\[0\].parts\[0\].mediaResolution: expected {\"level\"}"):
        parse(generate_content, {**part, "mediaResolution": "LOW"})
