"""Models with sight (LLaVA): a language model that reads an image as some of its tokens.

Sampler and learner drive it. A vision tower and a projector turn the pixel values of an image into one state for each of its
placeholder tokens, which stand in the language model's input in place of embeddings. Where the placeholders are is told with
the tokens: a placeholder that was sampled, or written by a user, is a token like any other. Pixel values come from the
model's own processor. Refuses to know losses, requests and weights versions.
"""

from __future__ import annotations

import base64
import bisect
import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from agentlightning.engines.local.checkpoint import load_model
from agentlightning.engines.local.decoder import Decoder
from agentlightning.engines.local.llama import LlamaDecoder, is_llama_shaped
from agentlightning.engines.models import first_line
from agentlightning.errors import EngineError, InputError, ModelError
from agentlightning.rendering.images import ImageProcessor, blank_image, image_hash
from agentlightning.training_types import TrainingSequence

TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""Language models that VisionDecoder computes, by their model type."""
MAX_KEPT_IMAGES = 256
"""Images whose states outlive the requests that brought them."""


def open_processor(folder: Path, model: Any) -> ImageProcessor:
    """The processor of a model with sight, tried with two images before any agent sends one. ModelError where its folder has
    none, or where it makes of an image what the model, or this engine, does not read."""
    found = ImageProcessor.find(folder)
    if found is None:
        raise ModelError(f"model {folder}: it has sight, but no processor of images (processor_config.json)")
    files = [blank_image(64, 64), blank_image(128, 64)]
    try:
        pixels = [found.pixels(data) for data in files]
        expansions = [found.expansion(data) for data in files]
    except ModelError:
        raise
    except InputError as cause:
        raise ModelError(f"model {folder}: {first_line(cause)}") from cause
    square, wide = (tuple(each.shape) for each in pixels)
    if square != wide:
        raise ModelError(
            f"model {folder}: its processor keeps the proportions of images (a square becomes {square}, a wide one {wide}); "
            "the local engine reads images of one size"
        )
    try:
        with torch.no_grad():
            states = image_states(model, pixels)
    except Exception as cause:  # each tower has checks of its own
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
    parameter = next(model.model.multi_modal_projector.parameters())
    stacked = torch.stack(list(pixels)).to(parameter.device, parameter.dtype)
    return list(model.model.get_image_features(pixel_values=stacked, return_dict=True).pooler_output)


# --- sampling -----------------------------------------------------------------------------------------------------------


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
    """A prompt with images."""

    ids: list[int]
    """As the decoder reads it."""
    shown: list[int]
    """As the model's processor writes it: placeholders in place of the images' own ids."""
    images: list[PlacedImage]
    """Kept as long as the prompt is used."""


class VisionDecoder(LlamaDecoder):
    """A Decoder for LLaVA with a language model of Llama's shape; `place` puts images into prompts."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        text = copy.copy(config.text_config)
        text.architectures = [TEXT_MODELS.get(text.model_type, text.model_type)]
        text.tie_word_embeddings = config.tie_word_embeddings
        if not is_llama_shaped(text):
            raise ModelError(
                f"model {folder}: its language model is {text.model_type}; with images the local engine samples those of "
                "Llama's shape (Llama, Qwen2, Qwen3, Mistral)"
            )
        self._placeholder = int(config.image_token_id)
        self._next = text.vocab_size
        self._by_hash: WeakValueDictionary[str, PlacedImage] = WeakValueDictionary()
        self._by_first: WeakValueDictionary[int, PlacedImage] = WeakValueDictionary()
        self._kept: OrderedDict[str, PlacedImage] = OrderedDict()
        self._lock = threading.Lock()
        """Of the images above: prompts are placed in other threads than the one that computes."""
        self._vision: Any = None
        super().__init__(text, folder, dtype, device)
        self._processor = open_processor(folder, self._vision)

    def load(self, folder: Path) -> None:
        model = load_model(folder, self._dtype).to(self._device)
        names = {"model.language_model.": "model.", "lm_head.": "lm_head."}
        weights = {
            new + name.removeprefix(old): value
            for name, value in model.state_dict().items()
            for old, new in names.items()
            if name.startswith(old)
        }
        self.take(weights, folder)
        self._vision = model
        with self._lock:
            placed = list(self._by_first.values())
        for image in placed:
            image.states = None

    def place(self, tokens: list[int], files: Sequence[bytes]) -> PlacedPrompt:
        """The prompt with images in the places of its placeholders, one of which stands for each. InputError where one
        cannot be read, or where they are not as many as the images. Takes seconds for large images: not for an event loop;
        may be called from several threads."""
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
        if len(prompt.ids) >= self.context:
            raise InputError(
                f"the prompt has {len(prompt.ids)} tokens with its images; the model's context is {self.context}, "
                "answer included"
            )
        return prompt

    def embed(self, tokens_BM: Tensor) -> Tensor:
        seen_BM = tokens_BM >= self.vocab
        if not bool(seen_BM.any()):
            return F.embedding(tokens_BM, self._embedding)
        x = F.embedding(tokens_BM.masked_fill(seen_BM, 0), self._embedding)
        ids = tokens_BM[seen_BM].tolist()
        with self._lock:
            firsts = sorted(self._by_first)
        states = {first: self._states(first) for first in {firsts[bisect.bisect_right(firsts, i) - 1] for i in ids}}
        rows = [(firsts[bisect.bisect_right(firsts, i) - 1], i) for i in ids]
        x[seen_BM] = torch.stack([states[first][i - first] for first, i in rows]).to(x.dtype)
        return x

    def _states(self, first: int) -> Tensor:
        image = self._by_first[first]
        if image.states is None:
            with torch.inference_mode():
                image.states = image_states(self._vision, [image.pixels])[0]
        return image.states

    def _placed(self, data: bytes) -> PlacedImage:
        name = image_hash(data)
        with self._lock:
            image = self._by_hash.get(name)
        if image is None:
            pixels = self._processor.pixels(data)
            length = self._length(pixels)
        with self._lock:
            image = image or self._by_hash.get(name)
            if image is None:
                image = PlacedImage(first=self._next, pixels=pixels, length=length)
                self._next += length
                self._by_hash[name] = self._by_first[image.first] = image
            self._kept[name] = image
            self._kept.move_to_end(name)
            if len(self._kept) > MAX_KEPT_IMAGES:
                self._kept.popitem(last=False)
            return image

    def _length(self, pixels: Tensor) -> int:
        with torch.inference_mode():
            return len(image_states(self._vision, [pixels])[0])


def place_images(decoder: Decoder, tokens: list[int], parts: Any) -> PlacedPrompt | None:
    """The prompt of a request with the images of its `content_parts` (vLLM's form); None where there are none. InputError
    names what is wrong with them, or that the model has no sight."""
    if not parts:
        return None
    if not isinstance(decoder, VisionDecoder):
        raise InputError("content_parts: the model has no sight; expected text only")
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
    return decoder.place(tokens, files)


# --- learning -----------------------------------------------------------------------------------------------------------


class Sight:
    """The learner's side: batches whose placeholders are images."""

    def __init__(self, model: Any, folder: Path, *, tower: bool) -> None:
        """tower: the vision tower is trained too, and not only the projector and the language model."""
        self._processor = open_processor(folder, model)
        model.model.vision_tower.requires_grad_(tower)

    def check(self, sequence: TrainingSequence) -> None:
        """EngineError where the images of a sequence cannot be what its tokens say."""
        before = 0
        for image in sequence.images:
            if not before <= image.start < image.end <= len(sequence.tokens) or any(
                sequence.mask[image.start : image.end]
            ):
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
