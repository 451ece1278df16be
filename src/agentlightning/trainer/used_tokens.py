"""Tokens that recorded calls used. The check, the search for prompts and the comparison of versions count them."""

from __future__ import annotations

from agentlightning.records import Call


def used_tokens(call: Call) -> tuple[int, int]:
    """Tokens of the prompt and of the completion: recorded ones, else those that an external model reported."""
    reported = [call.usage.get(name) for name in ("prompt_tokens", "sampled_tokens")]
    prompt, sampled = (count if isinstance(count, int) and count > 0 else 0 for count in reported)
    return call.prompt_tokens or prompt, len(call.sampled_ids) or sampled
