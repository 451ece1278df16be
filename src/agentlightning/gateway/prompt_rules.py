"""PromptRules: system prompts of agents replaced by templates of their run, before a call is understood.

Driven by the proxy for every call. The rules are those of the run's configuration, the versions those of the rollout: all
calls of an attempt get the same text, and what continues a call still does, since the conversation graph sees the replaced
prompt alone. Knows no wire format (protocols/system_prompts.py does) and no engine.
"""

from __future__ import annotations

from cachetools import LRUCache

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.config.prompts import PromptRuleConfig, PromptsConfig
from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError, InputError
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.protocols.base import ApiError, WireFormat
from agentlightning.protocols.prompt_edits import replace_system
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore
from agentlightning.store.templates import TemplateReader

MAX_RUNS = 1024


class PromptRules:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._templates = TemplateReader(store)
        self.known: LRUCache[str, tuple[PromptRuleConfig, ...]] = LRUCache(MAX_RUNS)
        """Rules of a run, which are fixed for good."""

    async def apply(
        self, wire: WireFormat, data: JSON, attempt: TrackedAttempt, agent: str | None
    ) -> tuple[JSON, JSON]:
        """The request with the system prompt that it is to have, and what the record says of that; {} where no rule is for
        it. Raises ApiError where the rule's template cannot be rendered, and the errors of the store."""
        rules = await self._rules_of(attempt.rollout.run_id)
        rule = next((rule for rule in rules if rule.applies(agent)), None) if agent != JUDGE else None
        if rule is None:
            return data, {}
        name = rule.template
        text = attempt.prompts.get(name)
        if text is None:
            text = attempt.prompts[name] = await self._rendered(name, attempt)
        changed, replaced = replace_system(wire.NAME, data, text)
        if replaced is None:
            return data, {}
        return changed, {"template": name, "version": attempt.rollout.prompts[name], "replaced": replaced}

    async def _rules_of(self, run_id: str) -> tuple[PromptRuleConfig, ...]:
        """The rules of a run, which are fixed for good."""
        if run_id not in self.known:
            found = await self._store.runs([run_id])
            table = found[0].config.get("prompts") if found else None
            try:
                prompts = parse_settings(PromptsConfig, table if isinstance(table, dict) else {}, f"run {run_id}")
            except ConfigError as cause:
                raise _misconfigured(f"prompts: {cause}") from cause
            self.known[run_id] = prompts.rules
        return self.known[run_id]

    async def _rendered(self, name: str, attempt: TrackedAttempt) -> str:
        try:
            return (await self._templates.of(attempt.rollout)).text(name)
        except InputError as cause:
            raise _misconfigured(f"prompts.rules: {cause}") from cause


def _misconfigured(sentence: str) -> ApiError:
    return ApiError(sentence, status=500, type="server_error", code="prompts_misconfigured", final=True)
