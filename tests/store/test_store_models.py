"""Model versions and their aliases, on every store."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import violations
from store_samples import Clock, a_run, sql_store

from agentlightning.errors import ConflictError, InputError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion, is_reference, next_number, parse_reference


def a_version(run_id: str, step: int = 10, **fields: Any) -> ModelVersion:
    given: dict[str, Any] = {
        "name": "support",
        "policy": "default",
        "resource_version": step + 1,
        "parent": "base/model",
        "base_model": "base/model",
        "weights": {"kind": "full", "url": f"file:///runs/{run_id}/{step}", "manifest_hash": "ab", "bytes": 2**40},
        "prompts": {"system": 3},
        "config_hash": "c",
        "code_hash": "d",
        "data_hash": "e",
        "metrics": {"eval/reward": {"mean": 0.12345678901234567, "low": 0.1, "high": 0.2, "n": 300}, "none": {}},
        "licence": "mit",
        **fields,
    }
    return ModelVersion(number=0, run_id=run_id, step=step, **given)


async def registered(store: LightningStore, *steps: int) -> list[ModelVersion]:
    run_id = await a_run(store)
    return [await store.register_model(a_version(run_id, step)) for step in steps]


async def test_a_version_is_registered_once_and_read_as_it_was_written(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    new = await store.register_model(a_version(run_id, licence="é\n"))
    assert new == replace(a_version(run_id), licence="é\n", number=10, created_ns=clock.now_ns, revision=1)
    clock.advance(1)
    assert await store.register_model(a_version(run_id, licence="other", name="another")) == new
    assert await store.models() == await store.models("support") == await store.models(run_id=run_id) == [new]
    assert await store.models("another") == await store.models(run_id="nowhere") == []


async def test_weights_that_were_moved_are_known_by_their_hash(store: LightningStore) -> None:
    [version] = await registered(store, 10)
    other = await store.register_model(replace(version, weights={**version.weights, "manifest_hash": "cd"}))
    assert other == version
    weights = {**version.weights, "url": "s3://bucket/10"}
    moved = replace(version, weights=weights, revision=2)
    assert await store.register_model(replace(version, weights=weights)) == moved
    assert await store.models() == [moved]


async def test_numbers_of_a_name_go_on_over_its_runs(store: LightningStore) -> None:
    first, second = await a_run(store), await a_run(store)
    assert [(await store.register_model(a_version(first, step))).number for step in (10, 20)] == [10, 20]
    assert [(await store.register_model(a_version(second, step))).number for step in (5, 10)] == [25, 30]
    # A run that saves a step which lies before its last one, whose trainer was killed before it registered it.
    assert (await store.register_model(a_version(second, 7))).number == 27
    # Another run of the name took the number meanwhile.
    assert (await store.register_model(a_version(first, 30))).number == 31
    assert (await store.register_model(a_version(first, 40))).number == 41
    other = await store.register_model(a_version(second, 5, policy="critic", name="critic"))
    assert other.number == 5
    assert [each.number for each in await store.models("support")] == [10, 20, 25, 27, 30, 31, 41]


async def test_versions_of_many_runs_that_register_at_once_have_numbers_of_their_own(store: LightningStore) -> None:
    runs = [await a_run(store) for _ in range(5)]
    versions = [a_version(run_id, step) for step in (1, 2) for run_id in runs]
    found = await asyncio.gather(*map(store.register_model, versions))
    assert len({each.number for each in found}) == 10
    assert await asyncio.gather(*map(store.register_model, versions)) == found


async def test_what_cannot_be_registered_is_refused(store: LightningStore) -> None:
    run_id = await a_run(store)
    with pytest.raises(NotFoundError, match="no such run: nowhere"):
        await store.register_model(a_version("nowhere"))
    for fields, said in (
        ({"name": "a@b"}, "name: expected"),
        ({"name": ""}, "name: expected"),
        ({"step": -1}, "step: expected 0 or more"),
        ({"weights": {"kind": "other", "url": "x"}}, "weights: expected"),
    ):
        with pytest.raises(InputError, match=said):
            await store.register_model(a_version(run_id, **fields))
    assert await store.models() == []


async def test_an_alias_is_moved_and_remembers_where_it_was(store: LightningStore, clock: Clock) -> None:
    await registered(store, 10, 20)
    first = await store.set_alias("support", "production", 10)
    assert (first.name, first.alias, first.number, first.previous) == ("support", "production", 10, None)
    clock.advance(1)
    assert await store.set_alias("support", "production", 10) == first
    second = await store.set_alias("support", "production", 20)
    assert (second.number, second.previous, second.moved_ns) == (20, 10, clock.now_ns)
    await store.set_alias("support", "best", 10)
    assert [(each.alias, each.number) for each in await store.aliases()] == [("best", 10), ("production", 20)]
    assert await store.aliases("other") == []
    removed = await store.set_alias("support", "production", None)
    assert (removed.number, removed.previous) == (None, 20)
    assert [each.alias for each in await store.aliases("support")] == ["best"]
    again = await store.set_alias("support", "production", 10)
    assert (again.number, again.previous) == (10, None)


async def test_aliases_that_make_no_sense_are_refused(store: LightningStore) -> None:
    await registered(store, 10)
    for alias in ("", "Best", "10", "a_b", "a b"):
        with pytest.raises(InputError, match="alias: expected small letters"):
            await store.set_alias("support", alias, 10)
    with pytest.raises(NotFoundError, match="no such model version: support@11"):
        await store.set_alias("support", "best", 11)
    with pytest.raises(NotFoundError, match="no such alias: support@best"):
        await store.set_alias("support", "best", None)
    assert await store.aliases() == []


async def test_whoever_waits_for_an_alias_hears_of_its_move(store: LightningStore) -> None:
    await registered(store, 10, 20)
    await store.set_alias("support", "production", 10)
    assert [each.number for each in await store.wait_aliases("support", {}, timeout_s=60)] == [10]
    known = {"production": 10}
    assert [each.number for each in await store.wait_aliases("support", known, timeout_s=0)] == [10]
    waiting = asyncio.create_task(store.wait_aliases("support", known, timeout_s=60))
    other = asyncio.create_task(store.wait_aliases("other", {}, timeout_s=0.01))
    assert await other == []
    await store.set_alias("support", "production", 20)
    async with asyncio.timeout(10):
        assert [(each.number, each.previous) for each in await waiting] == [(20, 10)]


async def test_weights_are_never_deleted_while_somebody_uses_them(store: LightningStore) -> None:
    await registered(store, 10, 20, 30)

    async def refusal(number: int) -> str:
        with pytest.raises(ConflictError) as refused:
            await store.delete_model("support", number)
        return str(refused.value)

    await store.set_alias("support", "best", 10)
    assert await refusal(10) == "support@10: its weights are kept, since it is named by the alias best"
    await store.set_alias("support", "best", 20)
    assert await refusal(10) == "support@10: its weights are kept, since it is what the alias best is rolled back to"
    await store.set_alias("support", "best", 30)
    await store.delete_model("support", 10)
    await store.delete_model("support", 10)
    assert [each.deleted for each in await store.models()] == [True, False, False]


async def test_a_version_whose_weights_are_gone_is_not_used_any_more(store: LightningStore, clock: Clock) -> None:
    [version] = await registered(store, 10)
    await store.delete_model("support", 10)
    with pytest.raises(ConflictError, match="support@10: its weights were deleted"):
        await store.set_alias("support", "best", 10)
    with pytest.raises(NotFoundError, match="no such model version: support@11"):
        await store.delete_model("support", 11)
    clock.advance(1)
    weights = {"kind": "adapter", "url": "file:///again"}
    again = await store.register_model(a_version(version.run_id, 10, weights=weights, name="other"))
    assert (again.reference, again.deleted, again.weights) == ("support@10", False, weights)
    assert again.created_ns == clock.now_ns
    assert await store.models() == [again]


async def test_a_change_of_what_was_changed_meanwhile_is_refused(store: LightningStore) -> None:
    [version, _] = await registered(store, 10, 20)
    await store.put_model(replace(version, licence="first"))
    for changed in (replace(version, licence="second"), replace(version, deleted=True), replace(version, step=11)):
        with pytest.raises(ConflictError, match="support@10: was changed meanwhile"):
            await store.put_model(changed)
    alias = await store.set_alias("support", "best", 10)
    await store.set_alias("support", "best", 20)
    for moved in (alias, replace(alias, number=None), replace(alias, revision=0)):
        with pytest.raises(ConflictError, match="support@best: was changed meanwhile"):
            await store.put_alias(moved)
    assert [(each.number, each.licence) for each in await store.models()] == [(10, "first"), (20, "mit")]
    assert [each.number for each in await store.aliases()] == [20]


async def test_a_run_with_versions_in_use_is_not_deleted(store: LightningStore) -> None:
    [first, *_] = await registered(store, 10, 20, 30)
    run_id = first.run_id
    await store.set_alias("support", "production", 20)
    await store.set_alias("support", "best", 30)
    with pytest.raises(ConflictError) as refused:
        await store.delete_runs([run_id])
    assert str(refused.value) == (
        f"run {run_id} is kept with the model versions that are in use: support@20 is named by the alias production; "
        "support@30 is named by the alias best"
    )
    assert len(await store.runs([run_id])) == 1
    assert not any(each.deleted for each in await store.models())


async def test_versions_of_a_deleted_run_stay_as_entries_without_weights(store: LightningStore, clock: Clock) -> None:
    [first, *_] = await registered(store, 10, 20)
    assert await store.delete_runs([first.run_id]) == 1
    assert [(each.number, each.deleted) for each in await store.models()] == [(10, True), (20, True)]
    with pytest.raises(NotFoundError, match="no such run"):
        await store.register_model(a_version(first.run_id, 30))
    clock.advance(1)  # else the new run has the id of the old one, and goes on with its numbers
    assert (await registered(store, 5))[0].number == 25


async def test_many_versions_are_read_in_order(store: LightningStore) -> None:
    run_id = await a_run(store)
    versions = [a_version(run_id, step, metrics={}) for step in range(501, 0, -1)]
    await asyncio.gather(*map(store.register_model, versions))
    found = await store.models("support")
    assert [each.number for each in found] == sorted(each.number for each in found)
    assert {each.step for each in found} == set(range(1, 502))


@pytest.mark.parametrize(
    ("text", "name", "number", "alias"),
    [
        ("support@40", "support", 40, None),
        ("20260101-000000-ab12@0", "20260101-000000-ab12", 0, None),
        ("a.b_c-d@best-2", "a.b_c-d", None, "best-2"),
    ],
)
def test_a_reference_names_a_version_or_an_alias(text: str, name: str, number: int | None, alias: str | None) -> None:
    assert parse_reference(text) == (name, number, alias)


@pytest.mark.parametrize("text", ["", "support", "@40", "support@", "a/b@40", "a@b@c", "a@B", "a@4x", "a b@4", "a@-1"])
def test_other_text_is_no_reference(text: str) -> None:
    assert not is_reference(text)
    with pytest.raises(InputError, match=r"model\.path: expected NAME@NUMBER or NAME@ALIAS"):
        parse_reference(text, "model.path")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=30))
def test_no_two_versions_of_a_name_have_one_number(registrations: list[tuple[int, int]]) -> None:
    numbers: dict[tuple[int, int], int] = {}
    for run, step in registrations:
        if (run, step) not in numbers:
            own = [(number, its_step) for (its_run, its_step), number in numbers.items() if its_run == run]
            numbers[run, step] = next_number(list(numbers.values()), max(own, default=None), step)
    assert len(set(numbers.values())) == len(numbers)
    assert all(number >= 0 for number in numbers.values())


async def test_an_alias_of_weights_that_are_gone_is_a_violation(tmp_path: Path, clock: Clock) -> None:
    async with sql_store(f"sqlite:///{tmp_path}/agl.db", clock) as store:
        await registered(store, 10, 20)
        await store.set_alias("support", "best", 10)
        await store.set_alias("support", "best", 20)
        assert await violations(store) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "agl.db")) as connection:
        connection.execute("UPDATE model_versions SET deleted = 1 WHERE number = 10")
        connection.commit()
    async with sql_store(f"sqlite:///{tmp_path}/agl.db", clock) as store:
        assert await violations(store) == ["alias support@best names version 10, whose weights were deleted"]
