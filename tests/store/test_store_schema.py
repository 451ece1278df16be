"""The schema: a database of another version is refused, and Alembic's baseline is what a new store has."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, create_engine
from store_samples import Clock, a_reward, claimed, sql_store

from agentlightning.errors import StoreError
from agentlightning.records import Metric
from agentlightning.store.sql import tables
from agentlightning.store.sql.store import database_at


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/agl.db"
    return str(request.getfixturevalue("postgres_url"))


def test_the_revisions_make_the_tables_of_a_new_store(url: str) -> None:
    config = Config()
    config.set_main_option("script_location", "agentlightning.store.sql:migrations")
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        made = MetaData()
        made.reflect(connection)
        [version] = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars()
    engine.dispose()
    assert {*made.tables} - {"alembic_version"} == {*tables.metadata.tables}
    assert int(version) == tables.SCHEMA_VERSION


@pytest.mark.parametrize("version", [0, 99])
async def test_another_schema_is_refused_in_one_sentence(url: str, version: int) -> None:
    async with sql_store(url, Clock()):
        pass
    engine = database_at(url).writer("other")
    with engine.connect() as connection, connection.begin():
        other = f"'{version}'::bytea" if connection.dialect.name == "postgresql" else f"'{version}'"
        connection.exec_driver_sql(f"UPDATE meta SET value = {other} WHERE key = 'schema_version'")
    engine.dispose()
    with pytest.raises(
        StoreError, match=rf"version {version}, this program needs {tables.SCHEMA_VERSION}; choose another"
    ):
        await sql_store(url, Clock()).open()


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
