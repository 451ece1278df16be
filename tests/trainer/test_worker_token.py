"""The token that a trainer's own workers hold."""

from __future__ import annotations

from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.tokens import hash_of
from agentlightning.trainer.processes import worker_token


async def test_workers_hold_a_token_of_their_run_until_they_have_ended() -> None:
    async with InMemoryLightningStore() as store:
        run = await store.create_run("a run", {})
        async with worker_token(store, run.id) as secret:
            token = await store.find_token(hash_of(secret))
            assert token is not None
            assert (token.role, token.run_id, token.expires_ns, token.revoked_ns) == ("worker", run.id, None, None)
        after = await store.find_token(hash_of(secret))
        assert after is not None
        assert after.revoked_ns is not None


async def test_what_a_killed_trainer_left_is_revoked_and_what_somebody_else_made_is_not() -> None:
    async with InMemoryLightningStore() as store:
        run = await store.create_run("a run", {})
        killed = worker_token(store, run.id)
        left = await killed.__aenter__()
        theirs = await store.create_token("another machine", "worker", run.id)
        async with worker_token(store, run.id):
            found = {token.id: token for token in await store.tokens(run.id)}
            before = await store.find_token(hash_of(left))
            assert before is not None
            assert before.revoked_ns is not None
            assert found[theirs.token.id].revoked_ns is None
            assert len(found) == 3
