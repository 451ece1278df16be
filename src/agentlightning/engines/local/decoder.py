"""The forward pass of a sampler: one operation over a cache of keys and values.

`extend` reads M new tokens for each of B rows, writes their keys and values at their positions and gives the logits at one
position of each row. Prefill (offset 0), continuation (offset > 0) and decoding (M = 1) are the same operation. Rows are a
dense range, so that a batch is a view of the cache and never a gather. The scheduler drives it; it knows nothing of
requests, sampling or text.

`LlamaDecoder` computes Llama-shaped models straight from their weights: at a few hundred thousand parameters a
transformers forward spends most of its time outside the kernels. `TransformersDecoder` runs any other causal LM through its
own forward. Both give the logits of transformers (tests/engines/test_decoder.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from agentlightning.engines.local.checkpoint import load_model, read_config, read_weights
from agentlightning.errors import ModelError

LLAMA_SHAPED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"})
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


class Decoder(Protocol):
    """A causal LM over a cache of rows."""

    vocab: int
    context: int
    """Most tokens of a row."""
    row_bytes: int
    """Bytes of cache for one token of one row."""

    def reserve(self, rows: int, length: int) -> None:
        """Make the cache hold exactly `rows` rows of `length` tokens; what is cached there stays."""
        ...

    def extend(self, first: int, tokens_BM: Tensor, offsets_B: Tensor, take_B: Tensor) -> Tensor:
        """Append tokens to rows first … first+B-1 and return the float32 logits_BV after token take_B of each.

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
    """The fastest decoder that computes this model exactly."""
    config = read_config(folder)
    if _is_llama_shaped(config):
        return LlamaDecoder(config, folder, dtype, device)
    return TransformersDecoder(config, folder, dtype, device)


class LlamaDecoder:
    """Llama, Qwen2, Qwen3 and Mistral from their weights; grouped queries, qkv bias and q/k norms included."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self.vocab: int = config.vocab_size
        self.context = _context(config)
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._hidden: int = config.hidden_size
        self._tied: bool = config.tie_word_embeddings
        self.row_bytes = 2 * self._layers * self._kv_heads * self._width * dtype.itemsize
        self._frequencies, self._rope_scale = _rope(config, self._width)
        self._turns = torch.zeros(0)
        # Keys lie with time innermost: a query times the keys of a row is then one unit-stride product.
        self._keys = torch.zeros(self._layers, 0, self._kv_heads, self._width, 0, dtype=dtype, device=device)
        self._values = torch.zeros(self._layers, 0, self._kv_heads, 0, self._width, dtype=dtype, device=device)
        self.load(folder)

    def load(self, folder: Path) -> None:
        self._blocks, self._embedding, self._norm, self._head = self._read(folder)

    def _read(self, folder: Path) -> tuple[list[tuple[Tensor | None, ...]], Tensor, Tensor, Tensor]:
        weights = read_weights(folder)
        hidden, width = self._hidden, self._width
        # transformers turns dimension i with i + width/2; with the pairs side by side a turn is one complex product.
        # Queries and keys are permuted alike, so their products do not change.
        pairs = torch.arange(width).view(2, width // 2).T.reshape(-1)

        def take(name: str, *shape: int) -> Tensor:
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise ModelError(f"model {folder}: weight {name} {found}; expected shape {shape}")
            return tensor.to(self._device, self._dtype)

        def bias(name: str, size: int) -> Tensor | None:
            return take(name, size) if name in weights else None

        def rotated(tensor: Tensor, heads: int) -> Tensor:
            return tensor.unflatten(0, (heads, width))[:, pairs].flatten(0, 1)

        blocks: list[tuple[Tensor | None, ...]] = []
        query, key = self._heads * width, self._kv_heads * width
        for index in range(self._layers):
            at, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            q, k, v = (
                take(f"{at}{name}_proj.weight", rows, hidden) for name, rows in (("q", query), ("k", key), ("v", key))
            )
            biases = [bias(f"{at}{name}_proj.bias", rows) for name, rows in (("q", query), ("k", key), ("v", key))]
            q_bias, k_bias, v_bias = biases
            qkv_bias = None
            if q_bias is not None and k_bias is not None and v_bias is not None:
                qkv_bias = torch.cat([rotated(q_bias, self._heads), rotated(k_bias, self._kv_heads), v_bias])
            norms = [f"{at}{name}_norm.weight" for name in "qk"]
            q_norm, k_norm = (take(name, width)[pairs] if name in weights else None for name in norms)
            inner = weights[f"{mlp}gate_proj.weight"].shape[0] if f"{mlp}gate_proj.weight" in weights else 0
            gate, up = take(f"{mlp}gate_proj.weight", inner, hidden), take(f"{mlp}up_proj.weight", inner, hidden)
            blocks.append(
                (
                    take(f"model.layers.{index}.input_layernorm.weight", hidden),
                    torch.cat([rotated(q, self._heads), rotated(k, self._kv_heads), v]),
                    qkv_bias,
                    q_norm,
                    k_norm,
                    take(f"{at}o_proj.weight", hidden, query),
                    bias(f"{at}o_proj.bias", hidden),
                    take(f"model.layers.{index}.post_attention_layernorm.weight", hidden),
                    torch.cat([gate, up]),
                    take(f"{mlp}down_proj.weight", hidden, inner),
                )
            )
        embedding = take("model.embed_tokens.weight", self.vocab, hidden)
        tied = self._tied or "lm_head.weight" not in weights
        head = embedding if tied else take("lm_head.weight", self.vocab, hidden)
        return blocks, embedding, take("model.norm.weight", hidden), head

    def reserve(self, rows: int, length: int) -> None:
        kept_rows, kept = min(rows, self._keys.shape[1]), min(length, self._keys.shape[-1])
        keys = self._keys.new_zeros(self._layers, rows, self._kv_heads, self._width, length)
        values = self._values.new_zeros(self._layers, rows, self._kv_heads, length, self._width)
        keys[:, :kept_rows, ..., :kept] = self._keys[:, :kept_rows, ..., :kept]
        values[:, :kept_rows, :, :kept] = self._values[:, :kept_rows, :, :kept]
        self._keys, self._values = keys, values
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        self._turns = torch.polar(torch.full_like(angles, self._rope_scale), angles).to(self._device)

    @torch.inference_mode()
    def extend(self, first: int, tokens_BM: Tensor, offsets_B: Tensor, take_B: Tensor) -> Tensor:
        B, M = tokens_BM.shape
        heads, kv_heads, width = self._heads, self._kv_heads, self._width
        positions_BM = offsets_B[:, None] + torch.arange(M, device=self._device)
        T = int(offsets_B.max()) + M
        # One additive mask serves every layer: [B * kv_heads, queries of a kv head, T].
        hidden_BMT = torch.arange(T, device=self._device) > positions_BM[..., None]
        mask_BMT = torch.zeros(B, M, T, dtype=self._dtype, device=self._device).masked_fill_(hidden_BMT, float("-inf"))
        group = heads // kv_heads
        mask = mask_BMT[:, None, None].expand(B, kv_heads, group, M, T).reshape(B * kv_heads, group * M, T)
        turns = self._turns[positions_BM][:, :, None]
        rows = torch.arange(first, first + B, device=self._device)[:, None]
        x = F.embedding(tokens_BM, self._embedding)
        for layer, block in enumerate(self._blocks):
            norm1, qkv, qkv_bias, q_norm, k_norm, out, out_bias, norm2, gate_up, down = block
            assert qkv is not None and out is not None and gate_up is not None and down is not None
            y = F.rms_norm(x, (self._hidden,), norm1, self._eps)
            qkv_BMHD = F.linear(y, qkv, qkv_bias).view(B, M, heads + 2 * kv_heads, width)
            q_k = qkv_BMHD[:, :, : heads + kv_heads]
            if q_norm is not None:
                q = F.rms_norm(q_k[:, :, :heads], (width,), q_norm, self._eps)
                q_k = torch.cat([q, F.rms_norm(q_k[:, :, heads:], (width,), k_norm, self._eps)], 2)
            q_k = _turn(q_k, turns)
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, :, :, positions_BM] = q_k[:, :, heads:]
            values[rows, :, positions_BM] = qkv_BMHD[:, :, heads + kv_heads :]
            q = q_k[:, :, :heads].view(B, M, kv_heads, group, width).permute(0, 2, 3, 1, 4)
            q = q.reshape(B * kv_heads, group * M, width)
            k = keys[first : first + B].flatten(0, 1)[..., :T]
            v = values[first : first + B].flatten(0, 1)[:, :T]
            scores = torch.baddbmm(mask, q, k, alpha=width**-0.5)
            a = torch.bmm(torch.softmax(scores, -1), v).view(B, kv_heads, group, M, width)
            a = a.permute(0, 3, 1, 2, 4).reshape(B, M, heads * width)
            x = x + F.linear(a, out, out_bias)
            y = F.rms_norm(x, (self._hidden,), norm2, self._eps)
            gate, up = F.linear(y, gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        x_BH = x[:, 0] if M == 1 else x[torch.arange(B, device=self._device), take_B]
        x_BH = F.rms_norm(x_BH, (self._hidden,), self._norm, self._eps)
        return F.linear(x_BH, self._head).float()

    def move(self, source: int, target: int, length: int) -> None:
        self._keys[:, target, ..., :length] = self._keys[:, source, ..., :length]
        self._values[:, target, :, :length] = self._values[:, source, :, :length]

    def read(self, row: int, length: int) -> Any:
        return self._keys[:, row, ..., :length].clone(), self._values[:, row, :, :length].clone()

    def write(self, row: int, cached: Any) -> None:
        keys, values = cached
        length = keys.shape[-1]
        self._keys[:, row, ..., :length] = keys
        self._values[:, row, :, :length] = values


class TransformersDecoder:
    """Any causal LM whose state is keys and values, through its own forward and a cache that writes at given positions."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self.vocab: int = config.get_text_config().vocab_size
        self.context = _context(config.get_text_config())
        self._cache = _slot_cache(config.get_text_config().num_hidden_layers, device)
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
        picked: Tensor = logits_BMV[torch.arange(B, device=self._device), take_B]
        return picked.float()

    def move(self, source: int, target: int, length: int) -> None:
        self.write(target, self.read(source, length))

    def read(self, row: int, length: int) -> Any:
        return [layer.read(row, length) for layer in self._cache.layers]

    def write(self, row: int, cached: Any) -> None:
        for layer, part in zip(self._cache.layers, cached, strict=True):
            layer.write(row, *part)


def _slot_cache(layers: int, device: str) -> Any:
    """A transformers Cache whose layers write where `aim` says and return the rows in use."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False

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
            self.rows = torch.arange(first, first + len(positions), device=device)[:, None]

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

    return Cache(layers=[SlotLayer() for _ in range(layers)])


def _is_llama_shaped(config: Any) -> bool:
    return (
        (config.architectures or [""])[0] in LLAMA_SHAPED
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and (config.rope_parameters or {}).get("rope_type") in STATIC_ROPES
        and getattr(config, "quantization_config", None) is None
    )


def _context(config: Any) -> int:
    """Positions the model has, or fewer where some layer sees a window: inside the window all attention is the same."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None) or 2048
    return min(longest, windowed) if windowed else int(longest)


def _rope(config: Any, width: int) -> tuple[Tensor, float]:
    """Inverse frequencies and the scale of cos and sin; types other than default come from transformers itself."""
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    return frequencies.float(), float(scale)


def _turn(q_k: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(q_k.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(q_k.dtype)
