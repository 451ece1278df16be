"""Decoding: what is done to the logits of one call, from the request to the engine's parameters and to the record.

Driven by policy/calls.py. A grammar is made of the request (rendering/grammar.py) and compiled once in a child process; what
the run's engine cannot account for in learning is refused, or left out and recorded, as the run says. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import orjson
from cachetools import LRUCache

from agentlightning.errors import AgentLightningError
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.protocols import fields
from agentlightning.protocols.base import ApiError, CompletionRequest, short
from agentlightning.records import JSON, Call, Sampling, prefill_of
from agentlightning.rendering.grammar import MAX_CPU_S, TOO_LONG, GrammarError, make_grammar
from agentlightning.rendering.renderer import Renderer

MAX_NAMED = 20
"""Fields that an error names with their values; a request may have thousands."""

MAX_HEADER_BYTES = 1024
"""Bound of the header that names dropped fields: clients and proxies take headers of some thousand bytes in all."""


def unsupported_error(unsupported: JSON, refused: Mapping[str, str]) -> ApiError:
    """The refusal of all these fields: those that a setting lets a run ignore, and those that nothing makes it serve, which
    say why."""
    sentences = [f"{name}: {why}" for name, why in list(refused.items())[:MAX_NAMED]]
    if unsupported:
        verb, they, them = ("is", "it", "it") if len(unsupported) == 1 else ("are", "they", "them")
        sentences.append(
            f"{_named(unsupported)} {verb} not supported, because {they} would change what the trained policy reads or "
            f'samples; leave {them} out, or let the run ignore {them} (agent.unsupported_params = "drop")'
        )
    fields = (*refused, *unsupported)
    return ApiError("; ".join(sentences), param=fields[0], code="unsupported_value", fields=fields)


def _named(given: JSON) -> str:
    named = ", ".join(f"{name}: {short(given[name])}" for name in list(given)[:MAX_NAMED])
    return f"{named} and {len(given) - MAX_NAMED} more" if len(given) > MAX_NAMED else named


def ignored_header(names: Iterable[str]) -> bytes:
    """The value of the header that names dropped fields; safe in a header whatever the names hold, and bounded.

    >>> ignored_header(["top_k", "a, b\\r\\nX: y"])
    b'top_k, a%2C b%0D%0AX: y'
    """
    value = b""
    for name in names:
        safe = b"".join(_safe(char) for char in name)
        if len(value) + len(safe) + len(b", , ...") > MAX_HEADER_BYTES:
            return value + (b", " if value else b"") + b"..."
        value += (b", " if value else b"") + safe
    return value


def _safe(char: str) -> bytes:
    """A character that a header may hold and that does not end a name; others percent-encoded, as in URLs."""
    if " " <= char <= "~" and char not in ",%":
        return char.encode()
    return b"".join(b"%%%02X" % byte for byte in char.encode("utf-8", "replace"))


def trained_cut(attempt: TrackedAttempt, sampling: Sampling) -> float | None:
    """The top_p that the learner cuts by; None where nothing is learned, or where no engine cuts."""
    cuts = attempt.rollout.mode == "train" and sampling.top_p < 1 and sampling.temperature > 0
    return sampling.top_p if cuts else None


log = logging.getLogger(__name__)

BOUNDS = ("min_tokens", "allowed_token_ids", "ignore_eos")
"""vLLM's bounds on the tokens that may be drawn."""

MIN_BIAS = -100.0
"""The lowest `logit_bias` that vLLM takes: at a temperature of 1, a chance of e^-100."""


async def decoding_of(
    request: CompletionRequest,
    policy: Policy,
    prompt: str,
    checker: GrammarChecker,
    attempt: TrackedAttempt,
    overridden_params: JSON,
) -> JSON:
    """Returns the constraints on this call's logits, for its record; {} where there are none. Raises ApiError.

    What cannot be applied goes to `overridden_params`, where the run drops such fields.
    """
    if _only_promises(request) and not _describes_calls(policy):  # nothing is forced: calls are sampled as without it
        request = replace(
            request, grammar={name: part for name, part in request.grammar.items() if name != "tool_call"}
        )
    asked = asked_fields(request)
    if not asked:
        return {}
    _check_bounds(request)
    if policy.structured == "refuse":
        why = "the run's engine cannot account for it in learning; leave it out, or leave it out of training: "
        why += 'agent.unsupported_params = "drop"'
        _refuse_or_drop(policy, overridden_params, asked, why)
        return {}
    if policy.logprobs == "raw" and policy.structured == "mask":
        why = "the engine gives raw log-probabilities, which are not those under it; start vLLM with "
        _refuse_or_drop(policy, overridden_params, asked, why + "--logprobs-mode processed_logprobs")
        return {}
    request = _with_calls(request, policy, overridden_params)
    result: JSON = {}
    if request.grammar:
        try:
            spec = make_grammar(
                request.grammar,
                request.tools,
                policy.renderer.grammar_model,
                prompt=prompt if request.prompt is None and prefill_of(request.messages) is None else None,
                one_call=request.one_tool_call,
            )
            await checker.check(spec, _field(request.grammar), attempt.turn)
            result["grammar"] = spec
        except GrammarError as error:
            _refuse_or_drop(policy, overridden_params, {error.field: request.grammar}, str(error))
    if request.logits:
        stops = (
            {"stop_token_ids": list(request.stop_ids)} if "min_tokens" in request.logits and request.stop_ids else {}
        )
        result["logits"] = {**request.logits, **stops}  # min_tokens forbids what ends a completion
    if policy.structured == "context_only":
        result["untrained"] = True
    return result if result.keys() - {"untrained"} else {}


def recorded(decoding: JSON, digest: str, top_p: float | None, placeholder: int | None = None) -> JSON:
    """`decoding_of` as the call records it: with the digest of what its request asked, by which retries are told apart, the
    rollout's top_p where the learner has to cut by it, and the bias against the placeholder of an image, where the policy
    reads images: a completion that held it could be no part of a later prompt with some."""
    logits = dict(decoding.get("logits", {}))
    if top_p is not None:
        logits["top_p"] = top_p
    if placeholder is not None:
        logits["logit_bias"] = {**logits.get("logit_bias", {}), str(placeholder): MIN_BIAS}
    asked = {"request": digest, **decoding} if decoding else {}
    return {**asked, "logits": logits} if logits else asked


async def with_forced(calls: list[Call], renderer: Renderer) -> list[Call]:
    """The calls with the tokens that their grammars forced, which nothing learns from. Where the engine did not follow the
    grammar there are none: the learner, which rebuilds the masks, says so."""
    return [
        replace(call, decoding={**call.decoding, "forced": spans})
        if (spans := await asyncio.to_thread(_forced, call, renderer))
        else call
        for call in calls
    ]


def _forced(call: Call, renderer: Renderer) -> list[list[int]]:
    try:
        return renderer.grammars.forced(call.decoding["grammar"], call.sampled_ids, call.logprobs)
    except AgentLightningError as error:
        log.warning("call %s: its forced tokens are not known: %s", call.id, error)
        return []


def engine_params(decoding: Mapping[str, Any]) -> JSON:
    """The constraints as the engine's sampling parameters: vLLM's names."""
    params: JSON = dict(decoding.get("logits", {}))
    if "grammar" in decoding:
        params["structured_outputs"] = {"grammar": decoding["grammar"]["lark"]}
    return params


def request_digest(request: CompletionRequest) -> str:
    """Tells requests apart that differ in what they ask of decoding alone; '' where one asks nothing."""
    if not asked_fields(request):
        return ""
    data = orjson.dumps([request.grammar, request.logits], option=orjson.OPT_SORT_KEYS)
    return blake2b(data, digest_size=16).hexdigest()


def asked_fields(request: CompletionRequest) -> JSON:
    """The fields that ask for something, with what they ask."""
    return {**{part["field"]: part for part in request.grammar.values()}, **request.logits}


def _with_calls(request: CompletionRequest, policy: Policy, overridden_params: JSON) -> CompletionRequest:
    """The request with a grammar that leaves the choice to call a tool where the agent does: a form of the answer is one of
    the answer, not of the calls before it."""
    content = request.grammar.get("content")
    free = request.tools and request.parse_tools and "tool_call" not in request.grammar
    if content is None or content["kind"] == "lark" or not free:
        return request
    if not _describes_calls(policy):
        why = "the model's way of writing tool calls is not known, so a form of the answer would forbid them; "
        _refuse_or_drop(policy, overridden_params, {content["field"]: content}, why + "set tool_choice to none")
        return replace(request, grammar={})
    optional = {"required": False, "names": None, "field": content["field"]}
    return replace(request, grammar={**request.grammar, "tool_call": optional})


def _describes_calls(policy: Policy) -> bool:
    """False for a policy whose calls of tools no grammar can describe, or account for in learning."""
    unlearned = policy.logprobs == "raw" and policy.structured == "mask"
    return policy.structured != "refuse" and not unlearned and policy.renderer.grammar_model.syntax is not None


def _check_bounds(request: CompletionRequest) -> None:
    """Refuse bounds on tokens that cannot hold together with what else the request says."""
    given = request.logits
    bounds = [name for name in BOUNDS if name in given]
    if bounds and request.grammar:
        raise fields.refused(
            bounds[0], f"not together with {_field(request.grammar)}, under which no token might be left"
        )
    if "min_tokens" not in given:
        return
    if request.stop or (request.one_tool_call and request.parse_tools):
        raise fields.refused("min_tokens", "not together with stop strings or a single tool call; give stop_token_ids")
    if request.max_tokens is not None and given["min_tokens"] > request.max_tokens:
        raise fields.expected(f"at most max_tokens ({request.max_tokens})", given["min_tokens"], "min_tokens")


def _only_promises(request: CompletionRequest) -> bool:
    """True where all that the request says of calls is that their tools are `strict`."""
    calls = request.grammar.get("tool_call")
    return calls is not None and calls["field"].endswith(".strict")


def _field(grammar: Mapping[str, Any]) -> str:
    return str(next(iter(grammar.values()))["field"])


def _refuse_or_drop(policy: Policy, overridden_params: JSON, given: JSON, why: str) -> None:
    if policy.unsupported_params == "drop":
        overridden_params |= given
        return
    [*names] = given
    prefix = "" if why.startswith(tuple(names)) else f"{', '.join(names)}: "
    raise ApiError(prefix + why, param=names[0], code="unsupported_value")


# --- grammars -----------------------------------------------------------------------------------------------------------

MAX_CHECKED = 256
"""Grammars whose check is remembered, those asked for last."""
MAX_WAIT_S = 10.0
"""Of a call, for the checks of others: several attempts with large grammars that are all new."""


class GrammarChecker:
    """Compiles grammars in a child process, one at a time, and caches the verdict; attempts take turns.

    Grammars come from agents, and the library bounds neither time nor its stack: a child may end of one.
    """

    def __init__(self, max_wait_s: float = MAX_WAIT_S, max_checked: int = MAX_CHECKED) -> None:
        self._max_wait_s = max_wait_s
        self._verdicts: LRUCache[bytes, str | None] = LRUCache(max_checked)
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
        if key not in self._verdicts:
            try:
                async with asyncio.timeout(self._max_wait_s) as waiting, turn, self._one:
                    waiting.reschedule(None)
                    if key not in self._verdicts:
                        self._verdicts[key] = await asyncio.to_thread(self._refusal, spec["lark"])
            except TimeoutError:
                raise _busy(field) from None
        if (said := self._verdicts[key]) is not None:
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
        [sys.executable, "-P", "-m", "agentlightning.rendering.grammar"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")},
        start_new_session=True,
    )
