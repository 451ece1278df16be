"""Model calls that were recorded as text to `Call` records, conversations and preference pairs. Pure.

The import of traces drives it, and whoever wants rows for another trainer. A call that continues an earlier one is
stored by what that one did not have, as a gateway stores it, so that `rendered` makes one row of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agentlightning.adapters.spans import ModelCall
from agentlightning.prefill import with_completion
from agentlightning.records import JSON, Call, Rollout, Sampling
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_tools
from agentlightning.rendering.graph import answer_digests, chain, root, verbatim

PROTOCOL = "trace"
"""`Call.protocol` of a call that no gateway saw."""


def call_records(
    calls: Iterable[ModelCall], rollout: Rollout, attempt: int, call_id: Callable[[int], str]
) -> list[Call]:
    """The calls that can be learned from (`ModelCall.missing`) as records of an attempt.

    call_id: the id of the n-th record, from 0. The policy is '': what an external model answered. Token counts are
    those that the trace tells.
    """
    histories: dict[bytes, Call] = {}
    records: list[Call] = []
    for one in calls:
        if one.missing is not None:
            continue
        assert one.messages is not None  # missing says so
        assert one.completion is not None
        hashes = chain(root(one.tools), [verbatim(message) for message in one.messages])
        place = next((at for at in range(len(hashes) - 1, 0, -1) if hashes[at] in histories), 0)
        parent = histories.get(hashes[place]) if place else None
        completions = answer_digests(one.completion, verbatim)
        history = [chain(hashes[-1], [completion])[-1] for completion in completions]
        record = Call(
            id=call_id(len(records)),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=attempt,
            parent_id=None if parent is None else parent.id,
            suffix_ids=[],
            sampled_ids=[],
            logprobs=[],
            versions=[],
            prompt_tokens=0,
            policy="",
            model=one.model,
            protocol=PROTOCOL,
            sampling=Sampling(),
            history_hash=history[0].hex(),
            request_hash=hashes[-1].hex(),
            messages=one.messages[place:],
            completion=one.completion,
            tools=one.tools if parent is None else None,
            usage=one.usage,
            agent=one.agent,
            finish_reason=one.finish_reason,
            started_ns=one.started_ns,
            finished_ns=one.finished_ns,
            span_id=one.span_id or None,
        )
        for digest in history:
            histories[digest] = record
        records.append(record)
    return records


def full_messages(calls: Sequence[Call]) -> list[tuple[list[JSON], list[JSON] | None]]:
    """The whole prompt of each call, from its parents, and its tools. A parent that is not among them counts as
    empty; one may stand after its child, where it finished later."""
    by_id = {call.id: call for call in calls}
    chains = [call_chain(call, by_id) for call in calls]
    return [(chain_prompt(chain), chain_tools(chain)) for chain in chains]


def conversations(calls: Sequence[Call]) -> list[JSON]:
    """Rows ``{"messages", "tools"?}``, one for each conversation as far as it went, as fine-tuning formats have them.

    A call that another one continues is part of that one's row. Calls (a), (a, b), (c) are rows (a, b) and (c).
    """
    continued = {call.parent_id for call in calls}
    rows = []
    for call, (messages, tools) in zip(calls, full_messages(calls), strict=True):
        if call.id not in continued:
            row: JSON = {"messages": with_completion(messages, call.completion)}
            rows.append(row | ({"tools": tools} if tools else {}))
    return rows


def preference_row(better: Sequence[Call], worse: Sequence[Call]) -> JSON | None:
    """A row ``{"prompt", "chosen", "rejected", "tools"?}`` of messages, as preference trainers take them (TRL's
    DPOTrainer, conversational format): what both rollouts begin with, and how each went on.

    None where a rollout is not one conversation, where they begin otherwise or have other tools, or where they went the
    same way.
    """
    rows = [conversations(better), conversations(worse)]
    if any(len(of_rollout) != 1 for of_rollout in rows):
        return None
    first, second = rows[0][0]["messages"], rows[1][0]["messages"]
    shortest = min(len(first), len(second))
    shared = next((place for place in range(shortest) if first[place] != second[place]), shortest)
    # The first thing that the model said is where it may differ: an equal beginning of completions is prompt, too.
    if not shared or shared == shortest or {first[shared]["role"], second[shared]["role"]} != {"assistant"}:
        return None
    tools = rows[0][0].get("tools")
    if tools != rows[1][0].get("tools"):
        return None
    row: JSON = {"prompt": first[:shared], "chosen": first[shared:], "rejected": second[shared:]}
    return row | ({"tools": tools} if tools else {})
