"""What a run's processes are given and leave behind: its state, the workers' token, upstreams, the end of a child."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError, EngineError, InputError, RunTakenError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.tokens import hash_of
from agentlightning.trainer.processes import check_keys, put_gateway_settings, record_run_status, worker_token
from agentlightning.trainer.supervisor import Supervisor


@pytest.mark.parametrize(
    ("error", "state"),
    [(EngineError("the learner ended"), "failed"), (RunTakenError("another host has it"), "finished")],
)
async def test_work_that_raises_leaves_its_run_as_failed_unless_another_trainer_took_it(
    store: InMemoryLightningStore, error: Exception, state: str
) -> None:
    await store.update_run("run", state="finished")
    with pytest.raises(type(error), match=str(error)):
        async with record_run_status(store, "run"):
            raise error
    [run] = await store.runs(ids=["run"])
    assert run.state == state


@pytest.mark.parametrize("state", ["interrupted", "finished"])
async def test_work_that_is_cancelled_leaves_its_run_as_said(
    store: InMemoryLightningStore, state: Literal["interrupted", "finished"]
) -> None:
    started = asyncio.Event()

    async def work() -> None:
        async with record_run_status(store, "run", cancelled=state):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [run] = await store.runs(ids=["run"])
    assert run.state == state


async def test_a_store_that_is_gone_does_not_hide_why_the_work_ended() -> None:
    store = InMemoryLightningStore()  # never opened: every verb raises StoreError
    with pytest.raises(EngineError, match="the learner ended"):
        async with record_run_status(store, "run"):
            raise EngineError("the learner ended")


async def test_workers_hold_a_token_of_their_run_until_they_have_ended_and_a_killed_trainers_is_revoked(
    store: InMemoryLightningStore,
) -> None:
    killed = worker_token(store, "run")
    left = await killed.__aenter__()
    theirs = await store.create_token("another machine", "worker", "run")
    async with worker_token(store, "run") as secret:
        token, before = await store.find_token(hash_of(secret)), await store.find_token(hash_of(left))
        assert token is not None
        assert (token.role, token.run_id, token.expires_ns, token.revoked_ns) == ("worker", "run", None, None)
        assert before is not None
        assert before.revoked_ns is not None
        found = {token.id: token for token in await store.tokens("run")}
        assert found[theirs.token.id].revoked_ns is None
        assert len(found) == 3
    after = await store.find_token(hash_of(secret))
    assert after is not None
    assert after.revoked_ns is not None


def config(**judge: Any) -> Config:
    judge = {"url": "https://h/v1", "models": ["gpt-5*"], "key_env": "JUDGE_KEY", **judge}
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}, "external": {"judge": judge}}
    return parse_config(table)


async def test_upstreams_are_resources_of_the_run_and_are_put_again_only_where_they_changed(
    store: InMemoryLightningStore,
) -> None:
    for each in (config(), config(), config(max_retries=5)):
        await put_gateway_settings(each, "run", store)
    first, second = await store.resources("run", "judge", latest=False)
    assert (first.kind, first.version, second.version) == ("external", 1, 2)
    assert first.value["models"] == ["gpt-5*"]
    assert (first.value["max_retries"], second.value["max_retries"]) == (2, 5)


def test_a_missing_key_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", " ")
    with pytest.raises(ConfigError, match=r"external\.judge\.key_env: the environment variable JUDGE_KEY is not set"):
        check_keys(config())
    monkeypatch.setenv("JUDGE_KEY", "secret")
    check_keys(config())
    monkeypatch.delenv("JUDGE_KEY")
    check_keys(config(key_env=None))


async def test_a_child_that_fails_is_seen_by_a_watch_that_follows_another(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, "memory://")
    first = asyncio.ensure_future(supervisor.watch())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    arguments = ["--server", "http://127.0.0.1:9", "--run", "run", "--agent", str(tmp_path / "nowhere.py:solve")]
    try:
        supervisor.start_workers(1, arguments, "a token")
        with pytest.raises(InputError, match=r"worker-0 could not start: .*nowhere\.py' does not exist"):
            await supervisor.watch()
    finally:
        await supervisor.stop()
