"""The official npm packages, under Node, hear what the Python SDKs hear."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sdk_house import CONVERSATION, PARAMETERS, QUESTION, RESULT, THANKS, Place, SdkHouse, check_record

NODE = Path(__file__).parent / "node"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs Node and its packages: `make node-packages` installs them where npm is there",
)


async def run(script: str, places: dict[str, Place]) -> Any:
    """What the script printed; its errors are the test's."""
    given = {
        "places": {name: dataclasses.asdict(place) for name, place in places.items()},
        "question": QUESTION,
        "result": RESULT,
        "thanks": THANKS,
        "parameters": PARAMETERS,
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", script, cwd=NODE, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_openai(sdk_house: SdkHouse) -> None:
    kinds = [
        f"{api} {how}"
        for api in ("chat", "responses", "responses by id", "completions")
        for how in ("whole", "streamed")
    ]
    places = {name: await sdk_house.place() for name in (*kinds, "errors")}
    said = await run("openai.mjs", places)
    for kind in kinds:
        raw = kind.startswith("completions")
        assert said[kind] == ([" sunny, they say."] * 2 if raw else CONVERSATION), kind
        check_record(await sdk_house.calls(places[kind]), turns=2 if raw else 3)
    assert said["errors"] == ["AuthenticationError", "BadRequestError"]
    assert said["models"] == ["policy"]


async def test_anthropic(sdk_house: SdkHouse) -> None:
    kinds = ["messages whole", "messages streamed", "tool runner whole", "tool runner streamed"]
    places = {name: await sdk_house.place() for name in (*kinds, "errors")}
    said = await run("anthropic.mjs", places)
    for kind in kinds:
        turns = 2 if "runner" in kind else 3
        assert said[kind] == CONVERSATION[:turns], kind
        check_record(await sdk_house.calls(places[kind]), turns)
    assert said["counted"] is True
    assert said["error"] == "BadRequestError"


async def test_google(sdk_house: SdkHouse) -> None:
    kinds = ["whole", "streamed"]
    places = {name: await sdk_house.place() for name in kinds}
    said = await run("google.mjs", places)
    for kind in kinds:
        assert said[kind] == CONVERSATION, kind
        check_record(await sdk_house.calls(places[kind]))
    assert said["error"] == 401
    assert said["models"] == ["models/policy"]
    assert said["counted"] > 0
