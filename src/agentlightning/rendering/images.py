"""Images as a model reads them: files checked and decoded, and the model's own processor of them.

Driven by the gateway, which needs the tokens that stand for an image in a prompt, and by sampler and learner, which need its
pixel values. Both come from the processor in the model's folder (transformers' AutoProcessor), are computed from the file's
bytes and are kept by the hash of those. Knows no messages and no weights.
"""

from __future__ import annotations

import io
import json
import threading
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from cachetools import LRUCache

from agentlightning.errors import InputError, MissingExtraError, ModelError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGE_BYTES = 16 << 20
"""Of one file."""
MAX_PIXELS = 50_000_000
"""Width times height, as the file's head says them: a small file may hold an image that fills the memory."""
MAX_REQUEST_PIXELS = 200_000_000
"""Of all images of a request, a hundred large screenshots: each is decoded, one after the other for everybody."""
MAX_ASPECT = 100
"""The longer side by the shorter: processors that bring the shorter one to a length make a line an image of gigabytes."""
MAX_CACHED_BYTES = 256 << 20
"""Pixel values that are kept."""
MAX_CACHED_EXPANSIONS = 4096

BEGIN_OF_IMAGE = ("gemma3", "gemma4")
"""Model types whose templates write the token that begins an image."""

T = TypeVar("T")


def image_hash(data: bytes) -> str:
    """The name of an image: the SHA-256 of its file's bytes, in hex."""
    return sha256(data).hexdigest()


def blank_image(width: int, height: int) -> bytes:
    """The file of a black image. MissingExtraError where Pillow is not installed."""
    file = io.BytesIO()
    _pillow().new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def decode_image(data: bytes) -> Any:
    """The PIL image of a file in RGB. InputError says what is wrong with it, MissingExtraError that Pillow is not installed.

    Takes a hundred times the file's bytes, and for a large image seconds: not for an event loop.
    """
    return _opened(data, lambda image: image.convert("RGB"))


def pixel_count(data: bytes) -> int:
    """Width times height, as the file's head says them; nothing is decoded. InputError as `decode_image`."""
    count: int = _opened(data, lambda image: image.width * image.height)
    return count


def _opened(data: bytes, work: Callable[[Any], Any]) -> Any:
    if len(data) > MAX_IMAGE_BYTES:
        raise InputError(f"expected an image of at most {MAX_IMAGE_BYTES >> 20} MiB, got {len(data)} bytes")
    Image = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own, larger bounds
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check(image)
                return work(image)
    except InputError:
        raise
    except Image.DecompressionBombError as cause:  # beyond twice Pillow's own bound
        raise InputError(f"expected an image of at most {MAX_PIXELS} pixels: {cause}") from cause
    except Exception as cause:  # Pillow's readers raise whatever a broken file makes them run into
        raise InputError(
            f"expected an image file ({', '.join(FORMATS)}), got {len(data)} bytes that are none"
        ) from cause


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as cause:
        raise MissingExtraError("pillow", "images") from cause
    return Image


def _check(image: Any) -> None:
    """InputError by what the file's head says, before anything is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(f"expected an image of at most {MAX_PIXELS} pixels, got {width} x {height}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InputError(f"expected an image at most {MAX_ASPECT} times as long as wide, got {width} x {height}")
    # Photographs of some cameras (MPO) have a second frame that is no animation.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise InputError(f"expected a still image, got an animated {image.format}")


class ImageProcessor:
    """The processor in a model's folder; loaded when first used. May be used from several threads."""

    def __init__(self, folder: Path, placeholder_id: int) -> None:
        self._folder = folder
        self.placeholder_id = placeholder_id
        """The id by which the chat template stands for an image; the processor is not needed to know it."""
        self._lock = threading.Lock()
        """Held to look at what is kept, never for long."""
        self._working = threading.Lock()
        """Held to decode: one image at a time, since it takes a hundred times its file's bytes."""
        self._loaded: Any = None
        self._expansions = LRUCache[str, list[int]](MAX_CACHED_EXPANSIONS)
        self._pixels = LRUCache[str, Any](MAX_CACHED_BYTES, getsizeof=lambda pixels: int(pixels.nbytes))

    @classmethod
    def find(cls, folder: Path) -> ImageProcessor | None:
        """The processor of a model with sight; None where its folder has none."""
        config = folder / "config.json"
        named = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
        if not named or not config.is_file():
            return None
        try:
            about = json.loads(config.read_text())
        except ValueError:
            return None  # whoever loads the model says so
        if not isinstance(about, dict) or not about.get("vision_config"):
            return None
        names = ("boi_token_id", "boi_token_index") if about.get("model_type") in BEGIN_OF_IMAGE else ()
        ids = [about.get(name) for name in (*names, "image_token_id", "image_token_index")]
        known = next((index for index in ids if isinstance(index, int)), None)
        return None if known is None else cls(folder, known)

    def expansion(self, data: bytes) -> list[int]:
        """The ids that the processor puts in the place of one placeholder. InputError where the bytes are no image."""
        name = image_hash(data)
        with self._lock:
            found = self._expansions.get(name)
        if found is None:
            with self._working:
                found = self._expand(data)
            with self._lock:
                self._expansions[name] = found
        return found

    def _expand(self, data: bytes) -> list[int]:
        image, processor = decode_image(data), self._processor()
        text = processor.tokenizer.convert_ids_to_tokens(self.placeholder_id)
        values = _read(image, lambda image: processor(images=[image], text=[text]))
        found = [int(index) for index in values["input_ids"][0]]
        start = getattr(processor.tokenizer, "bos_token_id", None)
        return found[1:] if found and found[0] == start else found

    def pixels(self, data: bytes) -> Any:
        """Pixel values of an image, a float tensor without a batch's dimension. InputError where the bytes are no image."""
        name = image_hash(data)
        with self._lock:
            if (found := self._pixels.get(name)) is not None:
                return found
        with self._working:
            image, processor = decode_image(data), self._processor().image_processor
            found = _read(image, lambda image: processor(images=[image], return_tensors="pt"))["pixel_values"][0]
        with self._lock:
            if found.nbytes <= MAX_CACHED_BYTES:
                self._pixels[name] = found
        return found

    def _processor(self) -> Any:
        if self._loaded is None:
            _pillow()
            from transformers import AutoProcessor

            try:
                self._loaded = AutoProcessor.from_pretrained(str(self._folder))
            except Exception as cause:  # each processor has errors of its own, and paragraphs of advice
                said = " ".join(str(cause).split()).partition(". ")[0]
                raise ModelError(f"model {self._folder}: its processor of images does not load ({said})") from cause
        return self._loaded


def _read(image: Any, work: Callable[[Any], T]) -> T:
    try:
        return work(image)
    except Exception as cause:  # processors check little: one pixel, say, ends in whatever numpy thinks of it
        raise InputError(f"the model's processor cannot read the image ({type(cause).__name__}: {cause})") from cause
