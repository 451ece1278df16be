"""Bringing a Redis store from the schema of an earlier version to this one.

Driven by ``agl store upgrade``, while nothing else uses the store. Every change may be made again, and the version is
written last: an upgrade that was killed is completed by the next.
"""

from __future__ import annotations

from typing import Any, get_args

import orjson

from agentlightning.errors import StoreError
from agentlightning.records import Mode, RolloutState
from agentlightning.store import former_names
from agentlightning.store.notifier import Notifier
from agentlightning.store.open import Upgraded
from agentlightning.store.redis import codec
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.checks import SCHEMA_VERSION, newer_schema
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.summaries import task_key, title_of

MAX_METRICS_PER_READ = 5000
MAX_COMMANDS = 1000


async def upgrade(url: str) -> Upgraded:
    """StoreError where the data are of a newer program, or there are none."""
    connection = RedisConnection(Address.at(url), {}, Notifier())
    name = connection.address.name
    await connection.open()
    try:
        [known] = await connection.query([("HGET", "meta", "schema_version")])
        if known is None:
            raise StoreError(f"{name}: there is no store in it, and nothing to upgrade")
        before = int(known)
        if before > SCHEMA_VERSION:
            raise newer_schema(name, before)
        [members] = await connection.query([("ZRANGEBYLEX", "runs", "-", "+")])
        for run_id in [member.decode().partition(":")[2] for member in members]:
            if before < 2:
                await _Run(connection, run_id).upgrade()
            if before < 8:  # those between have fields that may be absent, and rewrite nothing
                await _rename_images(connection, run_id)
            if before < 9:
                await _summarize(connection, run_id)
        if before < SCHEMA_VERSION:
            await connection.query([("HSET", "meta", "schema_version", SCHEMA_VERSION)])
        return Upgraded(name, before, SCHEMA_VERSION)
    finally:
        await connection.close()


async def _rename_images(connection: RedisConnection, run_id: str) -> None:
    """Images of requests are kept as files. The list of a run goes last, since the others are found by it."""
    [hashes] = await connection.query([("HKEYS", f"images:{run_id}")])
    for name in [each.decode() for each in hashes]:
        [users] = await connection.query([("SMEMBERS", f"image_users:{run_id}:{name}")])
        for user in users:
            await _rename(connection, f"image_uses:{user.decode()}", f"file_uses:{user.decode()}")
        await _rename(connection, f"image_users:{run_id}:{name}", f"file_users:{run_id}:{name}")
    await _rename(connection, f"images:{run_id}", f"files:{run_id}")


async def _summarize(connection: RedisConnection, run_id: str) -> None:
    """Rollouts know what their summaries say of their tasks, and attempts that of their calls."""
    states = [f"s:{run_id}:{mode}:{state}" for mode in get_args(Mode) for state in get_args(RolloutState)]
    for state in states:
        [ids] = await connection.query([("ZRANGE", state, 0, -1)])
        for rollout_id in [each.decode() for each in ids]:
            fixed, attempt = await connection.query(
                [("GET", f"t:{rollout_id}"), ("HGET", f"r:{rollout_id}", "attempt")]
            )
            if attempt is None:  # its run was being deleted: what is gone must not come back in part
                continue
            task = orjson.loads(fixed)["task"]
            changes: list[tuple[Any, ...]] = [
                ("HSET", f"r:{rollout_id}", "title", title_of(task), "task_key", task_key(task))
            ]
            number = int(attempt)
            [flat] = await connection.query([("HGETALL", f"c:{rollout_id}:{number}")])
            calls = [codec.read_call(rollout_id, number, *each) for each in zip(flat[::2], flat[1::2], strict=True)]
            if calls:
                prompts, sampled, forks, agents = zip(*map(codec.call_totals, calls), strict=True)
                names = orjson.dumps(sorted({each for each in agents if each})).decode()
                totals = ("turns", len(calls), "prompt_tokens", sum(prompts), "sampled_tokens", sum(sampled))
                changes.append(("HSET", f"a:{rollout_id}:{number}", *totals, "forks", sum(forks), "agents", names))
            await connection.query(changes)


async def _rename(connection: RedisConnection, key: str, new: str) -> None:
    [known] = await connection.query([("EXISTS", key)])
    if known:  # else an upgrade that was killed has done it
        await connection.rename(key, new)


class _Run:
    def __init__(self, connection: RedisConnection, run_id: str) -> None:
        self._connection = connection
        self._id = run_id
        self._changes: list[tuple[Any, ...]] = []

    async def upgrade(self) -> None:
        run, summary, versions, resources, consumed = [
            codec.raw_pairs(flat)
            for flat in await self._connection.query(
                [("HGETALL", f"{key}:{self._id}") for key in ("run", "summary", "versions", "resources", "consumed")]
            )
        ]
        await self._connection.query([("DEL", f"abandoned:{self._id}")])  # steps that nobody can see any more
        if "deleting" in run:
            return  # rollouts that are gone must not come back in part; the rest goes when deleting is completed
        config = former_names.upgraded_config(orjson.loads(run["config"]))
        await self._change("HSET", f"run:{self._id}", "config", orjson.dumps(config).decode())
        for name in summary:
            new = next(iter(former_names.upgraded_summary({name: 0})))
            await self._move(f"summary:{self._id}", name, new, summary[name])
        for name, last in versions.items():
            if name.startswith("hold:"):
                await self._move(f"versions:{self._id}", name, f"pause:{name.removeprefix('hold:')}", last)
        await self._resources(resources)
        await self._outcomes(consumed)
        await self._metrics()
        await self._flush()

    async def _resources(self, rows: dict[str, bytes]) -> None:
        for field, row in rows.items():
            version, _, name = field.partition(" ")
            created_ns, _, kept = row.partition(b" ")
            kind, *rest = orjson.loads(kept)
            new_kind, new_name = former_names.upgraded_resource(kind, name)
            if (new_kind, new_name) != (kind, name):
                renamed = created_ns + b" " + orjson.dumps([new_kind, *rest])
                await self._move(f"resources:{self._id}", field, f"{version} {new_name}", renamed)

    async def _outcomes(self, lists: dict[str, bytes]) -> None:
        for step, listed in lists.items():
            consumed = orjson.loads(listed)
            renamed = [[each, former_names.OUTCOMES.get(outcome, outcome), *more] for each, outcome, *more in consumed]
            for rollout_id, outcome in renamed:
                await self._change("HSET", f"r:{rollout_id}", "outcome", outcome)
            await self._change("HSET", f"consumed:{self._id}", step, orjson.dumps(renamed).decode())

    async def _metrics(self) -> None:
        """A stream cannot be changed: it is written anew beside itself, and then takes its place at once."""
        key, anew, after = f"metrics:{self._id}", f"metrics_anew:{self._id}", "-"
        await self._connection.query([("DEL", anew)])
        while True:
            [entries] = await self._connection.query([("XRANGE", key, after, "+", "COUNT", MAX_METRICS_PER_READ)])
            for place, flat in entries:
                known = codec.pairs(flat)
                known["name"] = former_names.upgraded_metric(known["name"])
                await self._change("XADD", anew, place.decode(), *[part for pair in known.items() for part in pair])
            if len(entries) < MAX_METRICS_PER_READ:
                break
            after = f"({entries[-1][0].decode()}"
        await self._flush()
        if after != "-" or entries:
            await self._connection.rename(anew, key)

    async def _move(self, key: str, field: str, new: str, value: bytes) -> None:
        await self._change("HSET", key, new, value)
        if new != field:
            await self._change("HDEL", key, field)

    async def _change(self, *command: Any) -> None:
        self._changes.append(command)
        if len(self._changes) >= MAX_COMMANDS:
            await self._flush()

    async def _flush(self) -> None:
        changes, self._changes = self._changes, []
        await self._connection.query(changes)
