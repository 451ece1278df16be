"""Tokenization: texts and conversations as the policy's token ids, and ids as text, as vLLM's routes of these names answer.

Driven by the proxy for ``POST /tokenize`` and ``/detokenize``, also under ``/v1``. The ids are those that a call with the
same prompt or messages would read now, in this attempt: a conversation that continues recorded calls has their very ids.
Nothing is sampled, and nothing recorded.
"""

from __future__ import annotations

import orjson

from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.external.directory import ExternalDirectory
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.policy.calls import PolicyCalls
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.protocols import chat, completions, fields
from agentlightning.protocols.base import ApiError
from agentlightning.protocols.fields import expected
from agentlightning.records import JSON

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"
"""Its routes."""

CHAT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs", "continue_final_message")
"""Fields of a conversation that say what they say in Chat Completions."""

REFUSED = {
    "add_special_tokens": (bool, "expected false: prompts have the special tokens that they are written with, and no more"),
    "chat_template": (str, "expected none: prompts are rendered with the template of the model"),
    "mm_processor_kwargs": (dict, "expected none: images are read with the settings of the model's processor"),
}  # fmt: skip
"""Fields that would ask for other ids than those of calls: kind and why."""

MAX_TOKENS = 1 << 19
"""Ids of one request to be text: all of a server's calls wait for it."""


class Tokenization:
    """Answers for the policies of all runs."""

    def __init__(self, calls: PolicyCalls, engine_router: EngineRouter, external: ExternalDirectory) -> None:
        self._calls = calls
        self._engine_router = engine_router
        self._external = external

    async def answer(self, route: str, data: JSON, attempt: TrackedAttempt, admission: Admission) -> bytes:
        """The body of the response to a request to one of the routes. Raises ApiError and RenderError."""
        policy = await self._policy(data, attempt)
        if route == DETOKENIZE:
            return orjson.dumps({"prompt": policy.renderer.decode(_tokens(data, policy), special=True)})
        named = fields.boolean(data, "return_token_strs")
        ids = await self._prompt_ids(data, attempt, admission)
        affinity = f"{attempt.rollout.id}/{attempt.number}"
        told = {
            "count": len(ids),
            "max_model_len": await self._engine_router.max_model_len(policy, affinity),
            "tokens": ids,
            "token_strs": policy.renderer.pieces(ids) if named else None,
        }
        return orjson.dumps(told)

    async def _policy(self, data: JSON, attempt: TrackedAttempt) -> Policy:
        model = fields.text(data, "model")
        if await self._external.find(attempt.rollout.run_id, model) is not None:
            raise fields.refused("model", "external models are not tokenised; name the policy that is trained")
        return await self._engine_router.policy(attempt.rollout, model)

    async def _prompt_ids(self, data: JSON, attempt: TrackedAttempt, admission: Admission) -> list[int]:
        for name, (kind, why) in REFUSED.items():
            fields.check_kind(data, name, kind)
            if data.get(name):
                raise fields.refused(name, why)
        prompt = fields.optional_text(data, "prompt")
        if (prompt is None) == (data.get("messages") is None):
            raise ApiError("prompt: expected either a text, or messages in its place", param="prompt")
        given = {name: data[name] for name in CHAT_FIELDS if name in data}
        if prompt is not None:
            if not prompt:
                return []
            return await self._calls.prompt_ids(completions, {**given, "prompt": prompt}, attempt, admission)
        continues = fields.boolean(data, "continue_final_message")
        opens = fields.boolean(data, "add_generation_prompt", default=not continues)
        if continues:
            given["add_generation_prompt"] = opens
        return await self._calls.prompt_ids(chat, given, attempt, admission, opens or continues)


def _tokens(data: JSON, policy: Policy) -> list[int]:
    ids, size = fields.token_ids(data, "tokens"), policy.renderer.vocab_size
    if data.get("tokens") is None or len(ids) > MAX_TOKENS or max(ids, default=0) >= size:
        raise expected(f"a list of at most {MAX_TOKENS} token ids, each below {size}", data.get("tokens"), "tokens")
    return ids
