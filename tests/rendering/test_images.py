"""Files of images, however broken: read or refused in a sentence, without more memory than an image may take."""

from __future__ import annotations

import contextlib
import io
import resource
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentlightning.errors import InputError
from agentlightning.rendering.images import decode_image


def picture(kind: str, size: tuple[int, int] = (24, 16)) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(file, kind)
    return file.getvalue()


def promising(width: int, height: int, pixels: bytes = bytes(9)) -> bytes:
    """A PNG whose head promises so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


FILES = {kind: picture(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_with_any_bytes_changed_or_cut_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    broken = bytearray(FILES[kind])
    for at, byte in data.draw(
        st.dictionaries(st.integers(0, len(broken) - 1), st.integers(0, 255), max_size=4)
    ).items():
        broken[at] = byte
    with contextlib.suppress(InputError):
        decode_image(bytes(broken[: data.draw(st.integers(0, len(broken)))]))


def test_hostile_files_are_refused_by_their_heads_and_take_no_memory() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for hostile, said in (
        (promising(60_000, 60_000), "at most 50000000 pixels"),
        (promising(2**31 - 1, 2**31 - 1), "at most 50000000 pixels|expected an image file"),
        (promising(100_000, 1), "at most 100 times as long as wide, got 100000 x 1"),
        (promising(1, 100_000), "at most 100 times as long as wide, got 1 x 100000"),
        (promising(7_000, 7_000, bytes(16 << 20))[:9_000], "expected an image file"),
        (bytes((16 << 20) + 1), "at most 16 MiB"),
        (b"<svg/>", "expected an image file"),
    ):
        with pytest.raises(InputError, match=said):
            decode_image(hostile)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 << 10
