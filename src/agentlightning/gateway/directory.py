"""Directory: which upstream of a run a model name belongs to.

Driven by outside.py for every request, so that a run's upstreams are remembered. They are resources of the run, in the form
of the configuration's ``[upstreams.NAME]`` tables. Knows nothing of requests.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from fnmatch import translate

from agentlightning.config import UpstreamConfig, check_upstreams, is_exact, parse_settings
from agentlightning.errors import ConfigError
from agentlightning.gateway.news import News
from agentlightning.protocols.neutral import Refusal
from agentlightning.store.base import LightningStore
from agentlightning.types import Resource

UPSTREAMS_AGE_S = 5.0
"""Another server may change a run's upstreams: they are read again after this long, where no news come."""

MOST_RUNS = 256
"""Runs whose upstreams are remembered."""


@dataclass(frozen=True, slots=True)
class OutsideModel:
    """The upstream behind a model name."""

    name: str
    settings: UpstreamConfig


class Directory:
    """The upstreams of all runs."""

    def __init__(self, store: LightningStore, news: News) -> None:
        self._store = store
        self._news = news
        self._known: dict[str, _Upstreams] = {}
        self._forgotten = 0
        """How often something was: what was read while something was is not remembered."""

    def forget(self, run_id: str) -> None:
        """The upstreams of this run changed."""
        self._known.pop(run_id, None)
        self._forgotten += 1

    async def find(self, run_id: str, model: str) -> OutsideModel | None:
        """The upstream that `model` belongs to, None where the policy answers. Raises Refusal where one is misconfigured."""
        known = await self._upstreams(run_id)
        found = known.exact.get(model)
        if found is None:
            found = next((outside for pattern, outside in known.patterns if pattern.match(model)), None)
        return found

    async def names(self, run_id: str) -> list[str]:
        """The models that a run's upstreams have by name; what a pattern stands for is not known here."""
        return list((await self._upstreams(run_id)).exact)

    async def _upstreams(self, run_id: str) -> _Upstreams:
        known = self._known.get(run_id)
        self._news.follow(run_id)
        if known is None or (not self._news.is_followed(run_id) and time.monotonic() - known.read_s > UPSTREAMS_AGE_S):
            forgotten = self._forgotten
            known = _understood(await self._store.resources(run_id))
            if len(self._known) > MOST_RUNS:
                self._known.clear()
            if forgotten == self._forgotten:
                self._known[run_id] = known
        return known


@dataclass(slots=True)
class _Upstreams:
    """Those of one run."""

    read_s: float
    exact: dict[str, OutsideModel] = field(default_factory=dict)
    patterns: list[tuple[re.Pattern[str], OutsideModel]] = field(default_factory=list)
    """Longest first."""


def _understood(resources: list[Resource]) -> _Upstreams:
    """The upstreams among a run's resources. Raises Refusal where one is misconfigured: the calls meant for it would go
    to the policy."""
    policies = [str(name) for one in resources if one.kind == "policy" for name in (one.value.get("model"), one.name)]
    try:
        settings = {
            one.name: parse_settings(UpstreamConfig, one.value, f"upstream {one.name!r}")
            for one in resources
            if one.kind == "upstream"
        }
        check_upstreams(settings, policies)
    except (ConfigError, ValueError) as cause:
        raise Refusal(str(cause), status=502, type="server_error", code="upstream_misconfigured") from cause
    known = _Upstreams(time.monotonic())
    for name, upstream in settings.items():
        outside = OutsideModel(name, upstream)
        known.exact |= {model: outside for model in upstream.models if is_exact(model)}
        known.patterns += [(re.compile(translate(one)), outside) for one in upstream.models if not is_exact(one)]
    known.patterns.sort(key=lambda pair: len(pair[0].pattern), reverse=True)
    return known
