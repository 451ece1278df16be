"""Call chains: a recorded call with those that it continues, and the messages that they hold together. Pure.

The light core reads records with it: nothing here imports what only an extra brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentlightning.records import JSON, Call, with_completion


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
