"""The log of the server process: one event a line on standard error, for people in a terminal and as JSON elsewhere.

Set up once by the server process; everything else says what it has to say to `logging`, uvicorn included, and comes out in
the same form. Events that a request caused carry its rollout and attempt. No key is ever written: what looks like one, and
the server's own, is crossed out, also where it came with a path or in the text of an error. Control characters are
escaped.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from agentlightning.errors import ConfigError, one_line
from agentlightning.gateway.attempts import caller
from agentlightning.runtime.log_lines import following

LEVELS = ("debug", "info", "warning", "error", "critical")

KEYS = re.compile(r"\bsk-[A-Za-z0-9_-]{6,}|(?<=\bBearer )[^\s\"'\\]+", re.IGNORECASE)
CROSSED_OUT = "[key]"


def log_level() -> str:
    """The level that AGL_LOG_LEVEL names. Raises ConfigError."""
    level = (os.environ.get("AGL_LOG_LEVEL") or "info").lower()
    if level not in LEVELS:
        raise ConfigError(f"AGL_LOG_LEVEL: expected one of {', '.join(LEVELS)}, got {level!r}")
    return level


def configure(level: str = "info", secrets: Sequence[str] = (), stream: TextIO | None = None) -> None:
    """Send what this process logs from `level` up to `stream` (standard error), without any of `secrets`."""
    out = stream or sys.stderr
    people = out.isatty()
    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        _add_caller,
    ]
    rendering: list[Processor] = [structlog.processors.JSONRenderer()]  # escapes whatever is not printable ASCII
    if people:
        rendering = [_escape, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _drop_colours,
            structlog.processors.format_exc_info,
            *rendering,
            _crosser(secrets),
        ],
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # of other packages only what is wrong
    logging.getLogger("agentlightning").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _add_caller(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    identity = caller.get()
    if identity is not None:
        event["rollout"], event["attempt"] = identity
    return event


def _drop_colours(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """uvicorn says everything twice, once in colours."""
    event.pop("color_message", None)
    return event


def _escape(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """An event is one line, and no terminal obeys it, whatever a path, a header or another server's error says."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = following(value) if name in ("exception", "stack") else one_line(value)
    return event


def _crosser(secrets: Sequence[str]) -> Processor:
    known = [secret for secret in secrets if secret]

    def cross_out(_: WrappedLogger, __: str, rendered: Any) -> str:
        line = str(rendered)
        for secret in known:
            line = line.replace(secret, CROSSED_OUT)
        return KEYS.sub(CROSSED_OUT, line)

    return cross_out
