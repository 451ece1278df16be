"""The schema: a new database has the newest, an older one is refused until it is upgraded, and both are then the same."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tarfile
import tempfile
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from sqlalchemy import Connection, create_engine, inspect
from store_samples import Clock, a_call, a_reward, a_worker, claimed, sql_store
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql import tables
from agentlightning.store.sql.database import database_at
from agentlightning.store.sql.schema import upgrade
from agentlightning.store.summary_types import SummaryQuery

NEWEST = tables.SCHEMA_VERSION
STORED = Path(__file__).parents[1] / "end_to_end" / "stored" / "before_field_words.tar.xz"
ROLLOUT = "01890a5d-ac96-774b-bcce-b302099a8057"


def described(connection: Connection) -> dict[str, object]:
    """Everything that a schema says, whatever the order in which it was made."""
    inspector = inspect(connection)
    found: dict[str, object] = {}
    for table in sorted(set(inspector.get_table_names()) - {"alembic_version"}):
        columns = {
            column["name"]: (
                *(str(column["type"]), getattr(column["type"], "collation", None)),
                *(column["nullable"], column["default"], column.get("autoincrement")),
            )
            for column in inspector.get_columns(table)
        }
        keys = sorted(
            (key["constrained_columns"], key["referred_table"], key["referred_columns"])
            for key in inspector.get_foreign_keys(table)
        )
        checks = sorted(
            (str(check["name"]), re.sub(r"\s+", " ", check["sqltext"]))
            for check in inspector.get_check_constraints(table)
        )
        indexes = sorted(
            (index["name"], index["column_names"], index["unique"], str(sorted(index.get("dialect_options", {}))))
            for index in inspector.get_indexes(table)
        )
        unique = sorted(sorted(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table))
        primary = inspector.get_pk_constraint(table)["constrained_columns"]
        found[table] = {
            "columns": columns,
            "keys": keys,
            "checks": checks,
            "indexes": indexes,
            "unique": unique,
            "primary": primary,
        }
    if connection.dialect.name == "sqlite":
        kept = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name")
    else:
        kept = connection.exec_driver_sql(
            "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY tgname"
        )
    found["triggers"] = [tuple(row) for row in kept]
    return found


def old_schema(connection: Connection) -> None:
    """The tables of version 4 as the last program of that version made them."""
    if connection.dialect.name == "postgresql":
        for statement in (Path(__file__).parent / "schema_4.postgresql.sql").read_text().split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(STORED) as archive:
            archive.extract("agl.db", folder, filter="data")
        with contextlib.closing(sqlite3.connect(f"{folder}/agl.db")) as stored:
            made = stored.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    for (statement,) in made:
        connection.exec_driver_sql(statement)


def old_store(url: str, version: int = 4) -> None:
    """A database as a program of version 4 left it: one rollout with a call, a reward and a metric."""
    engine = database_at(url).writer("old")
    with engine.connect() as connection, connection.begin():
        old_schema(connection)
        if connection.dialect.name == "postgresql":
            blob, secret = "''::bytea", "decode(repeat('ab', 32), 'hex')"
            number = f"'{version}'::bytea"
        else:
            blob, secret, number = "x''", f"x'{'ab' * 32}'", f"CAST('{version}' AS BLOB)"
        for statement in (
            f"INSERT INTO meta VALUES ('schema_version', {number}), ('signing_secret', {secret})",
            "INSERT INTO runs (id, name, state, config, created_ns, updated_ns, summary)"
            " VALUES ('r', 'old', 'running', '{\"trainer\":{\"surplus\":0.5}}', 1, 1, '{\"step\":1,\"reward_mean\":0.5}')",
            "INSERT INTO rollouts (id, run_id, task, group_id, replica, mode, step, sampling, retry, priority, state,"
            " attempt, lost, created_ns) VALUES ('o', 'r', '{}', 'g', 0, 'train', 0, '{}', '{\"retry_on\": []}', 0,"
            " 'running', 1, 0, 1)",
            "INSERT INTO attempts (rollout_id, attempt, state, worker_id, token, lease_expires_ns, started_ns)"
            " VALUES ('o', 1, 'running', 'w', 't', 1, 1)",
            *(
                "INSERT INTO calls (id, run_id, rollout_id, attempt, parent_id, suffix_ids, sampled_ids, logprobs, versions,"
                " prompt_tokens, policy, model, protocol, sampling, history_hash, request_hash, messages, answer,"
                f" finish_reason, started_ns, finished_ns) VALUES ('{name}', 'r', 'o', 1, {parent}, {blob}, {blob}, {blob},"
                " '[]', 1, 'p', 'm', 'chat', '{}', 'h', 'q', '[]', '{}', 'stop', 1, 2)"
                for name, parent in (("c1", "NULL"), ("c2", "'c1'"))
            ),
            "INSERT INTO rewards (id, run_id, rollout_id, attempt, value, name, call_id, source, created_ns)"
            " VALUES ('w', 'r', 'o', 1, 0.5, 'reward', 'c2', 'emitted', 1)",
            "INSERT INTO metrics (run_id, step, name, value, created_ns, abandoned)"
            " VALUES ('r', 1, 'loss', 0.5, 1, false)",
            "INSERT INTO resource_versions (run_id, name, last) VALUES ('r', 'judge', 1), ('r', 'hold:default', 2)",
            "INSERT INTO resources (run_id, name, version, kind, value, step, created_ns) VALUES"
            " ('r', 'judge', 1, 'upstream', '{}', 0, 1), ('r', 'hold:default', 1, 'hold', '{}', 0, 1),"
            " ('r', 'hold:default', 2, 'hold', '{}', 0, 1)",
            "INSERT INTO steps (run_id, step, state, version, created_ns)"
            " VALUES ('r', 1, 'closed', 1, 1), ('r', 2, 'abandoned', NULL, 1)",
            "INSERT INTO consumption (rollout_id, run_id, mode, step_id, position, outcome)"
            " SELECT 'o', 'r', 'train', id, 0, 'surplus' FROM steps WHERE step = 1",
        ):
            connection.exec_driver_sql(statement.replace("'o'", f"'{ROLLOUT}'"))
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/agl.db"
    return str(request.getfixturevalue("postgres_url"))


async def test_an_older_store_is_refused_until_it_is_upgraded_and_keeps_its_data(url: str) -> None:
    old_store(url)
    with pytest.raises(StoreError, match=rf"version 4, this program needs {NEWEST}.*agl store upgrade"):
        await sql_store(url, Clock()).open()
    done = upgrade(database_at(url))
    assert (done.before, done.after) == (4, NEWEST)
    assert upgrade(database_at(url)).before == NEWEST
    async with sql_store(url, Clock()) as store:
        assert await store.signing_secret() == b"\xab" * 32
        first, second = await store.calls([ROLLOUT])
        assert (first.id, second.parent_id, second.untrained_tokens, second.overridden_params) == ("c1", "c1", 0, {})
        [reward] = await store.rewards([ROLLOUT])
        assert (reward.call_id, reward.value) == ("c2", 0.5)
        [metric] = await store.metrics("r")
        await _has_the_words_of_today(store)
        await store.log_metrics([Metric(run_id="r", step=2, name="loss", value=1.0)])
        assert [later.seq for later in await store.follow_metrics("r", after=metric.seq)] == [metric.seq + 1]
        assert await store.expire_leases() == 1
        [claim] = await store.claim(a_worker("r"))
        await store.append_calls([a_call(claim)])


async def test_rollouts_that_finished_before_the_upgrade_have_summaries(url: str) -> None:
    old_store(url)
    engine = database_at(url).writer("old")
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql(
            "UPDATE rollouts SET state = 'succeeded', finished_seq = 1, finished_ns = 2000000001, started_ns = 1,"
            ' reward = 0.5, task = \'{"question": "how many?"}\''
        )
        connection.exec_driver_sql("UPDATE attempts SET state = 'succeeded', finished_ns = 2000000001")
        connection.exec_driver_sql("UPDATE runs SET finished = 1")
    engine.dispose()
    upgrade(database_at(url))
    async with sql_store(url, Clock()) as store:
        [row] = (await store.summaries(SummaryQuery())).rows
    assert (row.id, row.reward, row.turns, row.prompt_tokens, row.sampled_tokens) == (ROLLOUT, 0.5, 2, 2, 0)
    assert (row.title, row.outcome, row.agents, row.duration_s) == ("how many?", "overprovisioned", [], 2.0)


async def _has_the_words_of_today(store: LightningStore) -> None:
    [run] = await store.runs()
    assert (run.config, run.summary) == ({"trainer": {"overprovision": 0.5}}, {"step": 1, "train/reward_mean": 0.5})
    assert [metric.name for metric in await store.metrics("r")] == ["train/loss"]
    found = await store.resources("r", latest=False)
    assert [(each.kind, each.name, each.version) for each in found] == [
        ("external", "judge", 1),
        ("pause", "pause:default", 1),
        ("pause", "pause:default", 2),
    ]
    assert [(step.step, step.state) for step in await store.steps("r")] == [(1, "closed")]
    assert [rollout.outcome for rollout in await store.rollouts(RolloutQuery(run_id="r"))] == ["overprovisioned"]
    [pause] = await store.put_resources([Resource(run_id="r", name="pause:default", kind="pause", value={})])
    assert pause.version == 3


async def test_an_upgraded_schema_is_that_of_a_new_database(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    old_store(url)
    upgrade(database_at(url))
    new = f"sqlite:///{tmp_path}/new.db"
    if url.startswith("postgresql"):
        server: PostgresServer = request.getfixturevalue("postgres")
        new = server.url()
    async with sql_store(new, Clock()):
        pass
    schemas = []
    for place in (url, new):
        engine = create_engine(place.replace("postgresql://", "postgresql+psycopg://"))
        with engine.connect() as connection:
            schemas.append(described(connection))
        engine.dispose()
    upgraded, made = schemas
    assert upgraded == made


async def test_a_newer_schema_is_refused_in_one_sentence(url: str) -> None:
    async with sql_store(url, Clock()):
        pass
    engine = database_at(url).writer("newer")
    with engine.connect() as connection, connection.begin():
        later = "'99'::bytea" if connection.dialect.name == "postgresql" else "'99'"
        connection.exec_driver_sql(f"UPDATE meta SET value = {later} WHERE key = 'schema_version'")
    engine.dispose()
    with pytest.raises(StoreError, match=r"version 99.*upgrade agentlightning"):
        await sql_store(url, Clock()).open()
    with pytest.raises(StoreError, match=r"version 99.*upgrade agentlightning"):
        upgrade(database_at(url))


async def test_a_schema_that_was_never_released_is_refused_in_one_sentence(url: str) -> None:
    old_store(url, version=3)
    with pytest.raises(StoreError, match=r"version 3, and only those from 4 on can be upgraded"):
        await sql_store(url, Clock()).open()
    with pytest.raises(StoreError, match=r"version 3, and only those from 4 on can be upgraded"):
        upgrade(database_at(url))


def test_there_is_nothing_to_upgrade_in_an_empty_database(url: str) -> None:
    with pytest.raises(StoreError, match="no store in it"):
        upgrade(database_at(url))


async def test_the_command_upgrades_and_says_from_where_to_where(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    old_store(url)
    for said in (f"upgraded from version 4 to {NEWEST}", "nothing to do"):
        result = CliRunner().invoke(app, ["store", "upgrade", url])
        assert result.exit_code == 0, result.output
        assert said in result.output
    missing = CliRunner().invoke(app, ["store", "upgrade", f"sqlite:///{tmp_path}/missing.db"])
    assert isinstance(missing.exception, NotFoundError)
    assert not (tmp_path / "missing.db").exists()


async def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "agl.db"
    old_store(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE calls SET attempt = 7 WHERE id = 'c2'")  # of an attempt that is not there
    connection.commit()
    before = list(connection.iterdump())
    with pytest.raises(StoreError, match="a row of calls refers to a row of attempts that is not there"):
        upgrade(database_at(f"sqlite:///{path}"))
    assert list(connection.iterdump()) == before
    connection.close()


async def test_a_seq_of_metrics_is_never_used_twice_even_when_the_last_is_gone(tmp_path: Path) -> None:
    async with sql_store(f"sqlite:///{tmp_path}/agl.db", Clock()) as store:
        [claim] = await claimed(store)
        run_id = claim.rollout.run_id
        await store.record_rewards([a_reward(claim, 1.0)])
        other = (await store.create_run("other", {})).id
        await store.log_metrics([Metric(run_id=other, step=1, name="loss", value=1.0)])
        [last] = await store.metrics(other)
        await store.delete_runs([other])
        await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=1.0)])
        [metric] = await store.metrics(run_id)
        assert metric.seq > last.seq
