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
    """Its update moves every token from OLD to NEW."""

    def __init__(self, new: float) -> None:
        self.scores = iter([OLD, new])

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = "default") -> list[list[float]]:
        score = next(self.scores)
        return [[score] * len(one.tokens) for one in sequences]


class Servers:
    """Score every token alike: OLD plus their offset before the update; None: they cannot be asked."""

    def __init__(self, after: Callable[[str], float | None], offset: float = 0.0) -> None:
        self.after, self.offset = after, offset
        self.updated = False
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        score = self.after(str(request.url).partition("/inference")[0])
        if score is None:
            return httpx.Response(404, json={"error": "no such route"})
        score = score if self.updated else OLD + self.offset
        told = {"logprob": None if math.isnan(score) else score}
        ids = json.loads(request.content)["token_ids"]
        return httpx.Response(200, json={"prompt_logprobs": [None, *({str(one): told} for one in ids[1:])]})


async def probed(
    after: Callable[[str], float | None],
    exact: bool = True,
    *,
    new: float = NEW,
    offset: float = 0.0,
    minibatches: Sequence[Sequence[TrainingSequence]] | None = None,
    **value: Any,
) -> tuple[dict[str, float], list[str], list[httpx.Request]]:
    """Metrics of a step, notes, and what was asked."""
    engine: Any = Learner(new)
    servers, progress = Servers(after, offset), Noting()
    values = {"default": {"endpoints": [URL], **value}}
    transport = httpx.MockTransport(servers)
    probe = WeightProbe(engine=engine, values=values, exact=exact, progress=progress, transport=transport)
    before = await probe.before({"default": [[row()]] if minibatches is None else minibatches})
    servers.updated = True
    return await probe.after(before, 3), progress.notes, servers.asked


@pytest.mark.parametrize("score", [NEW, NEW + 0.001, NEW - 0.004])
async def test_a_sampler_within_the_rounding_of_its_arithmetic_passes(score: float) -> None:
    found, notes, _ = await probed(lambda url: score)
    assert found == {"policy/weight_gap": pytest.approx(abs(score - NEW))}
    assert found.keys() <= METRICS.keys()
    assert notes == []


async def test_an_adapter_that_never_reaches_the_sampler_stops_the_run_with_one_sentence() -> None:
    with pytest.raises(EngineError) as raised:
        await probed(lambda url: OLD)
    assert str(raised.value) == (
        "the sampler of policy 'default' at http://sampler does not have the weights published as version 3: a row of the "
        "last step differs from the learner's by 0.1 nats per token (at most 0.005 in float32); the update moved the "
        "learner by 0.1 and the sampler by 0; what it samples would train another model, so the run stops here"
    )


async def test_one_stale_replica_among_good_ones_is_found_and_named() -> None:
    endpoints = ["http://a", "http://b"]
    with pytest.raises(EngineError, match="at http://b does not have the weights"):
        await probed(lambda url: OLD if url.endswith("b") else NEW, endpoints=endpoints)


@pytest.mark.parametrize("new", [OLD + 0.0001, NEW])
async def test_a_sampler_of_another_precision_stops_where_it_did_not_move_at_all(new: float) -> None:
    with pytest.raises(EngineError, match="and the sampler by 0;"):
        await probed(lambda url: OLD + 0.03, exact=False, new=new, offset=0.03)
    await probed(lambda url: new + 0.04, exact=False, new=new, offset=0.03)


async def test_an_update_that_moved_nothing_stops_nothing() -> None:
    found, *_ = await probed(lambda url: OLD, new=OLD)
    assert found == {"policy/weight_gap": 0.0}


@pytest.mark.parametrize("score", [-9.0, float("nan")])
async def test_half_of_the_weights_is_far_away_from_either(score: float) -> None:
    with pytest.raises(EngineError, match="does not have the weights"):
        await probed(lambda url: score, exact=False)


async def test_a_learner_that_diverged_is_not_blamed_on_its_sampler() -> None:
    await probed(lambda url: float("nan"), new=float("nan"))


async def test_what_cannot_be_asked_is_noted_once_and_stops_nothing() -> None:
    found, notes, asked = await probed(lambda url: None)
    assert found == {}
    assert len(asked) == 2
    [note] = notes
    assert note.startswith("the weights of the sampler at http://sampler are not checked: HTTPStatusError")


async def test_servers_are_asked_by_the_name_and_with_the_key_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLER_KEY", "secret")
    *_, asked = await probed(lambda url: NEW, served_model="policy", key_env="SAMPLER_KEY")
    assert {json.loads(one.content)["model"] for one in asked} == {"policy"}
    assert {one.headers["authorization"] for one in asked} == {"Bearer secret"}


async def test_the_cheapest_row_that_says_enough_is_scored_as_plain_text() -> None:
    long = row(tokens=TOKENS * 3, mask=[False] + [True] * 47, temperature=0.5, decodings=[{"grammar": {}}])
    longer = row(tokens=TOKENS * 4, mask=[False] + [True] * 63)
    *_, asked = await probed(lambda url: NEW, minibatches=[[row(), longer], [long]])
    assert [json.loads(one.content)["token_ids"] for one in asked] == [long.tokens[:-1]] * 2
    untrained = row(mask=[False] * len(TOKENS))
    assert await probed(lambda url: OLD, minibatches=[[untrained]]) == ({}, [], [])
