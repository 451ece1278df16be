"""Files, such as images of requests: kept once per run by the hash of their bytes, as long as a rollout uses them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from store_samples import a_call, a_run, claimed, ending

from agentlightning.errors import NotFoundError
from agentlightning.records import ImageSpan
from agentlightning.store.base import LightningStore
from agentlightning.store.export import export_run

PICTURE, OTHER = b"\x89PNG one", b"\x89PNG two"
NAME, OTHER_NAME = sha256(PICTURE).hexdigest(), sha256(OTHER).hexdigest()


async def test_an_image_is_read_by_its_hash_in_its_run_only(store: LightningStore) -> None:
    [claim] = await claimed(store)
    run_id, rollout_id = claim.rollout.run_id, claim.rollout.id
    await store.put_files(run_id, rollout_id, {NAME: PICTURE})
    await store.put_files(run_id, rollout_id, {NAME: PICTURE, OTHER_NAME: OTHER})
    assert await store.files(run_id, [NAME, OTHER_NAME, "missing"]) == {NAME: PICTURE, OTHER_NAME: OTHER}
    assert await store.files(await a_run(store), [NAME]) == {}


async def test_a_call_says_where_its_images_stand(store: LightningStore) -> None:
    [claim] = await claimed(store)
    call = a_call(claim, suffix_ids=[7, 9, 9, 9], images=[ImageSpan(hash=NAME, start=1, end=4)])
    await store.append_calls([call, a_call(claim)])
    assert [one.images for one in await store.calls([claim.rollout.id])] == [call.images, []]


async def test_an_image_goes_with_the_records_of_the_last_rollout_that_uses_it(store: LightningStore) -> None:
    first, second = await claimed(store, 2)
    run_id = first.rollout.run_id
    await store.put_files(run_id, first.rollout.id, {NAME: PICTURE, OTHER_NAME: OTHER})
    await store.put_files(run_id, second.rollout.id, {NAME: PICTURE})
    await store.finish([ending(first), ending(second)])
    await store.drop_records([first.rollout.id])
    assert await store.files(run_id, [NAME, OTHER_NAME]) == {NAME: PICTURE}
    await store.drop_records([second.rollout.id])
    assert await store.files(run_id, [NAME]) == {}


async def test_images_go_with_their_run(store: LightningStore) -> None:
    [claim] = await claimed(store)
    run_id = claim.rollout.run_id
    await store.put_files(run_id, claim.rollout.id, {NAME: bytes(5000)})
    await store.finish([ending(claim)])
    await store.delete_runs([run_id])
    assert await store.files(run_id, [NAME]) == {}


async def test_a_file_of_no_rollout_stays_as_long_as_its_run(store: LightningStore) -> None:
    [claim] = await claimed(store)
    run_id = claim.rollout.run_id
    await store.put_files(run_id, None, {NAME: PICTURE})
    await store.put_files(run_id, claim.rollout.id, {OTHER_NAME: OTHER})
    await store.finish([ending(claim)])
    await store.drop_records([claim.rollout.id])
    assert await store.files(run_id, [NAME, OTHER_NAME]) == {NAME: PICTURE}
    await store.delete_runs([run_id])
    assert await store.files(run_id, [NAME]) == {}


async def test_an_image_of_nobody_is_refused(store: LightningStore) -> None:
    run_id = await a_run(store)
    with pytest.raises(NotFoundError, match="no rollout 0197 in run"):
        await store.put_files(run_id, "0197", {NAME: PICTURE})
    with pytest.raises(NotFoundError):
        await store.put_files("nowhere", "0197", {NAME: PICTURE})


async def test_an_export_has_each_image_as_a_file(store: LightningStore, tmp_path: Path) -> None:
    [claim] = await claimed(store)
    run_id = claim.rollout.run_id
    await store.put_files(run_id, claim.rollout.id, {NAME: PICTURE, OTHER_NAME: OTHER})
    await store.append_calls([a_call(claim, suffix_ids=[9], images=[ImageSpan(hash=NAME, start=0, end=1)])])
    await export_run(store, run_id, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "images").iterdir()} == {NAME: PICTURE}
