"""The server: one token for every request, stamped with the version of the weights; --refuse and --stall name a route that
fails or never answers."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import tempfile
from pathlib import Path
from typing import Any

import uvicorn
from agentlightning_vllm.fetch import fetch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm.entrypoints.launchers import launcher


class Server:
    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._version = "default"
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if path == self._given.stall:
            await asyncio.Event().wait()
        if path == self._given.refuse:
            return JSONResponse({"error": "out of memory"}, status_code=500)
        body: Any = await request.json() if request.method == "POST" else {}
        match path:
            case "/pause":
                self._resumed.clear()
            case "/resume":
                self._resumed.set()
            case "/collective_rpc":
                assert not self._resumed.is_set()
                assert (Path(body["kwargs"]["folder"]) / "model.safetensors").is_file()
            case "/update_weights":
                assert not self._resumed.is_set()
                update = body["update_info"]
                with tempfile.TemporaryDirectory() as place:
                    for name, expected in update["files"].items():
                        await asyncio.to_thread(
                            fetch, f"{update['url']}/{name}", Path(place) / name, expected, update.get("key", "")
                        )
                    assert list(update["files"]) == ["model.safetensors"]
            case "/update_weight_version":
                self._version = body["new_version"]
            case "/inference/v1/generate":
                await self._resumed.wait()
                version = {"version": self._version, "start": 0, "end": 1}
                return JSONResponse({"choices": [{"token_ids": [7], "weight_versions": [version]}]})
        return JSONResponse({"success": True, "weight_version": self._version})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--middleware")
    parser.add_argument("--refuse")
    parser.add_argument("--stall")
    given, _ = parser.parse_known_args()
    module, _, name = given.middleware.rpartition(".")
    routes = [Route("/{path:path}", Server(given).answer, methods=["GET", "POST"])]
    app = Starlette(routes=routes)
    app.add_middleware(getattr(importlib.import_module(module), name))
    listener = launcher.create_server_socket(("127.0.0.1", 0), reuse_port=False)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
