"""A model call that fails ends the program of a page: a reward of 0 for it would be learned from."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from apart import CONFLICTING, NODE, need_node, stand_apart
from pages import page

pytestmark = [pytest.mark.slow, pytest.mark.long]

ERROR = {"message": "n: not supported here", "type": "invalid_request_error", "param": "n", "code": "unsupported"}


class Refusing(BaseHTTPRequestHandler):
    """Refuses every request, in a form that OpenAI's SDKs do not retry."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps({"error": ERROR}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


PATIENT = {"mini-swe-agent"}
"""Try again for minutes, whatever the error is."""


@pytest.mark.parametrize("name", sorted({*CONFLICTING, *NODE} - PATIENT))
async def test_a_call_that_is_refused_fails_the_program(tmp_path: Path, refusing: str, name: str) -> None:
    (need_node if name in NODE else stand_apart)(tmp_path, name)
    page(name).write(tmp_path)
    (tmp_path / "task.json").write_text(page(name).files["tasks.jsonl"].splitlines()[0], encoding="utf-8")
    variables = {"OPENAI_BASE_URL": refusing, "OPENAI_API_KEY": "key", "AGL_MODEL": "policy", "AGL_TASK": "task.json"}
    process = await asyncio.create_subprocess_exec(
        *shlex.split(page(name).option("--agent") or ""),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode != 0, out.decode(errors="replace")
