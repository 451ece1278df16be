"""Weight probe: around each update every sampler scores one row of the step, and so does the learner.

A sampler that goes on with other weights answers all the same, and training on what it samples looks healthy for weeks.
Scored before the update and after the publication, it gives itself away in two ways: it is far from the learner, or it has
not moved where the learner has. The second needs no large difference, so that one step is enough in any number format.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import fmean
from typing import Any

import httpx

from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import EngineError
from agentlightning.gateway.policy.engine_client import GENERATE
from agentlightning.records import JSON
from agentlightning.trainer.monitor.metrics import path_of
from agentlightning.trainer.progress import Progress
from agentlightning.training_types import TrainingSequence

MAX_TOKENS = 2048
"""Longest row that is scored."""
MAX_LOOKED = 64
"""Rows of a step among which the one that costs least is chosen."""
MIN_TRAINED = 16
"""Trained tokens from which on a row says enough."""
MAX_TRIES = 3
TIMEOUT_S = 60.0
"""A busy sampler may let a request wait as long; it is then not checked."""
TOLERANCES = {"float32": 0.005, "bfloat16": 0.2}
"""Largest mean difference of a token's log-probability between sampler and learner, in nats. Both are 10 times and more
what healthy ones differ by."""
MIN_MOVED = 1e-5
"""Mean movement of a token, in nats, by an update that can be told from rounding."""
STALE = 0.05
"""Share of the learner's movement below which a sampler has not moved: rounding adds to a movement, it never undoes one."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Log-probabilities of one row's tokens, each given those before it."""

    row: TrainingSequence
    learner: list[float]
    samplers: dict[str, list[float]]
    """By name of the replica; those that can be asked."""


@dataclass(kw_only=True)
class WeightProbe:
    """Compares the samplers of a run's policies with its learner."""

    engine: Engine
    values: Mapping[str, JSON]
    """Of the policies' resources, by alias."""
    exact: bool
    """Sampler and learner compute in float32."""
    progress: Progress
    transport: httpx.AsyncBaseTransport | None = None
    _silent: set[str] = field(default_factory=set)

    async def before(self, rows: Mapping[str, Iterable[Sequence[TrainingSequence]]]) -> dict[str, RowScores]:
        """Scores of one row of each policy's minibatches, under the weights that are served and not yet updated."""
        found = {
            policy: _row(minibatches) for policy, minibatches in rows.items() if self.values[policy].get("endpoints")
        }
        return {policy: await self._score(policy, row) for policy, row in found.items() if row is not None}

    async def after(self, before: Mapping[str, RowScores], version: int) -> Metrics:
        """Scores the same rows under the version that was just published. EngineError, with one sentence, for a sampler that
        does not have its weights."""
        found: Metrics = {}
        for policy, old in before.items():
            new = await self._score(policy, old.row)
            gaps = [self._gap(f"{policy!r} at {name}", name, old, new, version) for name in new.samplers]
            if gaps:
                found[path_of("policy/weight_gap", policy if len(self.values) > 1 else "")] = max(gaps)
        return found

    def _gap(self, which: str, name: str, old: RowScores, new: RowScores, version: int) -> float:
        """The mean difference of sampler and learner at the row's trained tokens."""
        at = [place for place, trained in enumerate(new.row.mask[:-1]) if trained]

        def mean(one: Sequence[float], other: Sequence[float]) -> float:
            return fmean(abs(one[place] - other[place]) for place in at)

        gap, moved = mean(new.samplers[name], new.learner), mean(new.learner, old.learner)
        own = mean(new.samplers[name], old.samplers[name]) if name in old.samplers else math.inf
        dtype = "float32" if self.exact else "bfloat16"
        if not math.isfinite(moved):  # a learner that diverged is not the sampler's fault
            return gap
        if not gap <= TOLERANCES[dtype] or (moved >= MIN_MOVED and own < STALE * moved):
            raise EngineError(
                f"the sampler of policy {which} does not have the weights published as version {version}: a row of the last "
                f"step differs from the learner's by {gap:.3g} nats per token (at most {TOLERANCES[dtype]} in {dtype}); the "
                f"update moved the learner by {moved:.3g} and the sampler by {own:.3g}; what it samples would train another "
                "model, so the run stops here"
            )
        return gap

    async def _score(self, policy: str, row: TrainingSequence) -> RowScores:
        value = self.values[policy]
        key = os.environ.get(value.get("key_env") or "", "").strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        model = value.get("served_model") or policy
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S, transport=self.transport, headers=headers, trust_env=False
        ) as client:
            [learner] = await self.engine.logprobs([row], policy)
            found = await asyncio.gather(
                *(self._of_server(client, url, model, row.tokens[:-1]) for url in value["endpoints"])
            )
        return RowScores(row, learner, {name: scores for one in found for name, scores in one.items()})

    async def _of_server(
        self, client: httpx.AsyncClient, url: str, model: str, tokens: list[int]
    ) -> dict[str, list[float]]:
        """Log-probability of every token given those before it, 0 for the first, by name of the replica; none, said once,
        where it cannot be asked. Tokens without the row's last: samplers insist on sampling one, and contexts end."""
        body = {
            "request_id": "weights",
            "model": model,
            "token_ids": tokens,
            "stream": False,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0},
        }
        try:
            answer = await _posted(client, f"{url.rstrip('/')}{GENERATE}", body)
            tables = answer.get("prompt_logprobs_by_server") or [answer["prompt_logprobs"]]
            names = [url] if len(tables) == 1 else [f"{url} (server {place})" for place in range(len(tables))]
            return {name: _numbers(table, tokens) for name, table in zip(names, tables, strict=True)}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            if url not in self._silent:
                self._silent.add(url)
                self.progress.note(
                    f"the weights of the sampler at {url} are not checked: {type(error).__name__}: {error}"
                )
            return {}


async def _posted(client: httpx.AsyncClient, url: str, body: JSON) -> Any:
    """The JSON of an answer. A sampler that dies meanwhile is back at its URL: it is asked again."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            reply = await client.post(url, json=body)
            reply.raise_for_status()
            return reply.json()
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            if not tries_left:
                raise


def _row(minibatches: Iterable[Sequence[TrainingSequence]]) -> TrainingSequence | None:
    """The shortest of the first rows that has enough trained tokens, else the one that has most. Scored as plain text at
    temperature 1, whatever it was sampled with."""
    rows = [
        row
        for row in islice(chain.from_iterable(minibatches), MAX_LOOKED)
        if any(row.mask[:-1]) and len(row.tokens) <= MAX_TOKENS and not row.images
    ]
    if not rows:
        return None
    found = min(rows, key=lambda row: (-min(MIN_TRAINED, sum(row.mask[:-1])), len(row.tokens)))
    return replace(found, temperature=1.0, decodings=[])


def _numbers(table: Any, tokens: Sequence[int]) -> list[float]:
    if len(table) != len(tokens):
        raise ValueError(f"expected {len(tokens)} prompt_logprobs, got {len(table)}")
    found = [scores[str(token)]["logprob"] for scores, token in zip(table[1:], tokens[1:], strict=True)]
    return [0.0, *(math.nan if one is None else float(one) for one in found)]  # JSON has no NaN: weights that give one
