"""OpenEnv's own checks of captured traces, over our record, and its probe of an endpoint: a program, and what calls it.

Standard input: ``{"calls": [node, …]}`` or ``{"url", "model", "key"}``; output: what OpenEnv finds, as JSON. Its capture
needs none of the servers that its packages import, so empty packages stand in for those: ten seconds of CPU less.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentlightning.adapters.side_calls import side_calls
from agentlightning.records import Call
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_prompt_ids, chain_tools

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients-openenv"


def need_openenv() -> None:
    """Leaves the test out where OpenEnv is not installed."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"needs {ENVIRONMENT.name}: `make clients` installs it")


async def check_record(calls: Sequence[Call]) -> None:
    """OpenEnv finds nothing wrong with what is trained of an attempt, and calls what is not auxiliary, as we do."""
    beside = side_calls(calls).keys()
    whole = await ask({"calls": nodes(calls)})
    assert set(whole["auxiliary"]) == set(beside), whole
    trained = await ask({"calls": nodes([call for call in calls if call.id not in beside])})
    assert trained["findings"] == [], trained
    assert trained["turns"] == len(calls) - len(beside)


def nodes(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The calls in OpenEnv's terms."""
    by_id = {call.id: call for call in calls}
    chains = {call.id: call_chain(call, by_id) for call in calls}
    return [
        {
            "node_id": call.id,
            "prompt_ids": chain_prompt_ids(chains[call.id]),
            "sampled_ids": call.sampled_ids,
            "sampled_logprobs": call.logprobs,
            "model": call.model,
            "finish_reason": call.finish_reason,
            "n_tools": len(chain_tools(chains[call.id]) or ()),
            "request_messages": chain_prompt(chains[call.id]),
            "request_tools": chain_tools(chains[call.id]),
            "response_message": call.completion,
        }
        for call in calls
    ]


async def ask(given: dict[str, Any]) -> dict[str, Any]:
    """What the program says of this."""
    (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(packages / "openenv"), stdin=pipe, stdout=pipe, stderr=pipe, env=dict(os.environ)
    )
    out, err = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, err.decode()[-3000:]
    found: dict[str, Any] = json.loads(out)
    return found


def main(folder: Path) -> None:
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    given = json.load(sys.stdin)
    print(json.dumps(checked(given["calls"]) if "calls" in given else probed(**given)))


def checked(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The findings of all its checks, its roles, and the turns of its training contract."""
    from openenv.core.harness.capture.contract import to_training_trace
    from openenv.core.harness.capture.export import export_session
    from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
    from openenv.core.harness.capture.validate import check_turn

    graph, findings = RolloutGraph(), []
    for index, call in enumerate(calls):
        node = graph.add_turn(TurnNode(**call))
        ids, sampled, logprobs = node.prompt_ids, node.sampled_ids, node.sampled_logprobs
        report = check_turn(ids, sampled, logprobs, finish_reason=node.finish_reason, index=index)
        findings += map(str, report.findings)
    session = SimpleNamespace(session_id="ours", metadata={}, graph=graph, findings=[])
    document = export_session(session)
    rows = document["sequences"]
    findings += [*document["validation"], *(one for row in rows for one in row["validation"] if row["role"] == "agent")]
    return {
        "findings": findings,
        "auxiliary": [name for row in rows if row["role"] == "auxiliary" for name in row["node_ids"]],
        "turns": len(to_training_trace(graph, document).turns),
    }


def probed(url: str, model: str, key: str) -> dict[str, Any]:
    """What its probe of an endpoint says."""
    from openenv.core.harness.capture.validate_llm import validate_llm

    report = validate_llm(url, model, api_key=key)
    told = ("ok", "trainable", "capture_level", "tool_support", "logprobs_mode", "findings", "param_fixes")
    return {name: getattr(report, name) for name in told}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
