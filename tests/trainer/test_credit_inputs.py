"""What credit rules ask for: a judge over HTTP, and earlier steps from the store."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx
import pytest
from loop_doubles import WORKER, Noting, answer

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.settings import NamedPart
from agentlightning.errors import ConfigError, EngineError, UnjudgeableError
from agentlightning.records import Consumed, NewRollout, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.credit_inputs import CreditInputReader, check_credit_inputs
from agentlightning.training_types import Trajectory
from build import transition

JUDGE = {"url": "https://judge.test/v1", "model": "wise", "key_env": "JUDGE_KEY"}


def rollout(name: str, text: str | None, group: str = "g") -> Trajectory:
    messages = [{"role": "user", "content": "task"}]
    completion = {} if text is None else {"role": "assistant", "content": text}
    call = transition(name, messages=messages, completion=completion)
    return Trajectory(rollout_id=name, group_id=group, reward=0.0, transitions=[call])


MAX_CONTEXT = 10_000
GROUPS = [[rollout("a", "good"), rollout("b", "bad")]]


class Endpoint:
    def __init__(self, status: int = 200) -> None:
        self.requests: list[httpx.Request] = []
        self.status = status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        attempts = json.loads(request.content)["messages"][1]["content"].split("<attempt ")[1:]
        if len(request.content) > MAX_CONTEXT:
            return httpx.Response(400, json={"error": {"code": "context_length_exceeded"}})
        text = json.dumps({"scores": [float("good" in attempt) for attempt in attempts]})
        body = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        return httpx.Response(self.status, json=body)


def witness(store: LightningStore, folder: Path, endpoint: Endpoint) -> CreditInputReader:
    algorithm = LightningRL(credit=NamedPart(type="judge", **JUDGE))
    transport = httpx.MockTransport(endpoint)
    return CreditInputReader(
        algorithm=algorithm, store=store, run_id="run", folder=folder / "judge", transport=transport
    )


async def test_a_judge_is_asked_over_http_and_paid_once(
    store: LightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint = Endpoint()
    evidence, cost = await witness(store, tmp_path, endpoint).gather(1, GROUPS)
    assert evidence.scores == {"a": 1.0, "b": 0.0}
    assert (cost["judge/requests"], cost["judge/prompt_tokens"], cost["judge/sampled_tokens"]) == (1.0, 7.0, 3.0)
    [request] = endpoint.requests
    assert str(request.url) == "https://judge.test/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert json.loads(request.content)["model"] == "wise"
    # another process, after a crash: the replies are in the folder
    again, cost = await witness(store, tmp_path, endpoint).gather(1, GROUPS)
    assert (again, cost["judge/cached"], len(endpoint.requests)) == (evidence, 1.0, 1)


async def test_a_judge_that_refuses_ends_the_step_with_its_reason(
    store: LightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with pytest.raises(EngineError, match=r"the judge at https://judge\.test/v1 refused the request: 401"):
        await witness(store, tmp_path, Endpoint(401)).gather(1, GROUPS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("x" * MAX_CONTEXT, "refused the request: 400"), (None, "it is recorded without them")],
    ids=["too long for the judge", "no text"],
)
async def test_a_group_that_cannot_be_judged_has_no_scores_and_ends_no_run(
    store: LightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, reason: str
) -> None:
    """An agent decides what it says, and with which calls: the run would end here, and at each resume."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    spoiled = [rollout("c", text, "spoiled"), rollout("d", "good", "spoiled")]
    for step, groups in ((1, [*GROUPS, spoiled]), (2, [spoiled])):
        progress = Noting()
        reader = replace(witness(store, tmp_path, Endpoint()), progress=progress)
        evidence, _ = await reader.gather(step, groups)
        assert evidence.scores == ({"a": 1.0, "b": 0.0} if step == 1 else {})
        [note] = progress.notes
        assert note.startswith(f"step {step}: left out without scores: group spoiled: ")
        assert reason in note
    with pytest.raises(UnjudgeableError, match=reason):  # at the beginning it may be the settings
        await witness(store, tmp_path, Endpoint()).gather(1, [spoiled])


@pytest.mark.parametrize(("on_failure", "rewards"), [("zero", {0.0, 1.0}), ("drop", {1.0})])
async def test_earlier_steps_are_looked_at_as_they_were_learned_from(
    store: LightningStore, tmp_path: Path, on_failure: Literal["drop", "zero"], rewards: set[float]
) -> None:
    """A rollout that failed after a call counts as 0 there, too."""
    await store.put_resources([Resource(run_id="run", name="default", kind="policy", value={"model": "m"})])
    pair = [NewRollout(run_id="run", task={"n": 1}, group_id="train:1:0", replica=each, step=1) for each in (0, 1)]
    await store.enqueue(pair)
    for number, claim in enumerate(await store.claim(WORKER, limit=2)):
        await answer(store, claim, 1, 1.0, failed=number == 1)
    done = await store.rollouts(RolloutQuery(run_id="run"))
    await store.open_step("run", 1, [Consumed(rollout_id=one.id, outcome="trained") for one in done])
    await store.close_step("run", 1, 1)
    looking = CreditInputReader(
        algorithm=LightningRL(credit="decisive"), store=store, run_id="run", folder=tmp_path, on_failure=on_failure
    )
    evidence, _ = await looking.gather(2, GROUPS)
    found = [one.reward for group in evidence.history for one in group]
    assert {reward for reward in found if math.isfinite(reward)} == rewards


def test_a_judge_without_an_address_or_key_stops_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"credit\.url: is required with credit = 'judge'"):
        check_credit_inputs(LightningRL(credit="judge"))
    with pytest.raises(ConfigError, match=r"key_env: the variable JUDGE_KEY is not set"):
        check_credit_inputs(LightningRL(credit=NamedPart(type="judge", **JUDGE)))
    check_credit_inputs(LightningRL())


@pytest.mark.parametrize(("rule", "setting"), [("gigpo", "key"), ("learned", "features")])
def test_code_of_a_rule_s_settings_that_is_not_there_stops_the_run_before_it_begins(rule: str, setting: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        check_credit_inputs(LightningRL(credit=NamedPart(type=rule, **{setting: "nowhere.py:state"})))
