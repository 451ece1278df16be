"""A LLaVA of three million random parameters, made on the spot, and pictures for it."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from agentlightning.demo import tiny_model, tiny_vision

WORDS = ["look", "what", "colour", "is", "it", "?", "red", "green", "blue"]


def write_seeing_model(folder: Path) -> Path:
    """A model folder."""
    tiny_vision.write(folder, tiny_model.word_tokenizer([], WORDS, min_times_seen=1), hidden=256)  # heads of 64
    return folder


def picture(shade: int) -> bytes:
    """A PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 255 - shade, 40)).save(file, "PNG")
    return file.getvalue()
