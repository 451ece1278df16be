"""Descriptions of failures in agent code: a traceback of the user's frames, short enough to keep.

Pure functions of exceptions, frames and environments; driven by the worker.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from agentlightning.errors import AgentLightningError, InfrastructureError, VerifierError

MAX_CHARACTERS = 8192
"""Longest error text of an attempt."""

_OURS = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


ADVICE = (
    (
        "Can't patch loop of type",
        'nest_asyncio wants asyncio\'s own event loop: set agent.event_loop = "asyncio", or make the agent a plain function',
    ),
    (
        "event loop is already running",
        "await it, or make the agent a plain function, which runs in a thread without a loop",
    ),
    ("cannot be called from a running event loop", "await it, or make the agent a plain function (def, not async def)"),
    (
        "There is no current event loop in thread",
        "a plain function runs in a thread: call asyncio.run(…), or use async def",
    ),
    (
        "signal only works in main thread",
        "a plain function runs in another thread: make it a program (agent.command)",
    ),
)
"""Remedies for errors that come from the place where agents run, by a part of their text."""


def origin(error: BaseException) -> BaseException:
    """The InfrastructureError or VerifierError that an error is, wraps or was raised while handling; else the error itself:
    frameworks wrap what their tools raise."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, InfrastructureError | VerifierError):
            return one
        if id(one) not in seen:
            seen.add(id(one))
            context = None if one.__suppress_context__ else one.__context__
            grouped = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            left += [linked for linked in (one.__cause__, context, *grouped) if linked is not None]
    return error


def describe(error: BaseException) -> str:
    """The error as text: our own errors by their sentence, others with the frames of the user's files."""
    if isinstance(error, AgentLightningError) and error.__cause__ is None:
        return bounded(str(error))
    try:
        told = traceback.TracebackException.from_exception(error)
        _trim(told)
        text = "".join(told.format()).rstrip()
        advice = [f"\nadvice: {what}" for part, what in ADVICE if part in text][:1]
        return bounded("".join([text, *advice]))
    except BaseException as cause:  # of the user's class, or more causes in a chain than can be followed
        return f"{type(error).__name__}, whose traceback cannot be shown: {type(cause).__name__}"


def interrupted_at(error: BaseException) -> str:
    """Returns where an agent was when `error` was thrown into it, by its frames in the user's files; '' where it has
    none."""
    return bounded("".join(traceback.format_list(_raised_in(error))).rstrip())


def at_line(error: BaseException | None) -> str:
    """`` (at FILE:LINE in NAME)``, of the last frame in the user's files; '' where there is none."""
    frames = [] if error is None else _raised_in(error)
    return f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _raised_in(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's files that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen", *_LIBRARIES))]


def stack(thread: int | None) -> str:
    """Returns where a thread is now, by its frames in the user's files; '' where it is not running."""
    frame: FrameType | None = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return ""
    return bounded("".join(traceback.format_list(_of_user(traceback.extract_stack(frame)))).rstrip())


def bounded(text: str) -> str:
    """At most `MAX_CHARACTERS`: the beginning and, three times as long, the end. Halves of characters
    are replaced: no store has them."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= MAX_CHARACTERS:
        return text
    gap = "\n…\n"
    head = MAX_CHARACTERS // 4
    return text[:head] + gap + text[-(MAX_CHARACTERS - head - len(gap)) :]


def proxy_diagnosis(server_url: str, environment: Mapping[str, str]) -> str | None:
    """The proxy variable that diverts an agent's calls from the server, as a sentence; None where none does."""
    scheme = "https" if server_url.startswith("https") else "http"
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return None
    host = urlsplit(server_url).hostname or ""
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    for entry in (part.strip().lower().lstrip(".") for part in exempt.split(",")):
        if entry and (entry in ("*", host) or host == entry.split(":")[0] or host.endswith(f".{entry}")):
            return None
    return (
        f"{name} is set where the worker runs and NO_PROXY does not name {host}: "
        "the agent's calls may have gone to the proxy"
    )


def _trim(told: traceback.TracebackException) -> None:
    left = [told]  # not by recursion: a loop that wraps its last error makes chains of thousands
    while left:
        one = left.pop()
        one.stack = traceback.StackSummary.from_list(_of_user(one.stack))
        left += [linked for linked in (one.__cause__, one.__context__, *(one.exceptions or ())) if linked is not None]


def _of_user(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames of the user's files and the one where it happened; all but ours where there are none."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    kept = [frame for frame in theirs[:-1] if not frame.filename.startswith(("<frozen", *_LIBRARIES))]
    return [*kept, theirs[-1]] if theirs else list(frames)
