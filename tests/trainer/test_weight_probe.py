"""The weights that answer are the weights that learned, or the run stops: samplers that only seem to follow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from agentlightning.errors import EngineError
from agentlightning.trainer.monitor.metrics import METRICS
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.weight_probe import WeightProbe
from agentlightning.training_types import TrainingSequence

TOKENS = [3, 4, 5, 6, 20, 21, 9, 7, 8, 22, 23, 24, 9, 9, 25, 1]
OLD, NEW = -2.0, -1.9
URL = "http://sampler"


class Noting(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def row(logprobs: Sequence[float] | None = None, **changes: Any) -> TrainingSequence:
    mask = [place >= 4 for place in range(len(TOKENS))]
    given: dict[str, Any] = {
        "rollout_id": "r",
        "tokens": TOKENS,
        "mask": mask,
        "logprobs": logprobs or [OLD if trained else 0.0 for trained in mask],
        "advantages": [1.0 if trained else 0.0 for trained in mask],
        "weights": [1.0 if trained else 0.0 for trained in mask],
        "segments": [(4, len(TOKENS))],
    }
    return TrainingSequence(**{**given, **changes})


class Learner:
    """Its update moved every token from OLD to NEW."""

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = "default") -> list[list[float]]:
        return [[NEW] * len(one.tokens) for one in sequences]


def probe(scores: Callable[[str], float | None], exact: bool = True, urls: Sequence[str] = (URL,)) -> WeightProbe:
    """Of samplers that score every token alike; None: it cannot be asked."""

    def answer(request: httpx.Request) -> httpx.Response:
        score = scores(str(request.url).partition("/inference")[0])
        if score is None:
            return httpx.Response(404, json={"error": "no such route"})
        ids = json.loads(request.content)["token_ids"]
        return httpx.Response(
            200,
            json={
                "prompt_logprobs": [
                    None,
                    *({str(one): {"logprob": None if math.isnan(score) else score}} for one in ids[1:]),
                ]
            },
        )

    engine: Any = Learner()
    return WeightProbe(
        engine=engine,
        values={"default": {"endpoints": list(urls)}},
        exact=exact,
        progress=Noting(),
        transport=httpx.MockTransport(answer),
    )


@pytest.mark.parametrize("score", [NEW, NEW + 0.001, NEW - 0.019])
async def test_a_sampler_within_the_rounding_of_its_arithmetic_passes(score: float) -> None:
    found = await probe(lambda url: score).check({"default": [[row()]]}, 3)
    assert found == {"policy/weight_gap": pytest.approx(abs(score - NEW))}
    assert found.keys() <= METRICS.keys()


async def test_an_adapter_that_never_reaches_the_sampler_stops_the_run_with_one_sentence() -> None:
    with pytest.raises(EngineError) as raised:
        await probe(lambda url: OLD).check({"default": [[row()]]}, 3)
    assert str(raised.value) == (
        "the sampler of policy 'default' at http://sampler does not have the weights published as version 3: a row of the "
        "last step differs from the learner's by 0.1 nats per token, which the update moved by 0.1 and the sampler by 0; "
        "what it samples would train another model, so the run stops here"
    )


async def test_one_stale_replica_among_good_ones_is_found_and_named() -> None:
    stale = probe(lambda url: OLD if url.endswith("b") else NEW, urls=["http://a", "http://b"])
    with pytest.raises(EngineError, match="at http://b does not have the weights"):
        await stale.check({"default": [[row()]]}, 3)


async def test_a_sampler_of_another_precision_stops_where_it_did_not_move_at_all() -> None:
    with pytest.raises(EngineError, match=r"by 0\.1 and the sampler by 0"):
        await probe(lambda url: OLD, exact=False).check({"default": [[row()]]}, 3)
    assert await probe(lambda url: NEW + 0.06, exact=False).check({"default": [[row()]]}, 3)


@pytest.mark.parametrize("score", [-9.0, float("nan")])
async def test_half_of_the_weights_is_far_away_from_either(score: float) -> None:
    with pytest.raises(EngineError, match="does not have the weights"):
        await probe(lambda url: score, exact=False).check({"default": [[row()]]}, 3)


async def test_what_cannot_be_asked_is_noted_once_and_stops_nothing() -> None:
    asked = probe(lambda url: None)
    for version in range(3):
        assert await asked.check({"default": [[row()]]}, version) == {}
    assert isinstance(asked.progress, Noting)
    [note] = asked.progress.notes
    assert note.startswith("the weights of the sampler at http://sampler are not checked: HTTPStatusError")


async def test_rows_that_are_scored_otherwise_are_not_looked_at() -> None:
    rows = [row(temperature=0.5), row(decodings=[{"grammar": {}}]), row(mask=[False] * len(TOKENS))]
    assert await probe(lambda url: OLD).check({"default": [rows]}, 3) == {}
    with pytest.raises(EngineError):
        await probe(lambda url: OLD).check({"default": [rows, [row()]]}, 3)
