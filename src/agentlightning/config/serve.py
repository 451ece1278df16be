"""Settings of a served model: the tables ``[serve]`` of a run's record and ``routes`` of its resource.

The gateway reads both, `agl serve --policy` writes them. Knows nothing of requests and of weights.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from agentlightning.config.base import Table, matching
from agentlightning.config.canary import CanaryConfig

ROUTES_RESOURCE = "routes"
"""Name of the resource of a run that says which version a new session gets."""

Weight = Annotated[float, Field(ge=0, le=1)]


class HeaderRoute(Table):
    """A header of requests that chooses the canary, whatever its weight."""

    name: str = Field(min_length=1)
    value: str


class RoutesConfig(Table):
    """The versions of the model that new sessions get, by number."""

    stable: int = Field(ge=1)
    canary: int | None = Field(None, ge=1)
    weight: Weight = 0.0
    """Share of new sessions that get the canary."""
    header: HeaderRoute | None = None
    shadow: Weight = 0.0
    """Share of new sessions whose calls the canary gets copies of: nobody gets its completions."""
    rule: CanaryConfig | None = None
    """Rules by which the canary is promoted or rolled back. None: a person decides."""
    reason: dict[str, Any] = Field(default_factory=dict)
    """The decision that made these routes, and the numbers on which it rests."""

    @model_validator(mode="after")
    def _check_canary(self) -> RoutesConfig:
        sessions = bool(self.weight or self.header is not None or self.rule is not None)
        if self.canary is None and (sessions or self.shadow):
            raise ValueError("weight, header, rule and shadow: have no effect without canary")
        if self.shadow and sessions:  # a copy would wait in the engine's queue before a user's call
            raise ValueError("shadow: conflicts with weight, header and rule, of a canary that answers users itself")
        return self


class ServeConfig(Table):
    """The way that users are served, and what is kept of what they say."""

    model: str = Field("", max_length=100)
    """Name of the registered model; its versions are policies such as ``support-40``."""
    idle_s: float = Field(1800.0, ge=1, le=7 * 86_400)
    """Seconds without a call after which a session has ended."""
    record: bool = False
    """Keep the texts and tokens of calls; else they are counted alone, and nothing can be learned from them."""
    redact: Annotated[str, matching(r"[\w./-]+:\w+", "file.py:function or module:function")] | None = None
    """Function that takes what is to be kept of a call and returns it without what must not be kept."""
    keep_days: float | None = Field(None, gt=0)
    """Days after which the calls and feedback texts of ended sessions are deleted; None: never."""

    @model_validator(mode="after")
    def _check_record(self) -> ServeConfig:
        for name in ("redact", "keep_days"):
            if not self.record and getattr(self, name) is not None:
                raise ValueError(f"{name}: has no effect without record = true")
        return self
