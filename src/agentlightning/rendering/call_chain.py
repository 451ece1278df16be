"""Call chains: a recorded call with those that it continues, and the messages that they hold together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from agentlightning.prefill import with_completion
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.request_view import RequestView
from agentlightning.types import JSON, Call


def call_chain(call: Call, by_id: Mapping[str, Call]) -> list[Call]:
    """The call and those that it continues, oldest first; `is_whole` says whether all of them are known."""
    chain = [call]
    while (parent := by_id.get(chain[-1].parent_id or "")) is not None:
        chain.append(parent)
    return chain[::-1]


def is_whole(chain: Sequence[Call]) -> bool:
    """True where no call of the chain is missing."""
    return chain[0].parent_id is None


def chain_messages(chain: Sequence[Call]) -> list[JSON]:
    """All messages of a chain, from the first to the completion of its last call."""
    return with_completion(chain_prompt(chain), chain[-1].completion)


def chain_prompt(chain: Sequence[Call]) -> list[JSON]:
    """The messages of the prompt of a chain's last call."""
    *before, last = chain
    return [message for call in before for message in with_completion(call.messages, call.completion)] + last.messages


def chain_prompt_ids(chain: Sequence[Call]) -> list[int]:
    """The ids of the prompt of a chain's last call."""
    before = [index for call in chain[:-1] for index in (*call.suffix_ids, *call.sampled_ids)]
    return [*before, *chain[-1].suffix_ids]


def chain_tools(chain: Sequence[Call]) -> list[JSON] | None:
    """The tools that were offered to the chain's last call."""
    return next((call.tools for call in reversed(chain) if call.tools is not None), None)


def continued_tools(messages: list[JSON], calls: Sequence[Call]) -> list[JSON] | None:
    """The tools of that recorded conversation which the messages repeat furthest; None where it has none, and where they
    repeat none."""
    conversation = Conversation(None, calls)
    offered = {orjson.dumps(call.tools): call.tools for call in calls if call.policy and call.parent_id is None}
    known = [(conversation.known(RequestView.of(messages, tools)), tools) for tools in offered.values()]
    longest, found = max(known, key=lambda pair: pair[0], default=(0, None))
    return found if longest else None
