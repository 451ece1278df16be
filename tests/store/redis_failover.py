"""A Redis primary, a replica of it and a sentinel over both, all real and on loopback."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from redis import Redis, RedisError
from redis_server import START_S, RedisServer
from reserved_place import reserved_place

SERVICE = "agl"
PASSWORD = "secret"
CONFIG = f"""
bind 127.0.0.1
port {{port}}
dir {{folder}}
logfile {{folder}}/log
sentinel monitor {SERVICE} 127.0.0.1 {{primary}} 1
sentinel auth-pass {SERVICE} {PASSWORD}
sentinel down-after-milliseconds {SERVICE} 500
sentinel failover-timeout {SERVICE} 3000
"""


class RedisFailover:
    """`first` is the primary at the beginning, `second` its replica. With `url`, a store finds whoever is it now."""

    def __init__(self) -> None:
        quick = ("--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self._stack = contextlib.ExitStack()
        self.first = RedisServer(*quick, password=PASSWORD)
        replica = ("--replicaof", "127.0.0.1", str(self.first.port))
        self.second = RedisServer(*quick, *replica, password=PASSWORD)
        self._place = reserved_place()
        self._port = self._place.getsockname()[1]

    def url(self, **options: str) -> str:
        """The URL of a store whose server the sentinel names."""
        given = "&".join(f"{name}={value}" for name, value in options.items())
        return f"redis+sentinel://:{PASSWORD}@127.0.0.1:{self._port}/{SERVICE}/0?{given}"

    def __enter__(self) -> RedisFailover:
        self._stack.enter_context(self.first)
        self._stack.enter_context(self.second)
        folder = Path(tempfile.mkdtemp(prefix="agl-sentinel-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config = folder / "sentinel.conf"
        config.write_text(CONFIG.format(port=self._port, folder=folder, primary=self.first.port))
        process = subprocess.Popen(["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        deadline = time.monotonic() + START_S
        while self._replicas() < 1:
            if time.monotonic() > deadline:
                said = (folder / "log").read_text()
                self._stack.close()
                raise RuntimeError(f"the sentinel does not find the replica: {said[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._place.close()

    def _replicas(self) -> int:
        """How many the sentinel knows."""
        with contextlib.suppress(RedisError), Redis(port=self._port) as sentinel:
            return int(sentinel.info("sentinel")["master0"]["slaves"])
        return 0
