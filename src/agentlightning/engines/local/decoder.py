"""The forward pass of a sampler: one operation over a cache of keys and values.

`extend` reads M new tokens for each of B rows, writes their keys and values at their positions and gives the logits at one
position of each row. Prefill (offset 0), continuation (offset > 0) and decoding (M = 1) are the same operation. Rows are a
dense range, so that a batch is a view of the cache and never a gather. The scheduler drives it; it knows nothing of
requests, sampling or text.

Both decoders give the logits of transformers: LlamaDecoder (llama.py) for models of that shape, straight from the weights;
TransformersDecoder (generic.py) for any other causal LM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentlightning.engines.local.checkpoint import has_sight, read_config
from agentlightning.engines.local.device import check_device
from agentlightning.engines.local.llama import LlamaDecoder, is_llama_shaped


class Decoder(Protocol):
    """A causal LM over a cache of rows."""

    vocab: int
    context: int
    """Longest row, in tokens."""
    row_bytes: int
    """Bytes of cache for one token of one row."""

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
    if has_sight(config):
        from agentlightning.engines.local.vision import VisionDecoder

        return VisionDecoder(config, folder, dtype, device)
    if is_llama_shaped(config):
        return LlamaDecoder(config, folder, dtype, device)
    from agentlightning.engines.local.generic import TransformersDecoder

    return TransformersDecoder(config, folder, dtype, device)
