"""Image parts of requests, in the form of every protocol: read, bounded, and named by the hash of their bytes.

Driven by each protocol's parser. A part becomes ``{"type": "image", "image": "<SHA-256 in hex>"}``, which is what is hashed,
recorded and given to chat templates; the bytes travel beside the messages. URLs are never fetched: whoever may write a
request could have the gateway read what only the gateway can reach. Whether a file is an image, and whether the model has
sight, is seen later. Pure.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from hashlib import sha256
from typing import Any

from agentlightning.protocols.base import ApiError, RequestImage, short
from agentlightning.protocols.fields import expected, refused
from agentlightning.records import JSON

MAX_IMAGES = 64
"""Images of one request, those of its history among them."""
MAX_IMAGE_BYTES = 16 << 20
FILE = "_file"
"""Name under which a part holds its RequestImage until `take_images`."""
AUDIO = ("audio", "audio_url", "input_audio", "output_audio")
NO_AUDIO = "the trained policy hears no audio; send text or images"
DETAILS = ("auto", "low", "high", "original")
RESOLUTIONS = tuple(f"MEDIA_RESOLUTION_{level}" for level in ("UNSPECIFIED", "LOW", "MEDIUM", "HIGH", "ULTRA_HIGH"))
"""The same in Google's protocol. Of both the first leaves the choice to the model."""
NO_FETCHING = "the gateway fetches no URLs and keeps no files; send the image as a data URI (data:image/png;base64,…)"


def image_part(part: Any, path: str) -> JSON | None:
    """The part in our form, if it is an image in any protocol's; None for others. ApiError for one that is not served."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        given = part.get("image_url")
        if not isinstance(given, dict):
            return _of_url(given, f"{path}.image_url")
        found = _of_url(given.get("url"), f"{path}.image_url.url")
        return _with_detail(found, given.get("detail"), f"{path}.image_url.detail")
    if kind == "input_image":
        _no_fetching(part, path, "file_id")
        return _with_detail(_of_url(part.get("image_url"), f"{path}.image_url"), part.get("detail"), f"{path}.detail")
    if kind == "input_file":
        return _with_detail(_of_file(part, path), part.get("detail"), f"{path}.detail")
    if kind == "file":
        return _of_file(part.get("file"), f"{path}.file")
    if kind == "image":
        return _of_source(part.get("source"), f"{path}.source")
    if kind in AUDIO:
        raise refused(path, NO_AUDIO)
    return None


def blob_part(part: JSON, path: str) -> JSON | None:
    """The part of Google's protocol (names of its own in camel case), as `image_part` reads those of the others."""
    if part.get("fileData") is not None:
        raise refused(f"{path}.fileData.fileUri", NO_FETCHING)
    given, where = part.get("inlineData"), f"{path}.inlineData"
    if given is None:
        return None
    if not isinstance(given, dict):
        raise expected('{"mimeType", "data"}', given, where)
    mime = given.get("mimeType", given.get("mime_type"))
    _check_type(mime if isinstance(mime, str) else "", path)
    resolution = part.get("mediaResolution")
    if resolution is not None and not isinstance(resolution, dict):
        raise expected('{"level"}', resolution, f"{path}.mediaResolution")
    level = (resolution or {}).get("level")
    return _with_detail(_of_inline(given, where), level, f"{path}.mediaResolution.level", RESOLUTIONS)


def details(images: tuple[RequestImage, ...], name: str = "detail") -> JSON:
    """The sizes in which images are to be read, as the agent names them: the model's processor has one for all."""
    asked = sorted({image.detail for image in images if image.detail not in (None, DETAILS[0], RESOLUTIONS[0])})
    return {name: asked} if asked else {}


def take_images(messages: list[JSON]) -> tuple[list[JSON], tuple[RequestImage, ...]]:
    """The messages without the bytes that `image_part` left in their parts, and those. Raises ApiError for too many."""
    found: list[RequestImage] = []
    result = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and (own := [part[FILE] for part in content if _has_image(part)]):
            found += own
            content = [{"type": "image", "image": part["image"]} if _has_image(part) else part for part in content]
            message = {**message, "content": content}
        result.append(message)
    if len(found) > MAX_IMAGES:
        path = found[MAX_IMAGES].path
        raise ApiError(f"{path}: expected at most {MAX_IMAGES} images in one request, got {len(found)}", param=path)
    return result, tuple(found)


def _has_image(part: Any) -> bool:
    # a request may have a field of that name
    return isinstance(part, dict) and isinstance(part.get(FILE), RequestImage)


def _with_detail(part: JSON, detail: Any, path: str, known: tuple[str, ...] = DETAILS) -> JSON:
    """The part of an image with the size in which it is to be read."""
    if detail is not None and detail not in known:
        raise expected(f"one of {', '.join(known)}", detail, path)
    return {**part, FILE: replace(part[FILE], detail=detail)}


def _of_url(url: Any, path: str) -> JSON:
    if not isinstance(url, str):
        raise expected("a data URI (data:image/png;base64,…)", url, path)
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        raise refused(path, NO_FETCHING)
    if not comma or not head.lower().endswith(";base64"):
        raise expected("a data URI in base64 (data:image/png;base64,…)", url, path)
    _check_type(head[len("data:") :].partition(";")[0], path)
    return _of_base64(data, path)


def _of_inline(given: JSON, path: str) -> JSON:
    data = given.get("data")
    if not isinstance(data, str):
        raise expected("an image file in base64", data, f"{path}.data")
    # Google reads base64 of both alphabets, with padding or without, and its Python SDK writes the one for URLs.
    plain = data.rstrip("=").replace("-", "+").replace("_", "/")
    return _of_base64(plain + "=" * (-len(plain) % 4), f"{path}.data")


def _of_file(file: Any, path: str) -> JSON:
    """Of Chat's and Responses' file parts: a data URI."""
    if not isinstance(file, dict):
        raise expected('{"file_data"}', file, path)
    _no_fetching(file, path, "file_id", "file_url")
    return _of_url(file.get("file_data"), f"{path}.file_data")


def _no_fetching(given: JSON, path: str, *names: str) -> None:
    for name in names:
        if given.get(name) is not None:
            raise refused(f"{path}.{name}", NO_FETCHING)


def _of_source(source: Any, path: str) -> JSON:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind in ("url", "file"):
        raise refused(f"{path}.{'url' if kind == 'url' else 'file_id'}", NO_FETCHING)
    if kind != "base64" or not isinstance(source.get("data"), str):
        raise expected('{"type": "base64", "media_type", "data"}', source, path)
    mime = source.get("media_type")
    if not isinstance(mime, str | None):
        raise expected("a string", mime, "media_type", path)
    _check_type(mime or "", path)
    return _of_base64(source["data"], f"{path}.data")


def _of_base64(text: str, path: str) -> JSON:
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise ApiError(f"{path}: expected an image of at most {MAX_IMAGE_BYTES >> 20} MiB", status=413, param=path)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:  # of its own, or for letters beyond ASCII
        raise expected("an image file in base64", text, path) from None
    name = sha256(data).hexdigest()
    return {"type": "image", "image": name, FILE: RequestImage(name, data, path)}


def _check_type(mime: str, path: str) -> None:
    kind = mime.strip().lower()
    if kind.startswith("audio/"):
        raise refused(path, NO_AUDIO)
    if not kind.startswith("image/") and kind not in ("", "application/octet-stream"):
        raise refused(path, f"expected an image, got {short(mime)}; the trained policy reads text and images")
