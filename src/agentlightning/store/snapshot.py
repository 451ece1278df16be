"""Snapshots: a whole store of one moment as one file, and back, by each database's own means.

Driven by `agl store backup` and `restore`. SQLite writes its file itself (VACUUM INTO) while the store is in use; PostgreSQL
has pg_dump and pg_restore, Redis `redis-cli --rdb` and, for the way back, a server of its own over the file, from which keys
are copied. Passwords go by the environment: all users of a machine see arguments. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.runtime.disk import PRIVATE_FILE, sync
from agentlightning.store.sqlite_file import sqlite_file

if TYPE_CHECKING:
    from redis import Redis


Kind = Literal["sqlite", "postgresql", "redis"]
FILES: dict[Kind, str] = {"sqlite": "store.db", "postgresql": "store.dump", "redis": "store.rdb"}
LOCK_TIMEOUT_S = 60.0
START_S = 600.0
"""Seconds that Redis may take to read its file."""
MAX_KEYS = 200
"""Keys that are copied in one round trip."""
SQLITE_ENDS = ("", "-wal", "-shm", "-journal")
"""Of the names of the files of an SQLite store: a log that lies beside a restored file would be replayed over it."""


def kind_of(url: str) -> Kind:
    """ConfigError where a store at this URL cannot be backed up."""
    scheme = url.partition("://")[0]
    if sqlite_file(url) is not None:
        return "sqlite"
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme.partition("+")[0] in ("redis", "rediss"):
        return "redis"
    raise ConfigError(
        f"store: expected sqlite:///PATH, postgresql://… or redis://…, got a store at {scheme}://; a server's store is "
        "backed up where it is: name its database"
    )


def save(url: str, file: Path) -> None:
    """Write the store to the new file, as it is at one moment; it may be in use. StoreError where that fails."""
    kind = kind_of(url)
    file.touch(PRIVATE_FILE)
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(_file(url), LOCK_TIMEOUT_S)) as connection, _sqlite(url):
            connection.execute("VACUUM INTO ?", [str(file)])
    elif kind == "postgresql":
        place, environment = _postgres(url)
        _run(["pg_dump", "--format=custom", "--no-owner", f"--file={file}", f"--dbname={place}"], environment)
    elif kind == "redis":
        arguments, environment = _redis(url)
        _run(["redis-cli", *arguments, "--rdb", str(file)], environment)
    else:
        assert_never(kind)


def check_empty(url: str) -> None:
    """ConflictError where there is a store at the URL, or something else in its place."""
    from agentlightning.config.run import without_password

    kind = kind_of(url)
    place = without_password(url)
    if kind == "sqlite":
        files = [Path(f"{_file(url)}{end}") for end in SQLITE_ENDS]
        found = next((file for file in files if file.exists()), None)
        taken, place = found is not None, str(found)
    elif kind == "postgresql":
        taken = _postgres_is_taken(url)
    elif kind == "redis":
        taken = bool(_redis_keys(url))
    else:
        assert_never(kind)
    if taken:
        raise ConflictError(f"{place}: there is a store already, which a restore does not replace; name an empty place")


def load(file: Path, url: str, keys: Mapping[str, Any]) -> None:
    """Make the store of a file that `save` wrote, at an empty place. `keys`: what `keys_of` said when it was saved."""
    kind = kind_of(url)
    if kind == "sqlite":
        target = _file(url)
        try:
            half = target.with_name(f"{target.name}.restoring")
            half.unlink(missing_ok=True)
            half.touch(PRIVATE_FILE)
            shutil.copyfile(file, half)
            with half.open("rb") as written:
                os.fsync(written.fileno())
            half.rename(target)
            sync(target.parent)
        except OSError as cause:
            raise StoreError(f"{target}: cannot be written: {cause.strerror or cause}") from cause
    elif kind == "postgresql":
        place, environment = _postgres(url)
        whole = ["--exit-on-error", "--single-transaction", "--no-owner"]
        _run(["pg_restore", *whole, f"--dbname={place}", str(file)], environment)
    elif kind == "redis":
        _load_redis(file, url, keys)
    else:
        assert_never(kind)


def _file(url: str) -> Path:
    found = sqlite_file(url)
    assert found is not None, "only of SQLite stores"
    return found


def keys_of(url: str) -> dict[str, Any]:
    """Says where the keys of a Redis store are in the file of its whole server; nothing for other stores."""
    if kind_of(url) != "redis":
        return {}
    from agentlightning.store.redis.address import Address

    address = Address.at(url)
    return {"prefix": address.prefix, "database": address.database}


@contextlib.contextmanager
def _sqlite(url: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as cause:
        raise StoreError(f"{_file(url)}: cannot be copied: {cause}") from cause


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    if shutil.which(command[0]) is None:
        raise StoreError(
            f"{command[0]} is not installed here; install it (Debian: postgresql-client, redis-tools), or run it where "
            f"it is, and keep what it writes: {' '.join(command)}"
        )
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise StoreError(f"{command[0]} failed: {said[-1000:]}")


def _postgres(url: str) -> tuple[str, dict[str, str]]:
    """The database as its programs take it: without a password, which is in their environment."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url).set(drivername="postgresql")
    password = parsed.password
    parsed = parsed._replace(password=None).difference_update_query(["timeout", "patience", "read_timeout"])
    return parsed.render_as_string(), {} if password is None else {"PGPASSWORD": str(password)}


def _postgres_is_taken(url: str) -> bool:
    from sqlalchemy import inspect

    from agentlightning.store.sql.database import database_at
    from agentlightning.store.sql.tables import metadata

    engine = database_at(url).reader()
    try:
        return bool(set(inspect(engine).get_table_names()) & set(metadata.tables))
    finally:
        engine.dispose()


def _redis(url: str) -> tuple[list[str], dict[str, str]]:
    from agentlightning.store.redis.address import Address

    address = Address.at(url)
    settings = address.connection_settings()
    arguments = ["-h", settings["host"], "-p", str(settings["port"]), "--no-auth-warning"]
    arguments += ["--user", address.user] if address.user else []
    if address.certificates is not None:
        options = {"ssl_ca_certs": "--cacert", "ssl_certfile": "--cert", "ssl_keyfile": "--key"}
        arguments += ["--tls", *[part for name, path in address.certificates.items() for part in (options[name], path)]]
    return arguments, {"REDISCLI_AUTH": address.password} if address.password else {}


def _redis_keys(url: str) -> list[bytes]:
    from agentlightning.store.redis.address import Address

    with _redis_client(url) as client:
        return list(client.scan_iter(match=_pattern(Address.at(url).tag), count=1000))


def _pattern(tag: str) -> str:
    return "".join(f"\\{letter}" if letter in "{}[]*?\\" else letter for letter in tag) + "*"


def _redis_client(url: str) -> Redis:
    from redis import Redis

    from agentlightning.store.redis.address import Address

    address = Address.at(url)
    return Redis(**address.connection_settings(), ssl=address.certificates is not None)


def _load_redis(file: Path, url: str, keys: Mapping[str, Any]) -> None:
    from redis import Redis, RedisError

    from agentlightning.store.redis.address import Address

    address = Address.at(url)
    if keys["prefix"] != address.prefix:
        raise ConfigError(f"store: prefix: the copy is of a store with ?prefix={keys['prefix']}; name it in the URL")
    database = keys.get("database", address.database)  # backups of earlier versions do not say it
    if shutil.which("redis-server") is None:
        raise StoreError(
            f"redis-server is not installed here, and reads {file}; install it, or stop the server of the URL and start "
            "it with that file as its dump.rdb"
        )
    with tempfile.TemporaryDirectory(prefix="agl-restore-") as folder:
        shutil.copyfile(file, Path(folder) / "dump.rdb")
        socket = f"{folder}/socket"
        options = ["--port", "0", "--unixsocket", socket, "--dir", folder, "--save", "", "--appendonly", "no"]
        server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            source = Redis(unix_socket_path=socket, db=database)
            _wait_for(source, server)
            with source, _redis_client(url) as target:
                if not _copy_keys(source, target, _pattern(address.tag)):
                    raise StoreError(
                        f"{file}: has no key of ?prefix={address.prefix} in database {database}; a backup of an earlier "
                        "version is restored into a database of the number that it was made of"
                    )
        except RedisError as cause:
            raise address.explain(cause) from cause
        finally:
            server.kill()
            server.wait()


def _wait_for(source: Redis, server: subprocess.Popen[bytes]) -> None:
    from redis import exceptions

    deadline = time.monotonic() + START_S
    while True:
        try:
            source.ping()
            return
        except (exceptions.ConnectionError, exceptions.BusyLoadingError) as cause:
            if server.poll() is not None or time.monotonic() > deadline:
                raise StoreError(
                    "redis-server cannot read the copy; see what it says of it: redis-check-rdb"
                ) from cause
            time.sleep(0.05)


def _copy_keys(source: Redis, target: Redis, pattern: str) -> int:
    """Returns how many."""
    names = list(source.scan_iter(match=pattern, count=1000))
    for start in range(0, len(names), MAX_KEYS):
        part = names[start : start + MAX_KEYS]
        with source.pipeline(transaction=False) as reading, target.pipeline(transaction=False) as writing:
            for name in part:
                reading.pttl(name)
                reading.dump(name)
            replies = reading.execute()
            for name, ttl_ms, value in zip(part, replies[::2], replies[1::2], strict=True):
                if value is not None:
                    writing.restore(name, max(0, ttl_ms), value)
            writing.execute()
    return len(names)
