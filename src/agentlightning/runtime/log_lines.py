"""LineFormatter: lines of a log that nobody can forge, and that no terminal obeys.

Driven by the processes that write plain lines: trainer, workers, learner, sampler. What they say quotes agents, models and
other servers. The server's log has a form of its own (gateway/log.py).
"""

from __future__ import annotations

import io
import logging
import sys
import textwrap
from typing import TYPE_CHECKING

from agentlightning.errors import one_line, printable

if TYPE_CHECKING:
    from types import TracebackType


class LineFormatter(logging.Formatter):
    """An event is one line with its control characters escaped; a traceback follows, each line of it indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return following(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return following(super().formatStack(stack_info))


def following(text: str) -> str:
    """Lines that belong to the one before, and cannot be taken for events."""
    return textwrap.indent(printable(text), "    ", lambda line: True)


def line_handler(form: str) -> logging.Handler:
    """Writes such lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    return handler


def replace_unprintable() -> None:
    """Have standard output take what its encoding has not, as replacement characters: a terminal or a pipe need not be
    UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def escape_last_resort() -> None:
    """Have warnings that no handler takes written as such lines; whoever sets handlers up has their own form."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())
