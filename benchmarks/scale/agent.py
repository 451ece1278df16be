"""The simulated agent of the benchmark of fleets: it thinks, calls the model, thinks, and so on; run by real workers.

Its task says how often and for how long. Each attempt adds a line to the task's log: seconds of its calls through the
gateway, and of one straight to the engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import agentlightning as agl

TIMEOUT_S = 300.0


async def solve(task: dict[str, Any], llm: agl.LLM) -> float:
    draw = random.Random(task["seed"])
    messages = [{"role": "system", "content": task["system"]}, {"role": "user", "content": task["case"]}]
    await asyncio.sleep(draw.uniform(0, 2 * task["think_s"]))
    direct_s, _ = await timed(llm, task["engine"], {"token_ids": [1]})
    through_s = []
    for turn in range(task["turns"]):
        await asyncio.sleep(draw.uniform(0.5, 1.5) * task["think_s"])
        body = {"model": "policy", "messages": messages, "max_tokens": task["max_tokens"]}
        seconds, reply = await timed(llm, f"{llm.base_url}/chat/completions", body)
        through_s.append(seconds)
        said = reply["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then? ({turn})"}]
    note(task["log"], {"direct_s": direct_s, "through_s": through_s})
    return 1.0


def note(log: str, seen: dict[str, Any]) -> None:
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(seen) + "\n")


async def timed(llm: agl.LLM, url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of a request, and its answer."""
    headers = {"authorization": f"Bearer {llm.api_key}"}
    began = time.perf_counter()
    response = await llm.http_client.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - began
    response.raise_for_status()
    return seconds, response.json()
