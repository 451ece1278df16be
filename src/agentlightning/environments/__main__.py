"""``python -m agentlightning.environments NAME …``: an environment's tasks, made and checked by the Python that has it.

Prints one JSON object: rows by split and warnings, or the error; what the environment prints goes to the standard error.
With --play, a person or a model plays a task instead. Exit code 0, or 2 with an error.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import httpx
import orjson

from agentlightning.environments.base import Split, close_environment, episode_result, open_environment, task_rows
from agentlightning.environments.checks import check_openings, check_outcome, check_rows, openings, tool_call
from agentlightning.environments.local_model import local_models
from agentlightning.errors import AgentLightningError, DataError
from agentlightning.records import JSON
from agentlightning.runner.failure import at_line
from agentlightning.runtime.children import end_with_parent


def main() -> int:
    """Make the tasks of an environment, or play one; returns the exit code."""
    options = _parser().parse_args()
    if options.play is not None:
        try:
            print(orjson.dumps(asyncio.run(_play(options))).decode())
        except KeyboardInterrupt:
            return 130
        except Exception as cause:
            sys.stderr.write(f"error: {_sentence(options.name, cause)}\n")
            return 2
        return 0
    end_with_parent()
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what the environment prints is no part of the answer
        try:
            answer = asyncio.run(_tasks(options))
        except Exception as cause:
            kind = type(cause).__name__ if isinstance(cause, AgentLightningError) else "DataError"
            answer = {"error": kind, "message": _sentence(options.name, cause)}
        out.write(orjson.dumps(answer))
    return 2 if "error" in answer else 0


def _sentence(name: str, cause: Exception) -> str:
    """The failure in a sentence, with the line of the environment's own code that raised."""
    if not isinstance(cause, AgentLightningError):
        return f"env {name}: {type(cause).__name__}: {cause}{at_line(cause)}"
    said = str(cause)
    return f"env {name}: {said.removeprefix('env: ')}" if said.startswith("env: ") else said


async def _tasks(options: argparse.Namespace) -> JSON:
    environment = open_environment(options.name)
    try:
        limits: dict[Split, int] = {"train": options.train, "val": options.val}
        rows = {split: task_rows(environment, split, limit, options.seed) for split, limit in limits.items() if limit}
        if options.openings:
            return {"rows": rows, "openings": await openings(environment, rows["train"])}
        warnings: list[str] = []
        if options.train and options.val:
            rows["train"], warnings = check_rows(rows["train"], rows["val"])
        train = rows.get("train") or rows.get("val") or []
        if getattr(environment, "remote_agent", False):
            warnings.append("its agent asks from inside a container: tasks were not opened to compare them")
            return {"rows": rows, "warnings": warnings}
        warnings += await check_openings(environment, train, rows.get("val", []))
        if options.episode:
            warnings += await check_outcome(environment, train[0])
        return {"rows": rows, "warnings": warnings}
    finally:
        close_environment(environment)


async def _play(options: argparse.Namespace) -> JSON:
    """One task, each turn on the screen; returns its outcome."""
    environment = open_environment(options.name)
    shown = 0
    unanswered: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def answer(request: JSON) -> JSON:
        try:
            return await reply(request)
        except Exception as cause:
            if not unanswered.done():
                unanswered.set_exception(DataError("nobody answers") if isinstance(cause, EOFError) else cause)
            return {"role": "assistant", "content": ""}

    async def reply(request: JSON) -> JSON:
        nonlocal shown
        messages = request["messages"]
        for message in messages[shown:]:
            print(f"{message['role']:>9}  {message.get('content') or message.get('tool_calls')}")
        for tool in request.get("tools", ()) if not shown else ():
            print(f"     tool  {tool['function']['name']} {orjson.dumps(tool['function']['parameters']).decode()}")
        shown = len(messages) + 1
        if options.url is None:
            return _message(request, await asyncio.to_thread(input, "      you  "))
        body = request | {"model": options.model}
        async with httpx.AsyncClient(timeout=None) as client:
            answered = await client.post(f"{options.url.rstrip('/')}/chat/completions", json=body)
        answered.raise_for_status()
        message = answered.json()["choices"][0]["message"]
        print(f"assistant  {message.get('content') or message.get('tool_calls')}")
        return {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}

    try:
        rows = task_rows(environment, "train", options.play + 1, options.seed)
        if len(rows) <= options.play:
            raise DataError(f"env: has no task {options.play}, only {len(rows)}")
        async with local_models() as model:
            playing = asyncio.ensure_future(environment.play(rows[options.play], model(answer)))
            both: set[asyncio.Future[Any]] = {playing, unanswered}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if unanswered.done():
                playing.cancel()
                await asyncio.wait({playing})
                unanswered.result()
            return asdict(episode_result(playing.result()))
    finally:
        close_environment(environment)


def _message(request: JSON, line: str) -> JSON:
    """The message of a person: a call, where the line is a tool's name and its arguments as JSON, else words."""
    name, _, arguments = line.strip().partition(" ")
    if any(tool["function"]["name"] == name for tool in request.get("tools", ())):
        with suppress(orjson.JSONDecodeError):
            return tool_call(request, name, orjson.loads(arguments or "{}"))
    return {"role": "assistant", "content": line}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentlightning.environments")
    parser.add_argument("name")
    parser.add_argument("--train", type=int, default=0, help="training tasks, at most")
    parser.add_argument("--val", type=int, default=0, help="held-out tasks, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--openings", action="store_true", help="show what each training task begins with")
    parser.add_argument("--episode", action="store_true", help="also play one to its end")
    parser.add_argument("--play", type=int, metavar="NUMBER", help="play this training task")
    parser.add_argument("--url", help="base URL of the model that plays; without it a person does")
    parser.add_argument("--model", default="default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
