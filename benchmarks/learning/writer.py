"""The writer of prompts in the claim `prompts`: the example's scripted one, with the grammar of `instructed.py`."""

from __future__ import annotations

from pathlib import Path

import instructed

from agentlightning.runtime.code_loader import load_code

EXAMPLE = Path(__file__).parents[2] / "examples" / "optimize" / "scripted.py"
SCRIPTED = load_code(f"{EXAMPLE}:ScriptedOptimiser", "writer")(instructed.GRAMMAR)


async def write(prompt: str, purpose: str, number: int) -> str:
    """The scripted answer to a request."""
    return str(await SCRIPTED(prompt, purpose, number))
