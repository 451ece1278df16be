"""An S3 server on this machine, for tests: moto's, as a process with one bucket, and its credentials as an environment."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

BUCKET = "s3://bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment in which s3:// URLs are of a server that runs until the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Running on" in line)
        (url,) = re.findall(r"http://\S+", line)
        httpx.put(f"{url}/bucket").raise_for_status()
        yield s3_environment(url)
    finally:
        process.kill()
        process.communicate()


def s3_environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
