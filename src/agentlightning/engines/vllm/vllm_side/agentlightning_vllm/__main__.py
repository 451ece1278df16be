"""vLLM's server as a child: on a listening socket of its parent's, with a key for what is not sampling, ending with it.

    python -m agentlightning_vllm --fd N [arguments of vLLM's server]

Its parent writes one line of secrets to its standard input, as agentlightning.runtime.children does, and keeps it open.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__" and sys.platform == "linux":
    ctypes.CDLL(None).prctl(
        4, 0, 0, 0, 0
    )  # PR_SET_DUMPABLE, before anything else is imported: nobody else reads its memory

import argparse
import json
import os
import signal
import socket
import threading
import time

from .guard import WeightsGuard

END_S = 10.0
"""Seconds that the server may take to end with its parent; then its whole process group is killed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="agentlightning_vllm", allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the listening socket")
    given, arguments = parser.parse_known_args()
    secrets = _secrets()
    WeightsGuard.key, WeightsGuard.sampling_key = secrets["weights_key"], secrets["sampling_key"]
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    listener = socket.socket(fileno=given.fd)

    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the first log-probabilities take 13 s of compiling
        arguments += ["--enforce-eager"]
    if "--dtype" not in arguments:
        arguments += ["--dtype", "float32" if current_platform.is_cpu() else "bfloat16"]  # as the learner's auto
    launcher.create_server_socket = lambda *_, **__: listener  # vLLM takes a port only, which a restart would lose
    sys.argv = ["agentlightning_vllm", *arguments, "--middleware", "agentlightning_vllm.guard.WeightsGuard"]
    entry.main()


def _secrets() -> dict[str, str]:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit("standard input: expected a line with secrets")
    secrets: dict[str, str] = json.loads(line)
    return secrets


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
