"""A tiny model with sight made on the spot: LLaVA over a fresh Llama and a fresh CLIP vision tower.

The picture example drives it; it knows nothing of tasks or training. What it writes is an ordinary transformers folder
with a processor, so everything that loads a real LLaVA loads this one. The tokenizer comes from tiny_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

IMAGE = "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    side: int = 32,
    patch: int = 16,
    hidden: int = 64,
    layers: int = 2,
    context: int = 256,
    seed: int = 0,
    **text: Any,
) -> int:
    """Writes tokenizer, processor and a LLaVA with random weights to `folder`; returns the number of parameters.

    Pictures are scaled to `side` × `side` pixels, and each patch of `patch` × `patch` becomes one token. text: of
    LlamaConfig. Torch's own random state stays as it was.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = context
    size = {"height": side, "width": side}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    common = {"num_attention_heads": 4, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    config = LlavaConfig(
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            num_key_value_heads=4,
            max_position_embeddings=context,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **{**common, **text},
        ),
        vision_config=CLIPVisionConfig(
            image_size=side, patch_size=patch, num_hidden_layers=2, projection_dim=hidden, **common
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(side // patch) ** 2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, state_dict=_published_names(model))
    return sum(parameter.numel() for parameter in model.parameters())


def _published_names(model: LlavaForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Returns weights under the names of published checkpoints, which vLLM reads; transformers 5 omits `vision_model`."""
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in model.state_dict().items()
    }
