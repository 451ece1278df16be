"""Models that the local engine reads in ways of its own, as far as that is known without torch."""

from __future__ import annotations

import json
from pathlib import Path

LLAVA = "LlavaForConditionalGeneration"
"""The architecture whose images the local engine reads. Others with a vision tower are read as text models, where
transformers has a causal LM of them (Gemma 3), and refused where it has none (Qwen2-VL, LLaVA-Next)."""


def reads_images(folder: Path) -> bool:
    """True where the local engine reads the images of the model in a folder."""
    return LLAVA in (json.loads((folder / "config.json").read_text()).get("architectures") or ())
