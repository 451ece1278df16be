"""GrammarChecker: whether a grammar can be decoded under, found out beside the server and remembered.

Driven by policy/decoding.py. Grammars come from agents, and the library has neither a bound of time nor of its stack: each
is compiled first in a child process (rendering/grammar_check.py), which may end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from hashlib import blake2b

from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON
from agentlightning.rendering.grammar import GrammarError
from agentlightning.rendering.grammar_check import MAX_CPU_S, TOO_LONG
from agentlightning.runtime.children import inheritable

MAX_CHECKED = 256
"""Grammars whose check is remembered, those asked for last."""
MAX_WAIT_S = 10.0
"""Of a call, for the checks of others: several attempts with large grammars that are all new."""


class GrammarChecker:
    """Checks grammars, each once, one at a time; attempts take turns."""

    def __init__(self, max_wait_s: float = MAX_WAIT_S, max_checked: int = MAX_CHECKED) -> None:
        self._max_checked = max_checked
        self._max_wait_s = max_wait_s
        self._said: OrderedDict[bytes, str | None] = OrderedDict()
        self._one = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the child; a check under way refuses its grammar."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            if not self._one.locked():  # else who waits for its answer closes it
                child.communicate()

    async def check(self, spec: JSON, field: str, turn: asyncio.Lock) -> None:
        """Raises GrammarError where no completion can be decoded under the grammar, and ApiError where its check had to wait
        for too long. `turn` is the attempt's."""
        key = blake2b(spec["lark"].encode(), digest_size=16).digest()
        if key not in self._said:
            try:
                async with asyncio.timeout(self._max_wait_s) as waiting, turn, self._one:
                    waiting.reschedule(None)
                    if key not in self._said:
                        self._said[key] = await asyncio.to_thread(self._refusal, spec["lark"])
            except TimeoutError:
                raise _busy(field) from None
        self._said.move_to_end(key)
        while len(self._said) > self._max_checked:
            self._said.popitem(last=False)
        if (said := self._said[key]) is not None:
            raise GrammarError(field, said)

    def _refusal(self, lark: str) -> str | None:
        child = self._child = self._child or _start()
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):  # it was killed: there is no answer then
            child.stdin.write(json.dumps(lark).encode() + b"\n")
            child.stdin.flush()
        answer = child.stdout.readline()
        if answer:
            said: str | None = json.loads(answer)
            return said
        self._child = None
        child.communicate()
        if child.returncode == -TOO_LONG:
            return f"the grammar takes more than {MAX_CPU_S:g} s to compile; expected a smaller one"
        return "the grammar is too large or too deep to compile; expected a smaller one"


def _busy(field: str) -> ApiError:
    return ApiError(
        f"{field}: its grammar is new, and the checks of other new ones took too long; try again",
        status=503,
        type="server_error",
        code="grammar_not_checked",
        retry_after_s=1,
    )


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agentlightning.rendering.grammar_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=inheritable(os.environ),
        start_new_session=True,
    )
