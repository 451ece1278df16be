"""The address of a Redis store: its URL, what else the URL says, and the server's failures in plain words.

``redis://[user:password@]host[:port][/number]?prefix=NAME``, or rediss:// for TLS. Knows no methods.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis import exceptions

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.urls import seconds_in_url

PORT = 6379
PREFIX = "default"
CONNECT_TIMEOUT_S = 5.0
MAX_OUTAGE_S = 75.0
"""Seconds that an outage may last before callers get an error: a minute, and the time it takes to notice."""

CERTIFICATES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = ("prefix", "appendonly", "appendfsync", "patience", *CERTIFICATES)


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL in parts."""

    host: str
    port: int
    database: int
    user: str | None
    password: str | None
    certificates: dict[str, str] | None
    """None where the connection is not encrypted."""
    prefix: str
    keep: tuple[str, ...]
    """Settings of the server that the user accepts though they can lose data: appendonly=no, appendfsync=everysec…"""
    patience_s: float

    @staticmethod
    def at(url: str) -> Address:
        """Parses a redis:// or rediss:// URL; ConfigError otherwise."""
        parts = urlsplit(url)
        said = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(said) - set(OPTIONS)):
            raise ConfigError(f"store: unknown in a Redis URL: {', '.join(unknown)}; known are {', '.join(OPTIONS)}")
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ConfigError("store: expected redis://[user:password@]host[:port][/number], or rediss:// for TLS")
        try:
            port = parts.port or PORT
        except ValueError as error:
            raise ConfigError(f"store: port: expected a number in a Redis URL: {error}") from None
        prefix = said.get("prefix", PREFIX)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", prefix):
            raise ConfigError(f"store: prefix: expected letters, digits, '.', '_' and '-', got {prefix!r}")
        certificates = {name: said[name] for name in CERTIFICATES if name in said}
        if certificates and parts.scheme == "redis":
            raise ConfigError(f"store: {min(certificates)} is of no use without TLS: write rediss://")
        return Address(
            host=parts.hostname,
            port=port,
            database=_number("the database after the host", parts.path.strip("/") or "0"),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            certificates=certificates if parts.scheme == "rediss" else None,
            prefix=prefix,
            keep=_accepted(said),
            patience_s=seconds_in_url("patience", said.get("patience", MAX_OUTAGE_S)),
        )

    @property
    def name(self) -> str:
        """Its name in sentences: without the password."""
        scheme = "redis" if self.certificates is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database} ({self.prefix})"

    @property
    def tag(self) -> str:
        """The beginning of every key."""
        return "{agl:" + self.prefix + "}"

    def connection_settings(self) -> dict[str, Any]:
        """Settings as redis-py's connections take them."""
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "db": self.database,
            "username": self.user,
            "password": self.password,
        }
        return settings | (self.certificates or {})

    def explain(self, error: Exception) -> StoreError:
        """The sentence for a failure, with where and what to do."""
        said = str(error)
        if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)):
            return StoreError(f"{self.name}: {_REFUSED}")
        for symptom, sentence in _SENTENCES.items():
            if symptom in said:
                return StoreError(f"{self.name}: {sentence}")
        if isinstance(error, exceptions.NoPermissionError):
            return StoreError(f"{self.name}: the user of the URL may not do what a store does; allow it: {said}")
        if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
            reason = said or type(error).__name__
            return StoreError(f"{self.name}: the server cannot be reached; start it, or correct the URL: {reason}")
        return StoreError(f"{self.name}: the server failed: {said}")


_REFUSED = "the server refuses this user and password; correct them in the URL: redis://USER:PASSWORD@HOST"

_SENTENCES = {
    "WRONGPASS": _REFUSED,
    "NOAUTH": _REFUSED,
    "invalid username-password": _REFUSED,
    "MISCONF": "the server cannot write to its disk; free some space there and go on: what was acknowledged is kept",
    "maxmemory": "the server's memory is full; raise its maxmemory or delete runs: what was acknowledged is kept",
    "READONLY": "the server is a read-only replica; give the URL of its primary",
    "read only replica": "the server is a read-only replica; give the URL of its primary",
    "MASTERDOWN": "the server is a replica that has lost its primary; give the URL of the primary, or start that",
    "is busy running a script": "the server is busy with a script of somebody else; end that: redis-cli script kill",
    "DB index": "the server has no database of this number; correct the number after the host",
    "max number of clients": "the server has as many clients as it may; raise its maxclients",
    "LOADING": "the server is still reading its data; try again when it has",
    "loading the dataset": "the server is still reading its data; try again when it has",
    "OVERTAKEN": "the connection broke, and the request arrived after it was given up; try again",
}


def _accepted(said: dict[str, str]) -> tuple[str, ...]:
    expected = {"appendonly": ("off",), "appendfsync": ("everysec", "no")}
    for name, values in expected.items():
        if name in said and said[name] not in values:
            raise ConfigError(f"store: {name}: expected {' or '.join(values)} in a Redis URL, got {said[name]!r}")
    accepted = [f"appendfsync={said['appendfsync']}"] if "appendfsync" in said else []
    return ("appendonly=off", *accepted) if "appendonly" in said else tuple(accepted)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"store: {name}: expected a number in a Redis URL, got {text!r}")
    return int(text)
