"""Tokens, on every store."""

from __future__ import annotations

import hashlib

import pytest
from store_samples import SECOND, Clock, a_run, new_id

from agentlightning.errors import ConflictError, InputError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.request import binding
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
    with binding(new.token.id):
        run = await store.create_run("first", {})
        found = await store.find_token(hash_of(new.secret))
        assert found is not None
        assert found.run_id == run.id
        with pytest.raises(ConflictError, match="has its run already"):
            await store.create_run("second", {}, "second")
    assert await store.runs(["second"]) == []
    assert [token.run_id for token in await store.tokens(run.id)] == [run.id]


def test_a_token_is_never_taken_for_the_key_of_an_attempt() -> None:
    secret = bytes(32)
    key = mint_key(secret, new_id(), 1)
    assert not is_token(key)
    assert verify_key(secret, new_secret()) is None
    # An identity whose text begins as a token's does: only its length tells.
    assert not is_token("sk-agl-token-" + key[len("sk-agl-token-") :])
