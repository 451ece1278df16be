"""A LLaVA of three million random parameters, made on the spot, and pictures for it."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from safetensors.torch import load_file, save_file

from agentlightning.demo import tiny_model, tiny_vision

WORDS = ["look", "what", "colour", "is", "it", "?", "red", "green", "blue"]


def write_seeing_model(folder: Path) -> Path:
    """A model folder. Its tensors have the names of published LLaVA checkpoints, which vLLM asks for; transformers, which
    reads both, has saved them without `vision_model` since its version 5."""
    tiny_vision.write(folder, tiny_model.word_tokenizer([], WORDS, min_times_seen=1), hidden=256)  # heads of 64
    file = folder / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def picture(shade: int) -> bytes:
    """A PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 255 - shade, 40)).save(file, "PNG")
    return file.getvalue()
