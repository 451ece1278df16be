"""A real vLLM server as a process, for the tests that look at one from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from vllm_house import VllmServer

PYTHON = Path(os.environ.get("AGL_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
START_S = 600.0
KV_BYTES = 128 << 20
PROCESSED = ["--logprobs-mode", "processed_logprobs"]


@contextmanager
def serving(models: list[Path], *options: str, **environment: str) -> Iterator[VllmServer]:
    """Starts vLLM on the first model; ends it with its whole process group, for its workers do not always end with it."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: `make test-vllm` installs vLLM there")
    reserved = reserve()
    port = reserved.getsockname()[1]
    arguments = ["--model", str(models[0]), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", "float32", "--enforce-eager", "--enable-scale-out"]
    arguments += ["--kv-cache-memory-bytes", str(KV_BYTES), *options]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    log = models[0].parent / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env={**os.environ, **settings, "TORCHDYNAMO_DISABLE": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with closing(reserved):
            _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield VllmServer(f"http://127.0.0.1:{port}", models)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reserve() -> socket.socket:
    """A port for a server that binds it by number, half a minute later: nobody else is given it while this is open.

    It does not listen, so that a server that reuses addresses, as nearly every one does, may bind beside it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start within {START_S:.0f} s: {log.read_text()[-3000:]}")
