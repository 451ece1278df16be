"""A decoder for any causal LM whose state is keys and values, through its own transformers forward.

The model sees a cache that writes at given positions and a mask of its own, so that rows of different lengths share a
batch. Slower than llama.py at tiny sizes, and right for everything else that it accepts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from agentlightning.engines.local.checkpoint import load_model
from agentlightning.engines.models import context_length
from agentlightning.errors import ModelError


class TransformersDecoder:
    """Any causal LM whose state is keys and values, through its own forward and a cache that writes at given positions."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self.vocab: int = config.get_text_config().vocab_size
        self.context = context_length(config.get_text_config())
        self._cache = Cache(layers=[SlotLayer() for _ in range(config.get_text_config().num_hidden_layers)])
        self.row_bytes = 0
        self.load(folder)
        self.row_bytes = sum(layer.token_bytes() for layer in self._cache.layers)

    def load(self, folder: Path) -> None:
        model = load_model(folder, self._dtype).to(self._device)
        model.config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
        old = getattr(self, "_model", None)
        self._model = model
        if old is None:
            self._prove(folder)

    def _prove(self, folder: Path) -> None:
        """Some models keep another state than keys and values (recurrent layers): find out now, not in the rewards."""
        tokens = torch.arange(6, device=self._device)[None] % self.vocab
        try:
            with torch.inference_mode():
                expected = self._model(input_ids=tokens, use_cache=False).logits[:, -1].float()
            self.reserve(1, 8)
            zero, take = torch.tensor([0]), torch.tensor([3])
            self.extend(0, tokens[:, :4], zero, take)
            found = self.extend(0, tokens[:, 4:], zero + 4, zero + 1)
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
        offsets_B, take_B = offsets_B.to(self._device), take_B.to(self._device)
        positions_BM = offsets_B[:, None] + torch.arange(M, device=self._device)
        T = int(offsets_B.max()) + M
        for layer in self._cache.layers:
            layer.aim(first, positions_BM, T)
        hidden_BMT = torch.arange(T, device=self._device) > positions_BM[..., None]
        low = torch.finfo(self._dtype).min
        mask_BMT = torch.zeros(B, M, T, dtype=self._dtype, device=self._device).masked_fill_(hidden_BMT, low)
        logits_BMV = self._model(
            input_ids=tokens_BM.to(self._device),
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
