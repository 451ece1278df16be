"""Google's official Python package, in an environment of its own, hears what the other SDKs hear."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from sdk_house import CONVERSATION, PARAMETERS, QUESTION, RESULT, THANKS, SdkHouse, check_record

ENVIRONMENT = Path(__file__).parents[2] / ".venv-frameworks-google"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").exists(), reason="needs google-genai: `make frameworks` installs it"
    ),
]


async def test_google_genai(sdk_house: SdkHouse) -> None:
    places = {name: await sdk_house.place() for name in ("whole", "streamed")}
    given = {
        "places": {name: dataclasses.asdict(place) for name, place in places.items()},
        "question": QUESTION, "result": RESULT, "thanks": THANKS, "parameters": PARAMETERS,
    }  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    driver = Path(__file__).parent / "google_driver.py"
    process = await asyncio.create_subprocess_exec(
        str(ENVIRONMENT / "bin" / "python"), str(driver), stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, err.decode()
    said = json.loads(out)
    for name, place in places.items():
        assert said[name] == CONVERSATION
        check_record(await sdk_house.calls(place))
    assert said["error"] == "UNAUTHENTICATED"
    assert said["models"] == ["models/policy"]
    assert said["counted"] > 0
