"""Clients of other model vendors, pointed at the gateway: two turns with a tool, each call continues the one before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sdk_house import CONVERSATION, PARAMETERS, QUESTION, RESULT, THANKS, check_record, open_house

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients-vendors"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").exists(), reason=f"needs {ENVIRONMENT.name}: `make clients` installs it"
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", ["groq", "hugging_face", "together", "mistral"])
async def test_the_client_of_a_vendor_continues_its_calls(client: str, stream: bool, tmp_path: Path) -> None:
    if stream and client == "mistral":
        pytest.skip(
            "its stream demands the name of a tool in every piece of a call, where OpenAI's clients would repeat it"
        )
    async with open_house(tmp_path) as house:
        place = await house.place(lease_s=600.0)
        given = {
            "client": client, "stream": stream, "base_url": place.base_url, "root": place.anthropic_base_url,
            "key": place.key, "question": QUESTION, "result": RESULT, "thanks": THANKS, "parameters": PARAMETERS,
        }  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).parent / "vendor_driver.py"),
            stdin=pipe, stdout=pipe, stderr=pipe,
        )  # fmt: skip
        out, err = await process.communicate(json.dumps(given).encode())
        assert process.returncode == 0, err.decode()[-3000:]
        assert json.loads(out) == [turn["text"] for turn in CONVERSATION]
        check_record(await house.calls(place))
        assert await house.store.spans([place.rollout_id]) == []
