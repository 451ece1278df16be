"""Tokens and prices of recorded calls: what a rollout's calls used, and what external models ask for them.

The check and the comparison of prompts use it. Prices are those of the run's ``[external.NAME]`` tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentlightning.config.external import ExternalModelConfig, find_external
from agentlightning.records import Call


def used_tokens(call: Call) -> tuple[int, int]:
    """Tokens of the prompt and of the completion: recorded ones, else those that an external model reported."""
    reported = [call.usage.get(name) for name in ("prompt_tokens", "sampled_tokens")]
    prompt, sampled = (count if isinstance(count, int) and count > 0 else 0 for count in reported)
    return call.prompt_tokens or prompt, len(call.sampled_ids) or sampled


def external_cost(calls: Iterable[Call], models: Mapping[str, ExternalModelConfig]) -> float | None:
    """US dollars of the calls to external models; None where none of these has a price."""
    asked = [(find_external(models, call.model), call) for call in calls if not call.policy]
    priced = [(model, call) for model, call in asked if model is not None and model.input_cost_per_token is not None]
    return sum(model.cost(*used_tokens(call)) for model, call in priced) if priced else None
