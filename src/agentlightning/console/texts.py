"""Texts: token ids of a run as text, by the policy's tokenizer where this host can load it, else as numbers.

Driven by the reader. The tokenizer comes from the folder or the files that the policy's resource names, as gateways load it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentlightning.console.conversation import token_text
from agentlightning.errors import AgentLightningError
from agentlightning.records import Call
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from agentlightning.rendering.renderer import Renderer

LOAD_TIMEOUT_S = 20.0


class Texts:
    """Texts of one tokenizer's tokens."""

    def __init__(self, renderer: Renderer | None, note: str) -> None:
        self._renderer = renderer
        self.note = note
        """The source of the texts, or the reason why there are none."""

    def token(self, index: int) -> str:
        """The text of one token."""
        if self._renderer is None:
            return f"{index} "
        return token_text(self._renderer.token_text(index), self._renderer.pieces([index])[0])

    def decode(self, ids: list[int]) -> str:
        """The text of several, special tokens written out."""
        if self._renderer is None:
            return "".join(f"{index} " for index in ids)
        return self._renderer.decode(ids, special=True)


class Tokenizers:
    """Loads the tokenizers of policies, each once."""

    def __init__(self, store: LightningStore) -> None:
        from agentlightning.gateway.policy.renderers import Renderers

        self._store = store
        self._renderers = Renderers(store)

    def close(self) -> None:
        """Removes files that were fetched from the store."""
        self._renderers.close()

    async def texts(self, call: Call) -> Texts:
        """Texts for the tokens of a call."""
        found = await self._store.resources(call.run_id, call.policy or None)
        value = next((one.value for one in found if one.kind == "policy" and one.name == call.policy), None)
        if value is None or not value.get("tokenizer"):
            return Texts(None, "token ids, since the run's record names no tokenizer")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                renderer = await self._renderers.find(call.run_id, value["tokenizer"])
        except (AgentLightningError, TimeoutError) as cause:
            why = str(cause) or f"it did not load within {LOAD_TIMEOUT_S:.0f} s"
            return Texts(None, f"token ids, since the policy's tokenizer cannot be loaded here: {why}")
        return Texts(renderer, "texts by the policy's tokenizer")
