"""AttemptReplay: the completions that the first calls of a forked rollout get from the record of the one that it continues.

Kept by attempts.py and driven by policy/calls.py, for every call of a rollout with a `Rollout.fork`. A call gets a recorded
completion where its request is the recorded one: same messages, tools, decoding, as many tokens of the prompt, and stops and
a bound of tokens under which the completion is the same. The first that is none of those left to replay ends the replay for
good, since the agent is then in a state in which the recorded attempt never was. What was replayed is known from the
attempt's own record, so that any gateway can go on with it. A fork with an answer gives it in the place of the last
completion. Pure: it reads no store.

Calls that external models answered before the place of the fork are answered from the record, too, while the replay goes
on: else a judge or a simulated user would be paid again, and would say something else. One of them that is not there to
replay ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.records import ABANDONED, JSON, Call, Sampling
from agentlightning.store.forks import Choices

log = logging.getLogger(__name__)


class AttemptReplay:
    """The calls of a forked attempt that are still answered from the record."""

    def __init__(self, recorded: Sequence[Choices], answer: JSON | None = None, external: Sequence[Call] = ()) -> None:
        """`recorded`: the calls to replay, in the order in which they began. answer: given in place of the last one.
        external: those of external models that may be replayed, in that order."""
        self._recorded = recorded
        self._external = external
        self._answer = answer
        self._taken: set[str] = set()
        self.ended = False
        """Nothing is answered from the record any more."""

    def see(self, own: Iterable[Call]) -> None:
        """Takes in what the attempt has recorded, through whatever gateway."""
        for call in own:
            if call.policy and call.replayed_id is None:
                self.ended = True
            elif call.replayed_id is not None and call.finish_reason != ABANDONED:
                self._taken.add(call.replayed_id)

    def take(
        self, request_hash: str, decoding: str, prompt_tokens: int, samples: int, fits: Callable[[Call], bool]
    ) -> Choices:
        """Returns the recorded choices of this request, which no other gets from now on; empty where it is to be sampled.
        fits: whether a recorded completion is one of this request in what no hash is of."""
        for choices in self._left:
            call = choices[0]
            same = call.request_hash == request_hash and call.decoding.get("request", "") == decoding
            if same and call.prompt_tokens == prompt_tokens and len(choices) == samples and all(map(fits, choices)):
                self._taken.add(call.id)
                return choices
        self.end("a request is none of them")
        return []

    def end(self, why: str) -> None:
        """From here on the agent is another."""
        if left := len(self._left):
            log.warning("the replay ends with %d calls left: %s", left, why)
        self.ended = True

    def take_external(self, request_hash: str, model: str, protocol: str, sampling: Sampling) -> Call | None:
        """Returns the recorded call of this request to an external model, which no other gets from now on; None where it is
        to be asked."""
        if self.ended:
            return None
        asked = (request_hash, model, protocol, sampling)
        for call in self._external:
            if call.id not in self._taken and (call.request_hash, call.model, call.protocol, call.sampling) == asked:
                self._taken.add(call.id)
                return call
        return None

    def answer_to(self, choices: Choices) -> JSON | None:
        """The answer that is given in the place of these recorded choices, if one is."""
        return self._answer if choices is self._recorded[-1] else None

    def give_back(self, call: Call) -> None:
        """The call failed before it was recorded: its next try gets `call`, with the choices beside it."""
        self._taken.discard(call.id)

    @property
    def _left(self) -> list[Choices]:
        return [] if self.ended else [choices for choices in self._recorded if choices[0].id not in self._taken]


def recorded_tokens(call: Call) -> SampledTokens:
    """The tokens of a recorded completion, as an engine would give them."""
    return SampledTokens(
        ids=list(call.sampled_ids),
        logprobs=list(call.logprobs),
        versions=list(call.versions),
        finish_reason="length" if call.finish_reason == "length" else "stop",
    )
