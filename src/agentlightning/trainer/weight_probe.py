"""Weight probe: after each publication every sampler scores one row of the step, and so does the learner.

A sampler that goes on with other weights answers all the same, and training on what it samples looks healthy for weeks. The
training loop asks after each publication; beyond the tolerance the run stops. It knows a sampler's route for tokens alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from statistics import fmean
from typing import Any

import httpx

from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import EngineError
from agentlightning.records import JSON
from agentlightning.trainer.monitor.metrics import path_of
from agentlightning.trainer.progress import Progress
from agentlightning.training_types import TrainingSequence

MAX_TOKENS = 2048
"""Longest row that is scored: it costs one prompt."""
MAX_LOOKED = 64
"""Rows of a step among which one is looked for."""
TIMEOUT_S = 120.0
TOLERANCE = 0.02, 0.2
"""Largest mean difference of a token's log-probability between sampler and learner, in nats: both in float32, or not."""
MOVED = 1e-3, 0.05
"""From which mean movement on, by an update, a sampler that has not moved at all is known to be stale."""
STALE = 0.05
"""Share of the learner's movement below which a sampler has not moved."""


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

    async def check(self, rows: Mapping[str, Iterable[Sequence[TrainingSequence]]], version: int) -> Metrics:
        """Scores a row of each policy's minibatches. EngineError, with one sentence, for a sampler that has other weights
        than the learner."""
        found: Metrics = {}
        async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=self.transport, trust_env=False) as client:
            for policy, minibatches in rows.items():
                value = self.values[policy]
                row = _row(minibatches)
                if row is None or not value.get("endpoints") or value.get("api", "generate") != "generate":
                    continue
                [learner] = await self.engine.logprobs([row], policy)
                key = os.environ.get(value.get("key_env") or "", "").strip()
                client.headers.update({"authorization": f"Bearer {key}"} if key else {})
                gaps = [await self._gap(client, url, policy, row, learner, version) for url in value["endpoints"]]
                if known := [gap for gap in gaps if gap is not None]:
                    found[path_of("policy/weight_gap", policy if len(self.values) > 1 else "")] = max(known)
        return found

    async def _gap(
        self,
        client: httpx.AsyncClient,
        url: str,
        policy: str,
        row: TrainingSequence,
        learner: Sequence[float],
        version: int,
    ) -> float | None:
        """The mean difference at the row's trained tokens; None where the sampler does not say."""
        at = [place for place, trained in enumerate(row.mask[:-1]) if trained]
        # Without its last token: samplers insist on sampling one, for which a row that fills the context has no place.
        scored = await self._scores(client, url, policy, row.tokens[:-1])
        if scored is None:
            return None
        gap = fmean(abs(scored[place] - learner[place]) for place in at)
        moved = fmean(abs(learner[place] - row.logprobs[place]) for place in at)
        own = fmean(abs(scored[place] - row.logprobs[place]) for place in at)
        most, least = (pair[0] if self.exact else pair[1] for pair in (TOLERANCE, MOVED))
        if not gap <= most or (moved >= least and own < STALE * moved):
            raise EngineError(
                f"the sampler of policy {policy!r} at {url} does not have the weights published as version {version}: a "
                f"row of the last step differs from the learner's by {gap:.3g} nats per token, which the update moved by "
                f"{moved:.3g} and the sampler by {own:.3g}; what it samples would train another model, so the run stops here"
            )
        return gap

    async def _scores(self, client: httpx.AsyncClient, url: str, policy: str, tokens: list[int]) -> list[float] | None:
        """Log-probability of every token given those before it, 0 for the first; None, said once, where it has none."""
        body = {
            "request_id": f"weights-{policy}",
            "model": policy,
            "token_ids": tokens,
            "stream": False,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0},
        }
        try:
            reply = await client.post(f"{url.rstrip('/')}/inference/v1/generate", json=body)
            reply.raise_for_status()
            return _numbers(reply.json()["prompt_logprobs"], tokens)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            if url not in self._silent:
                self._silent.add(url)
                self.progress.note(
                    f"the weights of the sampler at {url} are not checked: {type(error).__name__}: {error}"
                )
            return None


def _row(minibatches: Iterable[Sequence[TrainingSequence]]) -> TrainingSequence | None:
    """The first row that samplers and learners score alike: text alone, at temperature 1, without constraints."""
    for row in islice(chain.from_iterable(minibatches), MAX_LOOKED):
        plain = row.temperature == 1.0 and not row.images and not any(row.decodings)
        if plain and any(row.mask[:-1]) and len(row.tokens) <= MAX_TOKENS:
            return row
    return None


def _numbers(table: Any, tokens: Sequence[int]) -> list[float]:
    if len(table) != len(tokens):
        raise ValueError(f"expected {len(tokens)} prompt_logprobs, got {len(table)}")
    found = [scores[str(token)]["logprob"] for scores, token in zip(table[1:], tokens[1:], strict=True)]
    return [0.0, *(math.nan if one is None else float(one) for one in found)]  # JSON has no NaN: weights that give one
