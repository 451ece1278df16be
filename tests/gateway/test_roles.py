"""Roles: what each token may do, in which run, and how soon it ends; over real HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import build
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError
from agentlightning.gateway.access import RULES, TOKEN_AGE_S, Authentication, Caller, Permissions, ServerKeyError
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import (
    CallCredit,
    Checkpoint,
    Claim,
    Finish,
    Lease,
    Metric,
    NewRollout,
    Resource,
    WorkerStatus,
)
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.summaries import SummaryQuery
from agentlightning.store.tokens import TokenRole, new_secret
from agentlightning.store.wire import METHODS

KEY = "sk-agl-server-of-this-test"
ADMINS_ONLY = {
    "drop_records",
    "delete_runs",
    "expire_leases",
    "find_token",
    "mark_delivered",
    "open_session",
    "put_alias",
}
OF_ALL_RUNS = {"aliases", "wait_aliases"}


@pytest.fixture
async def admin() -> AsyncIterator[LightningStoreClient]:
    """The store of a server, opened by its key."""
    with AgentLightningServer("memory://", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as client:
            yield client


@asynccontextmanager
async def holding(
    admin: LightningStoreClient, role: TokenRole, run_id: str | None = None, lifetime_s: float | None = None
) -> AsyncIterator[LightningStoreClient]:
    """The same store, opened by a new token."""
    made = await admin.create_token(f"a {role}", role, run_id, lifetime_s)
    async with LightningStoreClient(admin._url, made.secret) as client:
        yield client


async def claimed(store: LightningStore) -> Claim:
    """A rollout of a new run, claimed."""
    run_id = (await store.create_run("a run", {})).id
    await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g")])
    return (await store.claim(a_worker(run_id)))[0]


def a_worker(run_id: str) -> WorkerStatus:
    return WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)


def requests(run_id: str, rollout_id: str, token_id: str) -> dict[str, dict[str, Any]]:
    """A request to each method that names this run, this rollout and this token."""
    place = build.rollout(rollout_id, run_id=run_id)
    reward, call = build.reward(place), build.call(place)
    credit = CallCredit(
        run_id=run_id, step=1, rollout_id=rollout_id, call_id="call", policy="default", credit=1.0, advantage=0.5,
        return_=None, weight=0.1, trained_tokens=1,
    )  # fmt: skip
    version = ModelVersion(
        name=run_id, number=0, run_id=run_id, policy="default", step=1, resource_version=1, parent=None,
        base_model="base", weights={"kind": "full", "url": "file:///weights"},
    )  # fmt: skip
    lease = Lease(rollout_id=rollout_id, attempt=1, token="t")
    return {
        "create_run": {"name": "n", "config": {}, "run_id": run_id},
        "update_run": {"run_id": run_id},
        "runs": {"ids": [run_id]},
        "enqueue": {"rollouts": [NewRollout(run_id=run_id, task={}, group_id="more")]},
        "claim": {"worker": a_worker(run_id)},
        "open_session": {
            "session": NewRollout(run_id=run_id, task={}, group_id="session:tok:anna", kind="session"),
            "lease_s": 60.0,
        },
        "record_feedback": {"rewards": [reward]},
        "heartbeat": {"worker": a_worker(run_id), "leases": [lease]},
        "finish": {"finishes": [Finish(lease=lease, state="succeeded", rewards=(reward,))]},
        "cancel": {"rollout_ids": [rollout_id]},
        "expire_leases": {},
        "rollouts": {"query": RolloutQuery(run_id=run_id)},
        "summaries": {"query": SummaryQuery(run_id=run_id)},
        "count": {"run_id": run_id},
        "attempts": {"rollout_ids": [rollout_id]},
        "wait": {"run_id": run_id, "timeout_s": 0.0},
        "workers": {"run_id": run_id},
        "append_calls": {"calls": [call]},
        "mark_delivered": {"rollout_id": rollout_id, "attempt": 1, "call_ids": [], "delivered": True},
        "append_spans": {"spans": [build.span(place)]},
        "calls": {"rollout_ids": [rollout_id]},
        "spans": {"rollout_ids": [rollout_id]},
        "record_rewards": {"rewards": [reward]},
        "rewards": {"rollout_ids": [rollout_id]},
        "put_resources": {"resources": [Resource(run_id=run_id, name="n", kind="pause", value={})]},
        "resources": {"run_id": run_id},
        "log_metrics": {"metrics": [Metric(run_id=run_id, step=1, name="m", value=1.0)]},
        "metrics": {"run_id": run_id},
        "series": {"run_id": run_id},
        "wait_resources": {"run_id": run_id, "after": {}, "timeout_s": 0.0},
        "follow_metrics": {"run_id": run_id, "timeout_s": 0.0},
        "statistics": {"run_id": run_id},
        "drop_records": {"rollout_ids": [rollout_id]},
        "delete_runs": {"run_ids": [run_id]},
        "open_step": {"run_id": run_id, "step": 1, "consumed": []},
        "close_step": {"run_id": run_id, "step": 1, "version": 1},
        "steps": {"run_id": run_id},
        "reopen_steps": {"run_id": run_id, "after": 0},
        "put_checkpoint": {"checkpoint": Checkpoint(run_id=run_id, step=1, path="p", version=1)},
        "checkpoints": {"run_id": run_id},
        "record_credit": {"credits": [credit]},
        "credit": {"rollout_ids": [rollout_id]},
        "drop_credit": {"run_id": run_id, "before": 1},
        "put_files": {"run_id": run_id, "rollout_id": rollout_id, "files": {}},
        "files": {"run_id": run_id, "hashes": []},
        "create_token": {"name": "n", "role": "worker", "run_id": run_id},
        "tokens": {"run_id": run_id},
        "find_token": {"secret_hash": "h"},
        "revoke_token": {"token_id": token_id},
        "put_model": {"version": version},
        "models": {"run_id": run_id},
        "put_alias": {
            "alias": ModelAlias(name=run_id, alias="best", number=1, previous=None, moved_ns=0),
        },
        "aliases": {"name": run_id},
        "wait_aliases": {"name": run_id, "known": {}, "timeout_s": 0.0},
    }


async def refused(store: LightningStore, method: str, given: dict[str, Any]) -> str | None:
    """What the role's check says against a request; None where it passes, whatever the method says then."""
    try:
        await getattr(store, method)(**given)
    except ConfigError as refusal:
        return str(refusal)
    except AgentLightningError:
        pass
    return None


def test_every_method_of_the_store_has_a_rule_or_is_left_to_admins() -> None:
    assert set(RULES) | ADMINS_ONLY == set(METHODS)
    assert not set(RULES) & ADMINS_ONLY
    assert set(requests("r", "o", "t")) == set(METHODS)


@pytest.mark.parametrize("role", ["trainer", "worker", "reader"])
async def test_a_token_of_a_run_may_what_its_role_may_in_its_run_and_nothing_in_another(
    admin: LightningStoreClient, role: TokenRole
) -> None:
    mine, other = await claimed(admin), await claimed(admin)
    tokens = [(await admin.create_token("x", "worker", each.rollout.run_id)).token.id for each in (mine, other)]
    async with holding(admin, role, mine.rollout.run_id) as store:
        for method, given in requests(mine.rollout.run_id, mine.rollout.id, tokens[0]).items():
            said = await refused(store, method, given)
            allowed = method in RULES and role in RULES[method].roles and method not in OF_ALL_RUNS
            assert (said is None) == allowed, (method, said)
        for method, given in requests(other.rollout.run_id, other.rollout.id, tokens[1]).items():
            said = await refused(store, method, given)
            assert said is not None, method
            if method in RULES and role in RULES[method].roles:
                assert f"this token opens run {mine.rollout.run_id} only" in said
            else:
                assert "needs a token of role admin" in said
    assert len(await admin.rollouts(RolloutQuery(run_id=other.rollout.run_id))) == 1
    assert await admin.spans([other.rollout.id]) == []


@pytest.mark.parametrize("method", ["append_spans", "record_rewards", "finish"])
async def test_a_record_that_names_the_tokens_run_and_a_rollout_of_another_is_refused(
    admin: LightningStoreClient, method: str
) -> None:
    mine, other = await claimed(admin), await claimed(admin)
    given = requests(mine.rollout.run_id, other.rollout.id, "")[method]
    async with holding(admin, "worker", mine.rollout.run_id) as store:
        said = await refused(store, method, given)
    assert said is not None
    assert f"rollout {other.rollout.id}" in said


async def test_rollouts_of_another_run_are_refused_however_few_are_remembered() -> None:
    async with InMemoryLightningStore() as store:
        mine, other = await claimed(store), await claimed(store)
        caller = Caller(role="worker", run_id=mine.rollout.run_id)
        permissions = Permissions(store, limit=1)
        for ids in ([other.rollout.id, mine.rollout.id], [mine.rollout.id, other.rollout.id]):
            with pytest.raises(ConfigError, match=f"rollout {other.rollout.id}: this token opens run"):
                await permissions.check(caller, "calls", {"rollout_ids": ids})
        assert await permissions.check(caller, "calls", {"rollout_ids": [mine.rollout.id]})


async def test_what_names_no_run_is_narrowed_to_the_tokens(admin: LightningStoreClient) -> None:
    mine, other = await claimed(admin), await claimed(admin)
    run_id = mine.rollout.run_id
    async with holding(admin, "reader", run_id) as store:
        assert [run.id for run in await store.runs()] == [run_id]
        assert [one.run_id for one in await store.rollouts(RolloutQuery())] == [run_id]
        assert await store.rollouts(RolloutQuery(ids=[other.rollout.id])) == []
        assert [one.run_id for one in await store.workers()] == [run_id]
        assert {token.run_id for token in await store.tokens()} == {run_id}


async def test_a_reader_of_all_runs_reads_and_writes_nothing(admin: LightningStoreClient) -> None:
    claim = await claimed(admin)
    async with holding(admin, "reader") as store:
        assert len(await store.runs()) == len(await store.statistics()) == 1
        assert await store.calls([claim.rollout.id]) == []
        with pytest.raises(ConfigError, match="update_run: needs a token of role admin or trainer; this one's role is"):
            await store.update_run(claim.rollout.run_id, state="failed")
        with pytest.raises(ConfigError, match="needs a token of role admin"):
            await store.signing_secret()


async def test_a_trainers_token_without_a_run_gets_the_first_that_it_creates(admin: LightningStoreClient) -> None:
    other = await claimed(admin)
    async with holding(admin, "trainer") as store:
        assert await store.runs() == await store.runs([other.rollout.run_id]) == []
        with pytest.raises(ConfigError, match="has no run yet"):
            await store.update_run(other.rollout.run_id, state="failed")
        run = await store.create_run("mine", {})
        assert [one.id for one in await store.runs()] == [run.id]
        with pytest.raises(ConfigError, match=f"opens run {run.id} only"):
            await store.create_run("another", {}, "another")
        with pytest.raises(ConflictError, match="exists already"):
            await store.create_run("again", {})
        with pytest.raises(ConfigError, match=f"opens run {run.id} only"):
            await store.update_run(other.rollout.run_id, state="failed")
        made = await store.create_token("w", "worker", run.id)
        assert (await store.revoke_token(made.token.id)).revoked_ns is not None
        for role in ("admin", "reader", "trainer"):
            with pytest.raises(ConfigError, match="create_token: "):
                await store.create_token("w", role, None if role == "admin" else run.id)  # type: ignore[arg-type]
    assert len(await admin.runs()) == 2


@pytest.mark.parametrize("role", ["trainer", "reader"])
async def test_a_trainer_revokes_no_token_of_its_run_but_workers(admin: LightningStoreClient, role: TokenRole) -> None:
    run_id = (await claimed(admin)).rollout.run_id
    made = await admin.create_token("an admin's", role, run_id)
    async with holding(admin, "trainer", run_id) as store:
        with pytest.raises(ConfigError, match=f"token {made.token.id}: a trainer revokes tokens of workers only"):
            await store.revoke_token(made.token.id)
    async with LightningStoreClient(admin._url, made.secret) as store:
        assert len(await store.runs()) == 1


async def test_a_revoked_token_opens_nothing_from_the_next_request_on(admin: LightningStoreClient) -> None:
    made = await admin.create_token("w", "reader")
    async with LightningStoreClient(admin._url, made.secret) as store:
        await store.runs()
        await admin.revoke_token(made.token.id)
        with pytest.raises(ConfigError, match=rf"token {made.token.id}: revoked at 20\d\d-"):
            await store.runs()


async def test_an_expired_token_is_told_apart_from_one_that_nobody_made(admin: LightningStoreClient) -> None:
    async with holding(admin, "reader", lifetime_s=1e-6) as store:
        with pytest.raises(ConfigError, match=r"token tok-.*: expired at 20\d\d-"):
            await store.runs()
    async with LightningStoreClient(admin._url, new_secret()) as store:
        with pytest.raises(ConfigError, match="token: unknown to this server"):
            await store.runs()


async def test_a_token_is_read_again_after_some_seconds_however_often_it_is_used() -> None:
    moment = [time.time_ns()]
    async with InMemoryLightningStore(now_ns=lambda: moment[0]) as store:
        made = await store.create_token("w", "reader", lifetime_s=60.0)
        authentication = Authentication(store, KEY, now_ns=lambda: moment[0])
        headers: Sequence[tuple[bytes, bytes]] = [(b"authorization", b"Bearer " + made.secret.encode())]
        assert (await authentication.caller(headers)).role == "reader"
        moment[0] += 61 * 10**9  # known to the cache, and over all the same
        with pytest.raises(ServerKeyError, match="expired"):
            await authentication.caller(headers)
    assert TOKEN_AGE_S <= 10


async def test_a_further_server_says_whose_token_gets_the_run(admin: LightningStoreClient) -> None:
    made = await admin.create_token("t", "trainer")
    with AgentLightningServer(admin._url, server_key=KEY) as further:
        async with LightningStoreClient(further.url, made.secret) as store:
            run = await store.create_run("mine", {})
            assert [one.run_id for one in await store.tokens()] == [run.id]


async def test_an_answer_is_not_given_to_another_caller_who_learned_its_name(admin: LightningStoreClient) -> None:
    claim = await claimed(admin)
    made = await admin.create_token("r", "reader", (await claimed(admin)).rollout.run_id)
    async with httpx.AsyncClient(base_url=f"{admin._url}/api", timeout=60) as http:
        answers = [
            await http.post(
                "/attempts",
                json={"rollout_ids": [claim.rollout.id]},
                headers={"authorization": f"Bearer {key}", "idempotency-key": "one"},
            )
            for key in (KEY, made.secret)
        ]
    assert [answer.status_code for answer in answers] == [200, 403]
