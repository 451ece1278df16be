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
from agentlightning.protocols.sse import MAX_EVENT_BYTES, EventReader, event_too_large
from agentlightning.records import JSON

BLANK_LINE = re.compile(rb"\r?\n\r?\n")
MAX_BLANK_LINE = 4

LAST_EVENTS = frozenset(
    {"message_delta", "message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
"""Types of events from which on nothing is said any more. Chunks of OpenAI's older protocols and of Google's have none: they
end where every choice has a finish reason, or where Google's model declines the prompt."""


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
        self._rest = bytearray()
        """Bytes that came after the last blank line; searched for the next one only where it has not been, and never copied
        whole: one event in many pieces takes time linear in its bytes."""
        self._finished: set[str] = set()
        self.held = bytearray()
        self.ended = False
        self.error: str | None = None
        """The error that the external model sent."""

    def feed(self, chunk: bytes) -> bytes:
        """Take in what came; returns what may go on. Raises EngineError where an event is longer than MAX_EVENT_BYTES."""
        data, position, cut = self._rest, 0, 0 if self.ended else None
        searched = max(0, len(data) - MAX_BLANK_LINE + 1)
        data += chunk
        for match in BLANK_LINE.finditer(data, searched):
            end = match.end()
            self._take(bytes(data[position:end]))
            if self.ended and cut is None:
                cut = position
            position = end
        if len(data) - position > MAX_EVENT_BYTES:
            raise event_too_large()
        if cut is None:
            cut = position
        else:
            self.held += data[cut:position]
        passed_on = bytes(data[:cut])
        del data[:position]
        return passed_on

    def finish(self) -> None:
        """The stream has ended."""
        if self._rest:
            self._take(bytes(self._rest) + b"\n\n")
            self.held += self._rest
            self._rest = bytearray()

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
        choices = data.get("choices") or data.get("candidates")
        if not choices or not isinstance(choices, list):
            kind, feedback = data.get("type"), data.get("promptFeedback")
            declined = isinstance(feedback, dict) and bool(feedback.get("blockReason"))
            return declined or (isinstance(kind, str) and kind in LAST_EVENTS)
        finished = [
            choice
            for choice in choices
            if isinstance(choice, dict) and (choice.get("finish_reason") or choice.get("finishReason"))
        ]
        self._finished |= {str(choice.get("index", 0)) for choice in finished}
        return len(self._finished) >= self._choices


def error_in(data: JSON) -> str | None:
    """The error in a response of status 200, or in an event; None where there is none."""
    error = data.get("error")
    if error is None and data.get("type") == "response.failed" and isinstance(data.get("response"), dict):
        error = data["response"].get("error") or "failed"
    return None if not error else orjson.dumps(error).decode()
