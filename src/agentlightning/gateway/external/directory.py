"""ExternalDirectory: which external model of a run a model name belongs to.

Driven by external/calls.py for every request, so that a run's external models are remembered. They are resources of the
run, in the form of the configuration's ``[external.NAME]`` tables. Knows nothing of requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import translate

from agentlightning.config.external import ExternalModelConfig, check_external_models, is_exact
from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.protocols.base import ApiError
from agentlightning.records import Resource


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """The external model behind a model name."""

    name: str
    settings: ExternalModelConfig


class ExternalDirectory:
    """The external models of all runs."""

    def __init__(self, watcher: ResourceWatcher, keys: ExternalKeys) -> None:
        self._watcher = watcher
        self._keys = keys
        self._known: dict[str, tuple[list[Resource], RunModels]] = {}
        """By run, with the resources that they come from."""

    def forget(self, run_id: str) -> None:
        """The resources of this run changed, or it is not in use any more."""
        self._known.pop(run_id, None)

    async def find(self, run_id: str, model: str) -> ExternalModel | None:
        """The external model that `model` belongs to, None where the policy answers. Raises ApiError where one is
        misconfigured."""
        return (await self.models(run_id)).find(model)

    async def names(self, run_id: str) -> list[str]:
        """The models that a run's external models have by name; what a pattern stands for is not known here."""
        return list((await self.models(run_id)).exact)

    async def models(self, run_id: str) -> RunModels:
        """The external models of a run as they are now. Raises ApiError where one is misconfigured."""
        resources = await self._watcher.resources(run_id)
        known = self._known.get(run_id)
        if known is None or known[0] is not resources:
            known = self._known[run_id] = (resources, _run_models(resources, self._keys))
        return known[1]


@dataclass(slots=True)
class RunModels:
    """The external models of one run."""

    exact: dict[str, ExternalModel] = field(default_factory=dict)
    patterns: list[tuple[re.Pattern[str], ExternalModel]] = field(default_factory=list)
    """Longest first."""

    def find(self, model: str) -> ExternalModel | None:
        """The external model that `model` belongs to."""
        found = self.exact.get(model)
        if found is None:
            found = next((external for pattern, external in self.patterns if pattern.match(model)), None)
        return found


def _run_models(resources: list[Resource], keys: ExternalKeys) -> RunModels:
    """The external models among a run's resources. Raises ApiError where one is misconfigured: the calls meant for it would
    go to the policy."""
    policies = [str(name) for one in resources if one.kind == "policy" for name in (one.value.get("model"), one.name)]
    try:
        settings = {
            one.name: parse_settings(ExternalModelConfig, one.value, f"external model {one.name!r}")
            for one in resources
            if one.kind == "external"
        }
        check_external_models(settings, policies)
        for one in resources:
            if one.kind == "external" and (why := keys.refusal_of(one)) is not None:
                raise ConfigError(why)
    except (ConfigError, ValueError) as cause:
        raise ApiError(str(cause), status=502, type="server_error", code="external_misconfigured") from cause
    known = RunModels()
    for name, own in settings.items():
        external = ExternalModel(name, own)
        known.exact |= {model: external for model in own.models if is_exact(model)}
        known.patterns += [(re.compile(translate(one)), external) for one in own.models if not is_exact(one)]
    known.patterns.sort(key=lambda pair: len(pair[0].pattern), reverse=True)
    return known
