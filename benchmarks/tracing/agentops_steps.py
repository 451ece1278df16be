"""Steps of the same agent in AgentOps's environment, with AgentOps or without: a block for each line on standard input.

Driven by benchmarks/tracing.py: ``agentops_steps.py on|off URL``, where URL is the receiver that takes the spans. AgentOps
is set up as its documentation says, with one trace a block, as there is one attempt a block at ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("OPENAI_API_KEY", "none")

import steps  # noqa: E402 (AgentOps 0.4.21 fails to instrument LangGraph that is imported after it: a circular import)


def main() -> None:
    switch, receiver = sys.argv[1:]
    if switch == "off":
        for line in sys.stdin:
            answer(asyncio.run(steps.time_block(json.loads(line), steps.execute)))
        return
    import agentops
    from agentops.sdk.decorators import tool

    agentops.init(
        api_key="00000000-0000-0000-0000-000000000000",
        endpoint=receiver,
        exporter_endpoint=f"{receiver}/v1/traces",
        auto_start_session=False,
        log_level="CRITICAL",
        log_session_replay_url=False,
    )
    execute = tool(steps.execute)
    for line in sys.stdin:
        trace = agentops.start_trace("block")
        answer(asyncio.run(steps.time_block(json.loads(line), execute)))
        agentops.end_trace(trace, "Success")
    agentops.tracer.provider.force_flush()
    os._exit(0)  # its metrics go to a host that is not there


def answer(figures: dict[str, float]) -> None:
    print(f"figures {json.dumps(figures)}", flush=True)


main()
