"""A server's files: its key, which clients of the same user on the same machine find by themselves, and its lock.

A server without AGL_SERVER_KEY makes a key once and keeps it in a file that only its owner can read. While it serves it
holds a lock on a file named by its port, which says at which address it listens and where that key is: so no key is sent to
a program that took the port of a server that ended, or that port of another loopback address.

ServerLock: an SQLite file has one server at a time. Two would each give up leases that the other knows to be held, and
notify nobody of the other. Programs that look or change something once (`agl runs list`) need no lock: SQLite has its own.
The kernel releases a lock when its process ends, however it ends. Knows neither attempts nor HTTP.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.runtime.children import SERVER_END_S
from agentlightning.store.urls import sqlite_file

KEY_VARIABLE = "AGL_SERVER_KEY"
MAX_KEY_BYTES = 4096
LOCK_TRIES = 10
LOCK_PAUSE_S = 0.02
SERVER_LOCK_PAUSE_S = 0.1
NOTICE_S = 5.0  # time for a server whose parent was killed to notice, and to say that it ends


@functools.lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """True for an address, or the name of one, of this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("::ffff:127.0.0.1"), is_loopback("localhost")
    (True, True, True, True)
    >>> is_loopback("0.0.0.0"), is_loopback("::"), is_loopback("localhost.example.com"), is_loopback("127.0.0.1.nip.io")
    (False, False, False, False)
    """
    if address == "localhost" or address.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def client_key(url: str) -> str | None:
    """The key for the server at this URL: that of AGL_SERVER_KEY, else the one of a server of this user on this machine."""
    return os.environ.get(KEY_VARIABLE) or find_key(url)


def find_key(url: str) -> str | None:
    """The key of the server that serves at this URL now, where this user started it on this machine; else None."""
    found = _find(url)
    if found is None or not _leads_to(found.host, found.address):
        return None
    return _read(found.key_file)


def find_key_file(url: str) -> Path | None:
    """The file of that key, whichever address of this machine the URL names."""
    found = _find(url)
    return None if found is None else found.key_file


@dataclass(frozen=True, slots=True)
class _Found:
    """A server that is published for the port of a URL."""

    host: str  # the URL's
    address: str  # the one that the server listens at
    key_file: Path


def _find(url: str) -> _Found | None:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.hostname is None or not is_loopback(parts.hostname):
        return None
    try:
        descriptor = os.open(_folder() / str(port), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            address, _, path = file.read(MAX_KEY_BYTES).strip().partition("\n")
        else:
            return None  # its server has ended: the port may be anybody's
    return _Found(parts.hostname, address, Path(path)) if path and Path(path).exists() else None


def _leads_to(host: str, address: str) -> bool:
    """True where the host leads to the listener at the address only: the other addresses of this machine are anybody's.

    >>> _leads_to("127.0.0.1", "127.0.0.1"), _leads_to("127.9.9.9", "0.0.0.0"), _leads_to("::1", "::")
    (True, True, True)
    >>> _leads_to("127.9.9.9", "127.0.0.1"), _leads_to("::1", "127.0.0.1"), _leads_to("::1", "0.0.0.0")
    (False, False, False)
    """
    try:
        bound = ipaddress.ip_address(address)
        places = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}  # a name may have several
        ips = [ipaddress.ip_address(place) for place in places]
    except (OSError, ValueError):
        return False
    if bound.is_unspecified:
        return all(ip.is_loopback and ip.version == bound.version for ip in ips)
    return all(ip == bound for ip in ips)


@contextmanager
def published(address: str, port: int, key_file: Path) -> Iterator[None]:
    """Let clients find the key file of the server that listens there, as long as this lasts. Does nothing where files
    cannot be locked, or another server of the same port number is published."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a home that cannot be written: clients need the key by AGL_SERVER_KEY
            stack.enter_context(_published(address, port, key_file))
        yield


@contextmanager
def _published(address: str, port: int, key_file: Path) -> Iterator[None]:
    _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    place = _folder() / str(port)
    while True:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
            # Whoever ended just now may have removed the file after it was opened.
            if place.exists() and os.path.samestat(place.stat(), os.fstat(descriptor)):
                break
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        file.truncate()
        file.write(f"{address}\n{key_file.resolve()}\n")
        file.flush()
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def _lock(descriptor: int) -> None:
    """Lock it; OSError where another server has. A client that looks has it for a moment, too."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(LOCK_PAUSE_S)


def _folder() -> Path:
    return _states() / "servers"


def _states() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "agentlightning"


def key_path(store_url: str) -> Path:
    """The file of a store's server key: beside an SQLite file, else in the user's folder for states."""
    file = sqlite_file(store_url)
    return _states() / "server-key" if file is None else Path(f"{file}.server-key")


def load_or_create_key(path: Path) -> str:
    """The key in the file, which is made where it does not exist. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        # The name appears with the whole key, or not at all: a half one would be every later start's error.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for this user alone
        try:
            key = f"sk-agl-server-{secrets.token_urlsafe(32)}"
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(key + "\n")
                file.flush()
                os.fsync(descriptor)
            try:
                os.link(temporary, path)
            except FileExistsError:  # somebody else made one meanwhile
                return _read(path)
        finally:
            os.unlink(temporary)
    except OSError as cause:
        raise ConfigError(
            f"{path}: the server key cannot be kept there ({cause.strerror}); set {KEY_VARIABLE}"
        ) from cause
    return key


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{path}: the server key belongs to another user; remove the file or set {KEY_VARIABLE}")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{path}: the server key can be read by others; remove the file, so that a new key is made, or, if "
                f"nobody has read it, run: chmod 600 {path}"
            )
        key = file.read(MAX_KEY_BYTES).strip()
    if not key:
        raise ConfigError(f"{path}: expected the server key, found nothing; remove the file, so that a new key is made")
    return key


class ServerLock:
    """``with`` around serving the store at `url`; does nothing for stores that several servers may use. ConflictError where
    another process serves the file. One that is about to end, as the server of a run that was killed is, is waited for."""

    def __init__(self, url: str) -> None:
        self._file = sqlite_file(url)
        self._held: int | None = None

    def __enter__(self) -> Self:
        if self._file is None:
            return self
        path = f"{self._file.resolve()}.server-lock"  # beside the file itself: links to it name the same store
        try:
            held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as cause:
            if not os.path.lexists(path):
                return self  # where no file can be made there is no store either: opening it says why
            raise StoreError(
                f"{path}: cannot be opened ({cause.strerror}), and tells whether another server serves the store; make it "
                "this user's"
            ) from cause
        try:
            self._wait(held)
        except BaseException:
            os.close(held)
            raise
        self._held = held
        self._say("serves")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)  # the file stays: one that is removed could be locked by two who opened it before and after

    def ending(self) -> None:
        """Tell who wants to serve the file next that it is worth waiting."""
        self._say("ends")

    def _wait(self, held: int) -> None:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pid, _, state = os.pread(held, 100, 0).decode(errors="replace").strip().partition(" ")
                if time.monotonic() - began > (NOTICE_S if state == "serves" else SERVER_END_S):
                    raise ConflictError(
                        f"{self._file}: process {pid} serves it already, and an SQLite file has one server; end that one, "
                        "or start `agl serve` once and give its URL to each run (--server http://127.0.0.1:8088), or give "
                        "this run a store of its own (--store sqlite:///OTHER.db)"
                    ) from None
            except OSError as cause:
                raise StoreError(
                    f"{self._file}: cannot be locked ({cause.strerror}); SQLite needs a local disk, so choose another path"
                ) from cause
            time.sleep(SERVER_LOCK_PAUSE_S)

    def _say(self, state: str) -> None:
        if self._held is not None:
            os.pwrite(self._held, f"{os.getpid()} {state:7}\n".encode().ljust(32), 0)
