"""Images: a model with sight reads an image as some of its tokens.

Sampler (PromptImages) and learner (Sight) drive it. The model turns the pixel values of an image into one state for each of
its placeholder tokens, which stand in the language model's input in place of embeddings. A placeholder that was sampled, or
written by a user, is a token like any other. Pixel values come from the model's own processor.
"""

from __future__ import annotations

import base64
import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from cachetools import LRUCache
from torch import Tensor

from agentlightning.engines.folders import first_line
from agentlightning.errors import EngineError, InputError, ModelError
from agentlightning.rendering.images import ImageProcessor, blank_image, image_hash
from agentlightning.training_types import TrainingSequence

MAX_KEPT_IMAGES = 256
"""Images whose states outlive the requests that brought them."""
TOWERS = ("vision_tower", "visual", "vision_model")
"""Names in transformers of the part that is not trained."""


def open_processor(folder: Path, model: Any) -> ImageProcessor:
    """The processor of a model with sight, tried with two images before any agent sends one. ModelError if its folder has
    none, or if it makes of an image what the model, or this engine, does not read."""
    found = ImageProcessor.find(folder)
    if found is None:
        raise ModelError(f"model {folder}: it has sight, but no processor of images (processor_config.json)")
    files = [blank_image(64, 64), blank_image(128, 64)]
    try:
        pixels = [found.pixels(data) for data in files]
        expansions = [found.expansion(data) for data in files]
        square, wide = (tuple(each.shape) for each in pixels)
        if square != wide:
            raise ModelError(
                f"model {folder}: its processor keeps the proportions of images (a square becomes {square}, a wide one "
                f"{wide}); the local engine reads images of one size"
            )
        with torch.no_grad():
            states = image_states(model, pixels)
    except ModelError:
        raise
    except Exception as cause:  # each processor and tower has checks of its own
        raise ModelError(
            f"model {folder}: its vision tower does not read what its processor makes of an image ({first_line(cause)})"
        ) from cause
    placeholders = [[found.placeholder_id] * len(of_image) for of_image in states]
    if expansions != placeholders:
        written, read = ([len(ids) for ids in images] for images in (expansions, placeholders))
        raise ModelError(
            f"model {folder}: its processor writes two images as {written} tokens; expected {read} placeholders (id "
            f"{found.placeholder_id}), one for each state that its vision tower gives"
        )
    return found


def image_states(model: Any, pixels: Sequence[Tensor]) -> list[Tensor]:
    """The states of images, [tokens, hidden] each, with gradients where the model's parameters have them."""
    parameter = next(model.parameters())
    stacked = torch.stack(list(pixels)).to(parameter.device, parameter.dtype)
    return list(model.model.get_image_features(pixel_values=stacked, return_dict=True).pooler_output)


@dataclass(eq=False)
class PlacedImage:
    """An image that prompts may hold. Its tokens have ids of their own, from `first` on, above the vocabulary: to a cache of
    prefixes two images are as different as two words."""

    first: int
    pixels: Tensor
    length: int
    states: Tensor | None = None
    """Of the weights that are loaded."""


@dataclass
class PlacedPrompt:
    """A prompt with images, which are kept as long as it is used."""

    ids: list[int]
    """As the decoder reads it."""
    shown: list[int]
    """As the model's processor writes it: placeholders in place of the images' own ids."""
    images: list[PlacedImage]


class PromptImages:
    """The images of a sampler's prompts. Several threads may place prompts while another one computes."""

    def __init__(self, folder: Path, model: Any, vocab: int) -> None:
        self._model = model
        self._processor = open_processor(folder, model)
        self._placeholder = self._processor.placeholder_id
        self._vocab = self._next = vocab
        self._by_hash: WeakValueDictionary[str, PlacedImage] = WeakValueDictionary()
        self._by_first: WeakValueDictionary[int, PlacedImage] = WeakValueDictionary()
        self._kept: LRUCache[str, PlacedImage] = LRUCache(MAX_KEPT_IMAGES)
        self._lock = threading.Lock()

    def load(self, model: Any) -> None:
        """Read images with these weights from now on."""
        self._model = model
        with self._lock:
            placed = list(self._by_first.values())
        for image in placed:
            image.states = None

    def place(self, tokens: list[int], files: Sequence[bytes], context: int) -> PlacedPrompt:
        """The prompt with images in the places of its placeholders. InputError if one cannot be read, or if they are not as
        many as the images. Takes seconds for large images: not for an event loop."""
        places = [at for at, token in enumerate(tokens) if token == self._placeholder]
        if len(places) != len(files):
            raise InputError(f"content_parts: {len(files)} images for {len(places)} placeholders among token_ids")
        prompt = PlacedPrompt([], [], [])
        before = 0
        for at, data in zip(places, files, strict=True):
            image = self._placed(data)
            text = tokens[before:at]
            prompt.ids += [*text, *range(image.first, image.first + image.length)]
            prompt.shown += [*text, *[self._placeholder] * image.length]
            prompt.images.append(image)
            before = at + 1
        prompt.ids += tokens[before:]
        prompt.shown += tokens[before:]
        if len(prompt.ids) >= context:
            raise InputError(
                f"the prompt has {len(prompt.ids)} tokens with its images; the model's context is {context}, answer included"
            )
        return prompt

    def example(self) -> tuple[list[int], list[int], dict[str, Tensor]]:
        """A prompt with an image: as the processor writes it, as the decoder reads it, and the model's further inputs."""
        parameter = next(self._model.parameters())
        image = self._placed(blank_image(64, 64))
        before, after = [0, 1], [2, 3, 4]
        shown = [*before, *[self._placeholder] * image.length, *after]
        ids = [*before, *range(image.first, image.first + image.length), *after]
        return shown, ids, {"pixel_values": image.pixels[None].to(parameter.device, parameter.dtype)}

    def embed(self, tokens_BM: Tensor) -> Tensor:
        """The input of the language model."""
        seen_BM = tokens_BM >= self._vocab
        embedding = self._model.get_input_embeddings()
        if not bool(seen_BM.any()):
            return embedding(tokens_BM)  # type: ignore[no-any-return]
        x: Tensor = embedding(tokens_BM.masked_fill(seen_BM, 0))
        ids = tokens_BM[seen_BM].tolist()
        with self._lock:
            firsts = sorted(self._by_first)
        rows = [(firsts[bisect.bisect_right(firsts, one) - 1], one) for one in ids]
        states = {first: self._states(first) for first in {first for first, _ in rows}}
        x[seen_BM] = torch.stack([states[first][one - first] for first, one in rows]).to(x.dtype)
        return x

    def _states(self, first: int) -> Tensor:
        image = self._by_first[first]
        if image.states is None:
            with torch.inference_mode():
                image.states = image_states(self._model, [image.pixels])[0]
        return image.states

    def _placed(self, data: bytes) -> PlacedImage:
        name = image_hash(data)
        with self._lock:
            image = self._by_hash.get(name)
        if image is None:
            pixels = self._processor.pixels(data)
            with torch.inference_mode():
                length = len(image_states(self._model, [pixels])[0])
        with self._lock:
            image = image or self._by_hash.get(name)
            if image is None:
                image = PlacedImage(first=self._next, pixels=pixels, length=length)
                self._next += length
                self._by_hash[name] = self._by_first[image.first] = image
            self._kept[name] = image
            return image


def read_images(parts: Any) -> list[bytes]:
    """The files of a request's `content_parts` (vLLM's form). InputError names what is wrong with them."""
    if not isinstance(parts, list):
        raise InputError("content_parts: expected a list of objects")
    files = []
    for part in parts:
        url = part.get("url") if isinstance(part, dict) and part.get("type") == "image_url" else None
        head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
        if not (head.startswith("data:") and head.endswith(";base64")):
            raise InputError('content_parts: expected {"type": "image_url", "url": "data:…;base64,…"} for each')
        try:
            files.append(base64.b64decode(data, validate=True))
        except ValueError as cause:  # of its own, or for letters beyond ASCII
            raise InputError("content_parts: expected base64 after data:") from cause
    return files


class Sight:
    """The learner's side: batches whose placeholders are images."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._processor = open_processor(folder, model)
        for name in TOWERS:
            if hasattr(model.model, name):
                getattr(model.model, name).requires_grad_(False)

    def check(self, sequence: TrainingSequence) -> None:
        """EngineError if the images of a sequence cannot be what its tokens say."""
        before = 0
        for image in sequence.images:
            inside = before <= image.start < image.end <= len(sequence.tokens)
            if not inside or any(sequence.mask[image.start : image.end]):
                raise EngineError(f"a sequence of rollout {sequence.rollout_id} has an image where no placeholders are")
            if not image.data:
                raise EngineError(
                    f"a sequence of rollout {sequence.rollout_id} has the image {image.hash} without its bytes"
                )
            before = image.end

    def embeddings(self, model: Any, sequences: Sequence[TrainingSequence], tokens_BT: Tensor) -> Tensor:
        """The input of the language model for padded sequences: embeddings, and states of images in their places."""
        embeddings_BTX: Tensor = model.get_input_embeddings()(tokens_BT)
        files = {image.hash: image.data for sequence in sequences for image in sequence.images}
        if not files:
            return embeddings_BTX
        try:
            pixels = [self._processor.pixels(data) for data in files.values()]
        except InputError as cause:
            raise EngineError(f"an image cannot be read: {cause}") from cause
        states = dict(zip(files, image_states(model, pixels), strict=True))
        rows: list[int] = []
        columns: list[int] = []
        values: list[Tensor] = []
        for row, sequence in enumerate(sequences):
            for image in sequence.images:
                if len(states[image.hash]) != image.end - image.start:
                    raise EngineError(
                        f"an image of rollout {sequence.rollout_id} has {len(states[image.hash])} tokens, "
                        f"not {image.end - image.start}"
                    )
                rows += [row] * (image.end - image.start)
                columns += range(image.start, image.end)
                values.append(states[image.hash])
        place = torch.tensor(rows, device=tokens_BT.device), torch.tensor(columns, device=tokens_BT.device)
        return embeddings_BTX.index_put(place, torch.cat(values).to(embeddings_BTX.dtype))
