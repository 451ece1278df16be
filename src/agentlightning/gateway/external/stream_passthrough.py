"""StreamPassthrough: a stream of an external model on its way to the agent, cut where its answer ends. Pure: bytes in,
bytes out.

Driven by external/client.py. An agent that has read the end of an answer may finish, and the call must be durable by then:
what comes before the end goes on at once and as it is, the end is held. Knows of the protocols only what their ends look
like.
"""

from __future__ import annotations

import re

import orjson

from agentlightning.protocols.base import CompletionReader
from agentlightning.protocols.sse import EventReader
from agentlightning.types import JSON

BLANK_LINE = re.compile(rb"\r?\n\r?\n")

LAST_EVENTS = frozenset(
    {"message_delta", "message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
"""Types of events from which on nothing is said any more. Chunks of OpenAI's older protocols have none: they end where every
choice has a finish reason."""


class StreamPassthrough:
    """One stream; `choices` is how many answers it has. An event that the network cut waits for its other half.

    >>> relay = StreamPassthrough(chat.reader(), 1)  # doctest: +SKIP
    >>> relay.feed(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\\n\\ndata: [DO')  # doctest: +SKIP
    b'data: {"choices": [{"delta": {"content": "Hi"}}]}\\n\\n'
    """

    def __init__(self, reader: CompletionReader, choices: int) -> None:
        self._reader = reader
        self._choices = choices
        self._events = EventReader()
        self._rest = b""
        self._finished: set[str] = set()
        self.held = b""
        self.ended = False
        self.error: str | None = None
        """The error that the external model sent."""

    def feed(self, chunk: bytes) -> bytes:
        """Take in what came; returns what may go on."""
        data = self._rest + chunk if self._rest else chunk
        position, cut = 0, 0 if self.ended else None
        for match in BLANK_LINE.finditer(data):
            self._take(data[position : match.end()])
            if self.ended and cut is None:
                cut = position
            position = match.end()
        self._rest = data[position:]
        if cut is None:
            return data[:position]
        self.held += data[cut:position]
        return data[:cut]

    def finish(self) -> None:
        """The stream has ended."""
        if self._rest:
            self._take(self._rest + b"\n\n")
            self.held += self._rest
            self._rest = b""

    def _take(self, block: bytes) -> None:
        for text in self._events.feed(block):
            if text == b"[DONE]":
                self.ended = True
                continue
            try:
                data = orjson.loads(text)
            except orjson.JSONDecodeError:
                continue  # for the agent to judge
            if isinstance(data, dict):
                self._reader.event(data)
                self.error = self.error or error_in(data)
                self.ended = self.ended or self.error is not None or self._is_last(data)

    def _is_last(self, data: JSON) -> bool:
        choices = data.get("choices")
        if not choices or not isinstance(choices, list):
            kind = data.get("type")
            return isinstance(kind, str) and kind in LAST_EVENTS
        finished = [choice for choice in choices if isinstance(choice, dict) and choice.get("finish_reason")]
        self._finished |= {str(choice.get("index", 0)) for choice in finished}
        return len(self._finished) >= self._choices


def error_in(data: JSON) -> str | None:
    """The error in a response of status 200, or in an event; None where there is none."""
    error = data.get("error")
    if error is None and data.get("type") == "response.failed" and isinstance(data.get("response"), dict):
        error = data["response"].get("error") or "failed"
    return None if not error else orjson.dumps(error).decode()
