"""The relay of a stream: nothing is changed, the end is held, whatever the network does and the external model says."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import EngineError
from agentlightning.gateway.external_client import StreamPassthrough
from agentlightning.protocols.base import MAX_EVENT_BYTES
from agentlightning.records import JSON

WORDS = [b'data: {"choices": [{"index": 0, "delta": {"content": "%d"}}]}\n\n' % number for number in range(3)]
END = [
    b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n',
    b'data: {"choices": [], "usage": {}}\n\n',
    b"data: [DONE]\n\n",
]


class Notes:
    """A reader that keeps what it was given."""

    def __init__(self) -> None:
        self.message: JSON = {}
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.events: list[JSON] = []

    def whole(self, body: JSON) -> None:
        self.events.append(body)

    def event(self, data: JSON) -> None:
        self.events.append(data)


def relayed(stream: bytes, cuts: list[int], choices: int = 1) -> tuple[bytes, StreamPassthrough, Notes]:
    notes = Notes()
    relay = StreamPassthrough(notes, choices)
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    went = b"".join(relay.feed(stream[a:b]) for a, b in pairwise(places))
    relay.finish()
    return went, relay, notes


@given(st.lists(st.integers(0, 10_000), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_wherever_the_network_cuts_the_end_is_held_and_no_byte_is_lost(cuts: list[int], line: bytes) -> None:
    words, end = (b"".join(events).replace(b"\n", line) for events in (WORDS, END))
    went, relay, notes = relayed(words + end, cuts)
    assert (went, relay.held, relay.ended) == (words, end, True)
    assert len(notes.events) == len(WORDS) + 2


def test_of_several_choices_the_last_one_to_finish_ends_the_answer() -> None:
    first, second = (END[0].replace(b'"index": 0', b'"index": %d' % index) for index in range(2))
    went, relay, _ = relayed(WORDS[0] + first + WORDS[1] + second, [], choices=2)
    assert (went, relay.held) == (WORDS[0] + first + WORDS[1], second)


def test_one_event_in_a_hundred_thousand_pieces_goes_through() -> None:
    """Time must be linear in the bytes: quadratic, this is more than a hundred gigabytes of copies."""
    event = b"data: " + b"x" * (2 << 20) + b"\n\n"
    notes = Notes()
    relay = StreamPassthrough(notes, 1)
    assert b"".join(relay.feed(event[start : start + 20]) for start in range(0, len(event), 20)) == event


def test_an_event_without_an_end_is_refused() -> None:
    relay = StreamPassthrough(Notes(), 1)
    for _ in range(MAX_EVENT_BYTES // (1 << 20)):
        assert not relay.feed(b"x" * (1 << 20))
    with pytest.raises(EngineError, match=f"an event of more than {MAX_EVENT_BYTES} bytes"):
        relay.feed(b"x")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "choices", "error", "index", "finish_reason", "response"]), inner)
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_an_event_of_any_form_is_no_failure(value: Any) -> None:
    stream = b"data: " + json.dumps(value).encode() + b"\n\n"
    went, relay, _ = relayed(stream, [])
    assert went + relay.held == stream
