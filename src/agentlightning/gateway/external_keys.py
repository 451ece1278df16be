"""ExternalKeys: to which hosts the server sends which variables of its environment, as its operator says.

A run names a variable (``key_env``) and a URL; without this list whoever may write to a run could have any variable of the
server sent to a URL of theirs. Asked when such a resource is stored through the API, and when it is used, since a store may
hold older ones. Knows no values of variables.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from agentlightning.errors import ConfigError
from agentlightning.records import Resource
from agentlightning.store.server_keys import is_loopback

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9A-Fa-f:]+\](:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class ExternalKeys:
    """By variable, the hosts that may get its value, in lower case: ``host`` over https, or at this machine; ``host:port``
    also in plain text. Others get nothing."""

    hosts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def refusal(self, variable: Any, urls: Iterable[Any]) -> str | None:
        """The reason why the value of `variable` is not sent to one of these URLs; None where it may be."""
        if variable is None:
            return None
        allowed = self.hosts.get(variable, frozenset()) if isinstance(variable, str) else frozenset[str]()
        for url in urls:
            if not allowed & _names(url):
                return (
                    f"key_env: the operator of this server does not let {str(variable)[:80]!r} be sent to "
                    f"{_shown(url)}; list it in the file of: agl serve --external-keys"
                )
        return None

    def refusal_of(self, resource: Resource) -> str | None:
        """The same for a resource: an external model, or a policy with its endpoints."""
        if resource.kind not in ("external", "policy"):
            return None
        endpoints = resource.value.get("endpoints")
        urls = [resource.value.get("url")] if resource.kind == "external" else endpoints
        found = self.refusal(resource.value.get("key_env"), urls if isinstance(urls, list) else [urls])
        return None if found is None else f"{resource.kind} {resource.name!r}: {found}"


def external_keys(pairs: Iterable[str]) -> ExternalKeys:
    """Of ``VARIABLE=HOST``, as the options of a server process give them. Raises ConfigError.

    >>> external_keys(["OPENAI_API_KEY=api.openai.com"]).refusal("OPENAI_API_KEY", ["https://API.openai.com/v1"])
    """
    hosts: dict[str, frozenset[str]] = {}
    for pair in pairs:
        variable, _, host = pair.partition("=")
        if not _VARIABLE.fullmatch(variable) or variable.startswith("AGL_") or not _HOST.fullmatch(host):
            raise ConfigError(f"--external-keys: expected a variable and a host or host:port, got {pair[:120]!r}")
        hosts[variable] = hosts.get(variable, frozenset()) | {host.lower()}
    return ExternalKeys(hosts)


def read_file(path: Path) -> list[str]:
    """``VARIABLE=HOST`` for each entry of a TOML file: ``OPENAI_API_KEY = ["api.openai.com"]``. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as cause:
        raise ConfigError(f"--external-keys: {path} cannot be read: {cause}") from None
    for variable, hosts in table.items():
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ConfigError(f"--external-keys: {path}: {variable}: expected a list of hosts")
    return pairs_of(table)


def pairs_of(hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """``VARIABLE=HOST`` for each host of each variable."""
    return [f"{variable}={host}" for variable, listed in hosts.items() for host in listed]


def host_of(url: str) -> str:
    """The host of a URL, with its port where the URL names one or is no https: what the list of an operator has.

    >>> host_of("https://API.openai.com/v1"), host_of("http://127.0.0.1:8000/v1"), host_of("http://models.lan/v1")
    ('api.openai.com', '127.0.0.1:8000', 'models.lan:80')
    """
    parts = urlsplit(url)
    port = 80 if parts.port is None and parts.scheme == "http" else parts.port
    host = _bare(parts)
    return f"{host}:{port}" if host and port is not None else host


def _bare(parts: SplitResult) -> str:
    return f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""


def _names(url: Any) -> set[str]:
    """The entries that allow this URL: its host with its port, and its host alone where nobody else reads what is sent."""
    try:
        parts = urlsplit(url)
        host = _bare(parts)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except (AttributeError, TypeError, ValueError):
        return set()
    if not host:
        return set()
    private = parts.scheme == "https" or is_loopback(parts.hostname or "")
    return {f"{host}:{port}", host} if private else {f"{host}:{port}"}


def _shown(url: Any) -> str:
    try:
        return repr(host_of(url)[:120])
    except (AttributeError, TypeError, ValueError):
        return "what is no URL"
