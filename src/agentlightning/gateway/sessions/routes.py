"""Routes: the version of the model that a new session gets, decided by one pure function.

Driven by sessions.py, once for each session: the decision is recorded on its rollout. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from agentlightning.config.run import parse_settings
from agentlightning.config.serve import RoutesConfig
from agentlightning.errors import ConfigError
from agentlightning.protocols.base import ApiError
from agentlightning.records import Resource, Rollout

Headers = Iterable[tuple[bytes, bytes]]


def choose_version(session_id: str, routes: RoutesConfig, headers: Headers = ()) -> int:
    """The number of the version for a session that begins with these request headers (names in lower case).

    Sticky: the hash of the session's id, as a number in [0, 1), is compared with the canary's weight, so that every
    gateway chooses alike, and a larger weight keeps the sessions that the smaller one chose.

    >>> choose_version("s", RoutesConfig(stable=40)), choose_version("s", RoutesConfig(stable=40, canary=50, weight=1.0))
    (40, 50)
    """
    if routes.canary is None:
        return routes.stable
    wanted = routes.header
    if wanted is not None and (wanted.name.lower().encode(), wanted.value.encode()) in headers:
        return routes.canary
    return routes.canary if chosen_by_weight(session_id, routes) else routes.stable


def chosen_by_weight(session_id: str, routes: RoutesConfig) -> bool:
    """True where the weight alone gives a session the canary, whatever its headers."""
    return _place(session_id) < routes.weight


def is_shadowed(session_id: str, routes: RoutesConfig) -> bool:
    """True where the canary gets copies of the calls of a session, which the stable version answers.

    >>> is_shadowed("s", RoutesConfig(stable=40)), is_shadowed("s", RoutesConfig(stable=40, canary=50, shadow=1.0))
    (False, True)
    """
    return _place(session_id) < routes.shadow


def _place(session_id: str) -> float:
    digest = blake2b(session_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # a float has 53 bits: 1 is never reached


def version_alias(name: str, number: int) -> str:
    """The policy of the serving run that samples a version.

    >>> version_alias("support", 40)
    'support-40'
    """
    return f"{name}-{number}"


def pinned_alias(rollout: Rollout) -> str | None:
    """The policy that answers all calls of a session; None where the rollout is none."""
    if rollout.kind != "session":
        return None
    name, _, number = str(rollout.task["model"]).rpartition("@")
    return version_alias(name, int(number))


def is_served(resources: Sequence[Resource], alias: str) -> bool:
    """True where a run's resources have a policy of this alias that has not been released."""
    return any(one.name == alias and one.kind == "policy" and not one.value.get("released") for one in resources)


def prompts_of(resources: Sequence[Resource], alias: str) -> dict[str, int]:
    """The versions of prompt templates that a served version goes with."""
    return next((dict(one.value.get("prompts") or {}) for one in resources if one.name == alias), {})


def find_routes(resources: Sequence[Resource]) -> RoutesConfig:
    """The routes among a run's resources. Raises ApiError where there are none, or none that can be read."""
    found = next((one for one in resources if one.kind == "routes"), None)
    if found is None:
        raise ApiError("no version of the model is served yet", status=503, type="server_error", code="no_policy")
    try:
        return parse_settings(RoutesConfig, found.value, "routes", ".")
    except ConfigError as cause:
        raise ApiError(str(cause), status=502, type="server_error", code="routes_misconfigured") from cause
