"""The forward pass of a sampler: one operation over a cache of keys and values.

`extend` reads M new tokens for each of B rows, writes their keys and values at their positions and gives the logits at one
position of each row: prefill (offset 0), continuation and decoding (M = 1) alike. Rows are a dense range, so that a batch is
a view of the cache. The scheduler drives it; it knows nothing of requests, sampling or text.

Both decoders give the logits of transformers: LlamaDecoder for text models of that shape (Llama, Qwen2, Qwen3, Mistral),
straight over the weights, which at a few hundred thousand parameters takes 2-4 times less; TransformersDecoder for every
other model whose state is keys and values, with its images if it reads any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from agentlightning.engines.folders import context_length
from agentlightning.engines.local.images import PromptImages
from agentlightning.engines.local.model import (
    LLAMA_SHAPED,
    check_device,
    has_sight,
    load_model,
    read_config,
    read_weights,
    warn_of_unused,
)
from agentlightning.errors import ModelError

STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
MIN_FUSED_WIDTH = 32
"""Numbers of a head from which scaled_dot_product_attention is quicker on a CPU than two batched products."""

Take = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """The weights of one layer, as the forward wants them."""

    norm: Tensor
    qkv: Tensor
    """Queries, keys and values in one matrix; rows of queries and keys in the order of `_pairs`."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def is_llama_shaped(config: Any) -> bool:
    """True where LlamaDecoder computes this model exactly."""
    return (
        (config.architectures or [""])[0] in LLAMA_SHAPED
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and (config.rope_parameters or {}).get("rope_type") in STATIC_ROPES
        and getattr(config, "quantization_config", None) is None
    )


class LlamaDecoder:
    """A Decoder; see decoder.py for what its methods promise."""

    images: PromptImages | None = None

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self.vocab: int = config.vocab_size
        self.context = context_length(config)
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._hidden: int = config.hidden_size
        self._inner: int = config.intermediate_size
        self._tied: bool = config.tie_word_embeddings
        # As transformers has it for each of the four families: whatever else the files hold is no part of the model.
        self._qk_norms = config.model_type == "qwen3"
        self._out_bias: bool = config.model_type in ("llama", "qwen3") and config.attention_bias
        self._qkv_bias = self._out_bias or config.model_type == "qwen2"
        self._group = self._heads // self._kv_heads
        self.row_bytes = 2 * self._layers * self._kv_heads * self._width * dtype.itemsize
        self._frequencies, self._rope_scale = _rope(config, self._width)
        self._turns = torch.zeros(0)
        self._fused = device == "cpu" and self._width >= MIN_FUSED_WIDTH
        self._keys = torch.zeros(self._layers, 0, self._kv_heads, 0, self._width, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self.load(folder)

    def load(self, folder: Path) -> None:
        weights = read_weights(folder)
        taken = set[str]()

        def take(name: str, *shape: int) -> Tensor:
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise ModelError(f"model {folder}: weight {name} {found}; expected shape {shape}")
            taken.add(name)
            return tensor.to(self._device, self._dtype)

        blocks = [self._block(f"model.layers.{index}.", take) for index in range(self._layers)]
        names = ["model.embed_tokens.weight", "lm_head.weight"]
        if self._tied:  # the files may have either; where they have both and these differ, they are not tied
            names = [name for name in names if name in weights] or names[:1]
        embedding, *others = (take(name, self.vocab, self._hidden) for name in names)
        head = next((other for other in others if not torch.equal(other, embedding)), embedding)
        norm = take("model.norm.weight", self._hidden)
        warn_of_unused(folder, weights.keys() - taken)
        self._blocks, self._embedding, self._norm, self._head = blocks, embedding, norm, head

    def _block(self, at: str, take: Take) -> Block:
        hidden, inner, width = self._hidden, self._inner, self._width
        sizes = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}

        def joined(kind: str, *shape: int) -> Tensor:
            parts = []
            for name, heads in sizes.items():
                part = take(f"{at}self_attn.{name}_proj.{kind}", heads * width, *shape)
                parts.append(part if name == "v" else part[_pairs(heads, width)])
            return torch.cat(parts)

        q_norm, k_norm = (take(f"{at}self_attn.{name}_norm.weight", width) if self._qk_norms else None for name in "qk")
        return Block(
            norm=take(f"{at}input_layernorm.weight", hidden),
            qkv=joined("weight", hidden),
            qkv_bias=joined("bias") if self._qkv_bias else None,
            q_norm=None if q_norm is None else q_norm[_pairs(1, width)],
            k_norm=None if k_norm is None else k_norm[_pairs(1, width)],
            out=take(f"{at}self_attn.o_proj.weight", hidden, self._heads * width),
            out_bias=take(f"{at}self_attn.o_proj.bias", hidden) if self._out_bias else None,
            mlp_norm=take(f"{at}post_attention_layernorm.weight", hidden),
            gate_up=torch.cat([take(f"{at}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]),
            down=take(f"{at}mlp.down_proj.weight", hidden, inner),
        )

    def reserve(self, rows: int, length: int) -> None:
        kept_rows, kept = min(rows, self._keys.shape[1]), min(length, self._keys.shape[3])
        shape = (self._layers, rows, self._kv_heads, length, self._width)
        values = self._values.new_zeros(shape)
        # For the batched products keys lie with time innermost: a query times a row's keys is one unit-stride product.
        keys = (
            torch.zeros_like(values) if self._fused else values.new_zeros(*shape[:3], *shape[:2:-1]).transpose(-1, -2)
        )
        for new, old in ((keys, self._keys), (values, self._values)):
            new[:, :kept_rows, :, :kept] = old[:, :kept_rows, :, :kept]
        self._keys, self._values = keys, values
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        self._turns = torch.polar(torch.full_like(angles, self._rope_scale), angles).to(self._device)

    @torch.inference_mode()
    def extend(self, first: int, tokens_BM: Tensor, offsets_B: Tensor, take_B: Tensor) -> Tensor:
        B, M = tokens_BM.shape
        positions_BM = offsets_B[:, None] + torch.arange(M, device=self._device)
        T = int(offsets_B.max()) + M
        # One additive mask serves every layer: [B, kv_heads or 1, queries of a kv head, T].
        hidden_BMT = torch.arange(T, device=self._device) > positions_BM[..., None]
        mask_BMT = torch.zeros(B, M, T, dtype=self._dtype, device=self._device).masked_fill_(hidden_BMT, float("-inf"))
        mask = mask_BMT[:, None, None].expand(B, 1 if self._fused else self._kv_heads, self._group, M, T).flatten(2, 3)
        turns = self._turns[positions_BM][:, :, None]
        rows = torch.arange(first, first + B, device=self._device)[:, None]
        x = F.embedding(tokens_BM, self._embedding)
        for layer, block in enumerate(self._blocks):
            y = F.rms_norm(x, (self._hidden,), block.norm, self._eps)
            qkv = F.linear(y, block.qkv, block.qkv_bias).view(B, M, -1, self._width)
            q, k, v = self._place(block, qkv, turns)
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, :, positions_BM] = k
            values[rows, :, positions_BM] = v
            used = slice(first, first + B)
            a = self._attend(q, keys[used, :, :T], values[used, :, :T], mask)
            x = x + F.linear(a, block.out, block.out_bias)
            y = F.rms_norm(x, (self._hidden,), block.mlp_norm, self._eps)
            gate, up = F.linear(y, block.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, block.down)
        if take_B.ndim > 1:
            x_BH = x[torch.arange(B, device=self._device)[:, None], take_B]
        else:
            x_BH = x[:, 0] if M == 1 else x[torch.arange(B, device=self._device), take_B]
        x_BH = F.rms_norm(x_BH, (self._hidden,), self._norm, self._eps)
        return F.linear(x_BH, self._head).float()

    def _place(self, block: Block, qkv_BMHD: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both normed where the model does so, and turned by their positions) and values."""
        both = self._heads + self._kv_heads
        q_k = qkv_BMHD[:, :, :both]
        if block.q_norm is not None:
            q = F.rms_norm(q_k[:, :, : self._heads], (self._width,), block.q_norm, self._eps)
            q_k = torch.cat([q, F.rms_norm(q_k[:, :, self._heads :], (self._width,), block.k_norm, self._eps)], 2)
        pairs = torch.view_as_complex(q_k.float().reshape(*q_k.shape[:-1], -1, 2))
        q_k = torch.view_as_real(pairs * turns).flatten(-2).to(self._dtype)
        return q_k[:, :, : self._heads], q_k[:, :, self._heads :], qkv_BMHD[:, :, both:]

    def _attend(self, q_BMHD: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention [B, M, heads * width]. Queries that share keys are more queries of one head, so nothing is repeated."""
        B, M = q_BMHD.shape[:2]
        if self._fused and M == 1 and self._dtype == torch.bfloat16:  # a tenth quicker apart, in float32 slower
            q = q_BMHD.transpose(1, 2)
            return F.scaled_dot_product_attention(q, keys, values, mask[:, :, :1], enable_gqa=True).view(B, 1, -1)
        q = q_BMHD.reshape(B, M, self._kv_heads, self._group, self._width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if self._fused:
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        else:  # quicker by a half at heads of 16 numbers; bfloat16 would copy the row's keys for it
            q, keys, values, mask = (part.flatten(0, 1) for part in (q, keys, values, mask))
            scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self._width**-0.5)
            a = torch.bmm(torch.softmax(scores, -1), values)
        a = a.view(B, self._kv_heads, self._group, M, self._width)
        return a.permute(0, 3, 1, 2, 4).reshape(B, M, self._heads * self._width)

    def move(self, source: int, target: int, length: int) -> None:
        for cache in (self._keys, self._values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def read(self, row: int, length: int) -> Any:
        return [cache[:, row, :, :length].clone() for cache in (self._keys, self._values)]

    def write(self, row: int, cached: Any) -> None:
        for cache, part in zip((self._keys, self._values), cached, strict=True):
            cache[:, row, :, : part.shape[2]] = part


def _pairs(heads: int, width: int) -> Tensor:
    """Row order in which each head's dimensions i and i + width/2 lie side by side, so that rope's turn is one complex
    product. Queries and keys are permuted alike, so their products do not change."""
    order = torch.arange(width).view(2, width // 2).T.reshape(-1)
    return (torch.arange(heads)[:, None] * width + order).reshape(-1)


def _rope(config: Any, width: int) -> tuple[Tensor, float]:
    """Inverse frequencies and the scale of cos and sin; types other than default come from transformers itself."""
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    return frequencies.float(), float(scale)


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
        for a matrix of K tokens of each.

        Row b's tokens get positions offsets_B[b] … offsets_B[b]+M-1. Padding on the right may be any id: what it writes lies
        behind the row's length and is written over before it can be seen.
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
    """The fastest decoder that computes this model exactly. ConfigError if torch cannot use the device."""
    check_device(device)
    config = read_config(folder)
    decoder = LlamaDecoder if is_llama_shaped(config) else TransformersDecoder
    return decoder(config, folder, dtype, device)


class TransformersDecoder:
    """Any model whose state is keys and values, with its images if it reads any, through its own forward, over a cache that
    writes at given positions and a mask of its own, so that rows of different lengths share a batch."""

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
        """ModelError for one that keeps another state (recurrent layers) or reads more of an image than its states."""
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
