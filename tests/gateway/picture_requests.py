"""Pictures for a policy with sight, and requests that show them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from gateway_house import House, path
from PIL import Image

from agentlightning.records import Claim

WORDS = ["red", "blue", "what", "is", "it", "and", "that", "?", "a", "picture"]
TOKENS = 4
"""Placeholders of a picture: 32 x 32 pixels in patches of 16."""


def png(colour: str, size: tuple[int, int] = (32, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A PNG of a few bytes whose head promises so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat_image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), "detail": "low"}}


def user(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


PART = "messages[0].content[0]"
"""The place of a picture that `refused` shows first."""


async def post(house: House, claim: Claim, route: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", **body})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(house: House, claim: Claim, *parts: Any) -> dict[str, Any]:
    error: dict[str, Any] = (await post(house, claim, "chat/completions", {"messages": [user(*parts)]}, status=400))[
        "error"
    ]
    return error
