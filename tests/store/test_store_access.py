"""Tokens and the audit log, on every store."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from pathlib import Path

import psycopg
import pytest
from store_samples import SECOND, Clock, a_run, a_worker, claimed, ending, finished, new_id, some, sql_store

from agentlightning.errors import ConflictError, InputError, NotFoundError
from agentlightning.records import Resource
from agentlightning.store.audit import Actor, acting_as
from agentlightning.store.base import LightningStore
from agentlightning.store.tokens import hash_of, is_token, mint_key, new_secret, verify_key


async def test_a_token_is_found_by_the_hash_of_its_secret(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    new = await store.create_token("workers", "worker", run_id, 60.0)
    assert (new.token.role, new.token.run_id, new.token.revoked_ns) == ("worker", run_id, None)
    assert (new.token.created_ns, new.token.expires_ns) == (clock.now_ns, clock.now_ns + 60 * SECOND)
    assert is_token(new.secret)
    assert await store.find_token(hashlib.sha256(new.secret.encode()).hexdigest()) == new.token
    assert await store.find_token(hash_of(new_secret())) is None


async def test_several_tokens_are_valid_at_a_time_and_one_is_revoked_once(store: LightningStore, clock: Clock) -> None:
    old = await store.create_token("laptop", "admin")
    clock.advance(1)
    new = await store.create_token("laptop", "admin")
    clock.advance(1)
    revoked = await store.revoke_token(old.token.id)
    assert revoked.revoked_ns == clock.now_ns
    clock.advance(1)
    assert await store.revoke_token(old.token.id) == revoked
    assert await store.tokens() == [revoked, new.token]
    assert [revoked.ended(clock.now_ns), new.token.ended(clock.now_ns)] == ["revoked", None]
    with pytest.raises(NotFoundError, match="no such token: tok-0"):
        await store.revoke_token("tok-0")


async def test_tokens_that_make_no_sense_are_refused(store: LightningStore) -> None:
    table: list[tuple[str, str, str | None, float | None, str]] = [
        ("", "admin", None, None, "name: expected"),
        ("a\nb", "admin", None, None, "name: expected"),
        ("x" * 101, "admin", None, None, "name: expected"),
        ("a", "worker", None, None, "run_id: is required for role worker"),
        ("a", "admin", "r", None, "run_id: expected none for role admin"),
        ("a", "reader", None, 0.0, "lifetime_s: expected"),
        ("a", "reader", None, float("nan"), "lifetime_s: expected"),
    ]
    for name, role, run_id, lifetime_s, said in table:
        with pytest.raises(InputError, match=said):
            await store.create_token(name, role, run_id, lifetime_s)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no such run: nowhere"):
        await store.create_token("a", "worker", "nowhere")
    assert await store.tokens() == []


async def test_tokens_end_with_their_run(store: LightningStore) -> None:
    run_id = await a_run(store)
    gone = await store.create_token("a", "worker", run_id)
    stays = await store.create_token("b", "reader")
    assert await store.tokens(run_id) == [gone.token]
    await store.delete_runs([run_id])
    assert await store.tokens() == [stays.token]
    assert await store.tokens(run_id) == []
    assert await store.find_token(hash_of(gone.secret)) is None


@pytest.mark.parametrize("store", ["memory", "sqlite", "postgres", "redis"], indirect=True)
async def test_the_first_run_that_a_trainer_creates_becomes_the_run_of_its_token(store: LightningStore) -> None:
    new = await store.create_token("t", "trainer")
    with acting_as(Actor(name="token t", binds=new.token.id)):
        run = await store.create_run("first", {})
        found = await store.find_token(hash_of(new.secret))
        assert found is not None
        assert found.run_id == run.id
        with pytest.raises(ConflictError, match="has its run already"):
            await store.create_run("second", {}, "second")
    assert await store.runs(["second"]) == []
    assert [token.run_id for token in await store.tokens(run.id)] == [run.id]


async def test_the_audit_log_has_what_was_done_and_by_whom(store: LightningStore, clock: Clock) -> None:
    claims = await finished(store, 2)
    run_id = claims[0].rollout.run_id
    started = len(await store.audit())
    ids = sorted(claim.rollout.id for claim in claims)
    await store.enqueue(some(run_id, 1, group_id="h"))
    [waiting] = await store.claim(a_worker(run_id))
    await store.cancel([waiting.rollout.id])
    await store.drop_records(ids)
    await store.put_resources(
        [
            Resource(run_id=run_id, name="default", kind="policy", value={}),
            Resource(run_id=run_id, name="pause:default", kind="pause", value={}),
        ]
    )
    await store.update_run(run_id, summary={"step": 1})
    await store.update_run(run_id, state="interrupted")
    new = await store.create_token("w", "worker", run_id, 60.0)
    await store.revoke_token(new.token.id)
    await store.delete_runs([run_id, "nowhere"])
    entries = (await store.audit())[started:]
    assert [(entry.action, entry.subject, entry.detail) for entry in entries] == [
        ("cancel", run_id, {"rollouts": 1, "ids": [waiting.rollout.id]}),
        ("drop_records", run_id, {"rollouts": 2, "ids": ids}),
        ("put_resources", "default", {"kind": "policy", "version": 1}),
        ("update_run", run_id, {"from": "running", "to": "interrupted"}),
        ("create_token", new.token.id, {"name": "w", "role": "worker", "lifetime_s": 60.0}),
        ("revoke_token", new.token.id, {"name": "w", "role": "worker"}),
        ("delete_runs", run_id, {}),
    ]
    assert {entry.run_id for entry in entries} == {run_id}
    assert {entry.created_ns for entry in entries} == {clock.now_ns}
    [actor] = {entry.actor for entry in entries}
    assert actor == "server key" or actor.startswith("local user ")


async def test_the_audit_log_is_read_on_from_a_cursor_and_by_run(store: LightningStore) -> None:
    runs = [await a_run(store) for _ in range(2)]
    for state in ("failed", "running", "failed"):
        for run_id in runs:
            await store.update_run(run_id, state=state)  # type: ignore[arg-type]
    everything = await store.audit()
    assert [entry.run_id for entry in everything] == runs * 3
    seqs = [entry.seq for entry in everything]
    assert seqs == sorted(set(seqs))
    assert await store.audit(after=seqs[1], limit=2) == everything[2:4]
    assert await store.audit(runs[0], limit=2) == everything[0:4:2]
    for limit in (0, -1):
        with pytest.raises(InputError, match=f"limit: expected at least 1, got {limit}"):
            await store.audit(limit=limit)
    assert await store.audit(runs[0], after=seqs[2]) == [everything[4]]


async def test_what_is_refused_or_changes_nothing_is_not_in_the_audit_log(store: LightningStore) -> None:
    [claim] = await claimed(store)
    with pytest.raises(ConflictError):
        await store.drop_records([claim.rollout.id])
    await store.finish([ending(claim)])
    assert await store.cancel([claim.rollout.id, new_id()]) == 0
    await store.update_run(claim.rollout.run_id, state="running")
    assert await store.audit() == []


_COPY = "INTO audit SELECT created_ns, 'nobody', action, subject, run_id, detail, seq FROM audit WHERE true"


async def test_sqlite_refuses_to_change_the_audit_log(tmp_path: Path, clock: Clock) -> None:
    async with sql_store(f"sqlite:///{tmp_path}/agl.db", clock) as store:
        for name in "ab":
            await store.create_token(name, "admin")
        for statement in (
            "UPDATE audit SET actor = 'nobody'",
            "UPDATE OR REPLACE audit SET seq = 2 WHERE seq = 1",
            "DELETE FROM audit",
            f"INSERT OR REPLACE {_COPY}",
            f"INSERT {_COPY} ON CONFLICT DO UPDATE SET actor = 'nobody'",
        ):
            with (
                contextlib.closing(sqlite3.connect(tmp_path / "agl.db")) as connection,
                pytest.raises(sqlite3.IntegrityError, match="only ever added to"),
            ):
                connection.execute(statement)
        await store.create_token("c", "admin")
        assert [entry.detail["name"] for entry in await store.audit()] == ["a", "b", "c"]


async def test_postgresql_refuses_to_change_the_audit_log(postgres_url: str, clock: Clock) -> None:
    async with sql_store(postgres_url, clock) as store:
        await store.create_token("a", "admin")
    for statement in ("UPDATE audit SET actor = 'nobody'", "DELETE FROM audit", "TRUNCATE audit"):
        with psycopg.connect(postgres_url) as connection, pytest.raises(psycopg.Error, match="only ever added to"):
            connection.execute(statement)  # type: ignore[call-overload]


def test_a_token_is_never_taken_for_the_key_of_an_attempt() -> None:
    secret = bytes(32)
    key = mint_key(secret, new_id(), 1)
    assert not is_token(key)
    assert verify_key(secret, new_secret()) is None
    # An identity whose text begins as a token's does: only its length tells.
    assert not is_token("sk-agl-token-" + key[len("sk-agl-token-") :])
