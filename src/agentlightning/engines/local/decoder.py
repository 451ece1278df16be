"""The forward pass of a sampler: one operation over a cache of keys and values.

`extend` reads M new tokens for each of B rows, writes their keys and values at their positions and gives the logits at one
position of each row. Prefill (offset 0), continuation (offset > 0) and decoding (M = 1) are the same operation. Rows are a
dense range, so that a batch is a view of the cache and never a gather. The scheduler drives it; it knows nothing of
requests, sampling or text.

Both decoders give the logits of transformers: LlamaDecoder (llama.py) for text models of that shape, straight from the
weights; TransformersDecoder for every other model whose state is keys and values, with its images if it reads any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from agentlightning.engines.local.images import PromptImages
from agentlightning.engines.local.llama import LlamaDecoder, is_llama_shaped
from agentlightning.engines.local.model import check_device, has_sight, load_model, read_config
from agentlightning.engines.models import context_length
from agentlightning.errors import ModelError


class Decoder(Protocol):
    """A causal LM over a cache of rows."""

    vocab: int
    context: int
    """Longest row, in tokens."""
    row_bytes: int
    """Bytes of cache for one token of one row."""
    images: PromptImages | None
    """Puts images into prompts, if the model reads any."""

    def reserve(self, rows: int, length: int) -> None:
        """Make the cache hold exactly `rows` rows of `length` tokens; what is cached there stays."""
        ...

    def extend(self, first: int, tokens_BM: Tensor, offsets_B: Tensor, take_B: Tensor) -> Tensor:
        """Append tokens to rows first … first+B-1 and return the float32 logits_BV after token take_B of each; logits_BKV
        where `take` is a matrix of K tokens of each.

        Row b's tokens get positions offsets_B[b] … offsets_B[b]+M-1. Rows shorter than M are padded on the right with any
        id: what padding writes lies behind the row's length and is written over before it can be seen.
        """
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` cached tokens of one row over another."""
        ...

    def read(self, row: int, length: int) -> Any:
        """The first `length` cached tokens of a row, for `write`."""
        ...

    def write(self, row: int, cached: Any) -> None:
        """Put back what `read` gave."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights of a folder; where they do not fit, ModelError, and the old ones stay."""
        ...


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """The fastest decoder that computes this model exactly. ConfigError where torch cannot use the device."""
    check_device(device)
    config = read_config(folder)
    decoder = LlamaDecoder if is_llama_shaped(config) else TransformersDecoder
    return decoder(config, folder, dtype, device)


class TransformersDecoder:
    """Any model whose state is keys and values, through its own forward, over a cache that writes at given positions and a
    mask of its own, so that rows of different lengths share a batch."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        text = config.get_text_config()
        self.vocab: int = text.vocab_size
        self.context = context_length(text)
        self.images: PromptImages | None = None
        self._cache = Cache(layers=[SlotLayer() for _ in range(text.num_hidden_layers)])
        self._model: Any = None
        self.load(folder)
        if has_sight(config):
            self.images = PromptImages(folder, self._model, self.vocab)
        self._prove(folder)
        self.row_bytes = sum(layer.token_bytes() for layer in self._cache.layers)

    def load(self, folder: Path) -> None:
        model = load_model(folder, self._dtype).to(self._device)
        if not has_sight(model.config):  # whose parts each have their own
            model.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
        self._model = model
        if self.images is not None:
            self.images.load(model)

    def _prove(self, folder: Path) -> None:
        """Some models keep another state than keys and values (recurrent layers), or read more of an image than its states
        (positions in two dimensions): find out now, not in the rewards."""
        shown, ids = list(range(6)), list(range(6))
        extra: dict[str, Tensor] = {}
        if self.images is not None:
            shown, ids, extra = self.images.example()
        shown_1M, ids_1M = (torch.tensor([[one % self.vocab for one in shown]]), torch.tensor([ids]))
        try:
            with torch.inference_mode():
                inputs = {"input_ids": shown_1M.to(self._device), "use_cache": False, **extra}
                expected = self._model(**inputs).logits[:, -1].float()
            self.reserve(1, len(ids))
            zero = torch.tensor([0])
            self.extend(0, ids_1M[:, :-2], zero, zero)
            found = self.extend(0, ids_1M[:, -2:], zero + len(ids) - 2, zero + 1)
        except (TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError, ValueError) as cause:
            raise ModelError(f"model {folder}: its layers cannot be sampled by the local engine ({cause})") from cause
        tolerance = 1e-3 if self._dtype == torch.float32 else 0.25
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            raise ModelError(f"model {folder}: the local engine cannot sample it (it keeps more than keys and values)")

    def reserve(self, rows: int, length: int) -> None:
        for layer in self._cache.layers:
            layer.reserve(rows, length)

    @torch.inference_mode()
    def extend(self, first: int, tokens_BM: Tensor, offsets_B: Tensor, take_B: Tensor) -> Tensor:
        B, M = tokens_BM.shape
        tokens_BM, offsets_B, take_B = (each.to(self._device) for each in (tokens_BM, offsets_B, take_B))
        positions_BM = offsets_B[:, None] + torch.arange(M, device=self._device)
        T = int(offsets_B.max()) + M
        for layer in self._cache.layers:
            layer.aim(first, positions_BM, T)
        hidden_BMT = torch.arange(T, device=self._device) > positions_BM[..., None]
        low = torch.finfo(self._dtype).min
        mask_BMT = torch.zeros(B, M, T, dtype=self._dtype, device=self._device).masked_fill_(hidden_BMT, low)
        inputs = {"input_ids": tokens_BM} if self.images is None else {"inputs_embeds": self.images.embed(tokens_BM)}
        logits_BMV = self._model(
            **inputs,
            attention_mask=mask_BMT[:, None],
            position_ids=positions_BM,
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        rows = torch.arange(B, device=self._device)
        picked: Tensor = logits_BMV[rows[:, None] if take_B.ndim > 1 else rows, take_B]
        return picked.float()

    def move(self, source: int, target: int, length: int) -> None:
        self.write(target, self.read(source, length))

    def read(self, row: int, length: int) -> Any:
        return [layer.read(row, length) for layer in self._cache.layers]

    def write(self, row: int, cached: Any) -> None:
        for layer, part in zip(self._cache.layers, cached, strict=True):
            layer.write(row, *part)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a transformers Cache that writes where `aim` says and gives back the rows in use."""

    is_sliding = False

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.first, self.length, self.room = 0, 0, (0, 0)
        self.rows = self.positions = torch.zeros(0)

    def reserve(self, rows: int, length: int) -> None:
        self.room = rows, length
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, old: Tensor) -> Tensor:
        rows, length = min(old.shape[0], self.room[0]), min(old.shape[2], self.room[1])
        new = old.new_zeros(self.room[0], old.shape[1], self.room[1], old.shape[3])
        new[:rows, :, :length] = old[:rows, :, :length]
        return new

    def aim(self, first: int, positions: Tensor, length: int) -> None:
        self.first, self.positions, self.length = first, positions, length
        self.rows = torch.arange(first, first + len(positions), device=positions.device)[:, None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._grown(key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = self._grown(value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.rows, :, self.positions] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.positions] = value_states.transpose(1, 2)
        used = slice(self.first, self.first + len(key_states))
        return self.keys[used, :, : self.length], self.values[used, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def token_bytes(self) -> int:
        if not self.is_initialized:
            return 0
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values))

    def read(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self.keys[row, :, :length].clone(), self.values[row, :, :length].clone()

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values
