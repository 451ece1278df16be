"""An agent and an environment of Harbor for its tests: one model call, and processes in place of a container.

Each command runs in a mount namespace of its own (`unshare -m`, as root), in which the folders of a container are those of
the trial. No sandbox: for commands that the tests themselves wrote.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

ROOTS = ("app", "logs", "tests", "solution")


class Writer(BaseAgent):
    """Writes the model's reply into hello.txt."""

    @staticmethod
    def name() -> str:
        return "writer"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        body = {
            "model": self.model_name.partition("/")[2],
            "messages": [{"role": "user", "content": instruction}],
        }
        headers = {"authorization": f"Bearer {self.extra_env['OPENAI_API_KEY']}"}
        async with httpx.AsyncClient(timeout=None) as client:
            url = f"{self.extra_env['OPENAI_BASE_URL']}/chat/completions"
            reply = await client.post(url, json=body, headers=headers)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"] or ""
        await environment.exec(f"printf %s {shlex.quote(text)} > hello.txt")


class Broken(Writer):
    """Has no reward file: the verifier's folder cannot be written."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        await environment.exec("rm -r /logs/verifier && touch /logs/verifier")


class Processes(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "processes"

    @property
    def capabilities(self) -> Any:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="agl-harbor-processes-"))
        for folder in (*ROOTS, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / folder).mkdir(exist_ok=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    async def upload_file(self, source_path: Any, target_path: Any) -> None:
        self._here(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir: Any, target_dir: Any) -> None:
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: Any, target_path: Any) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir: Any, target_dir: Any) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> Any:
        mounts = [f"mkdir -p /{root} && mount --bind {shlex.quote(str(self.root / root))} /{root}" for root in ROOTS]
        script = " && ".join([*mounts, f"cd {shlex.quote(cwd or '/app')}", f"exec bash -c {shlex.quote(command)}"])
        process = await asyncio.create_subprocess_exec(
            *("unshare", "-m", "sh", "-c", script),
            env={**os.environ, **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode)

    def _here(self, path: Any) -> Path:
        parts = Path(str(path)).parts[1:]
        return self.root.joinpath(*parts) if parts and parts[0] in ROOTS else Path(str(path))
