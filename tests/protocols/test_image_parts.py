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
