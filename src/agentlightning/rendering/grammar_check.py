"""Checks of grammars, in a process of their own: one that hangs, eats memory or overflows the stack ends nothing else.

    python -m agentlightning.rendering.grammar_check

The gateway drives it (gateway/policy/grammar_checker.py): a grammar's text as a line of JSON in, null or a sentence as a
line of JSON out. A check that takes more than its share of the processor ends the process with `TOO_LONG`. The stack is a
fraction of that of the threads that compile the grammar later, so that what passes here passes there.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import threading

from agentlightning.errors import AgentLightningError
from agentlightning.rendering.grammar import check_grammar, parser_limits

MAX_CPU_S = 2.0
MAX_BYTES = 4 << 30
"""Of address space."""
STACK_BYTES = 2 << 20
STEPS = 3
"""Tokens after which a grammar is taken for one that can be followed."""
TOO_LONG = signal.SIGPROF


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a system without it, or a lower limit of its own
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin.buffer:
        said: list[str | None] = []
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        thread = threading.Thread(target=lambda lark=json.loads(line), to=said: to.append(refusal(lark)))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(said[0]) + "\n")
        sys.stdout.flush()


def refusal(lark: str) -> str | None:
    """The reason why no completion can be decoded under the grammar; None where there is none."""
    try:
        check_grammar({"lark": lark}, "")
    except AgentLightningError as error:
        return str(error).removeprefix(": ")
    return _first_steps(lark)


def _first_steps(lark: str) -> str | None:
    """Follows the grammar over bytes: what allows nothing, or takes too much for a token, shows at its beginning."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    special = re.sub(r"<\[\d+\]>", "<[256]>", lark)  # of the model's vocabulary, which this tokenizer lacks
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(special), log_level=0, limits=parser_limits())
    for _ in range(STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if matcher.is_error():
            return f"no completion can follow the grammar: {matcher.get_error().split(chr(10))[0][:200]}"
        if not mask:
            return None
        matcher.consume_token(mask.bit_length() - 1)
    return None


if __name__ == "__main__":
    main()
