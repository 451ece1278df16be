"""`load_run` over each kind of store that another process can open."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import a_call, claimed, ending

import agentlightning as agl
from agentlightning.records import Metric
from agentlightning.store.open import open_store


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
async def test_a_run_is_loaded_from_each_kind_of_store(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url = f"sqlite:///{tmp_path}/agl.db" if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    async with open_store(url) as store:
        [claim] = await claimed(store)
        call, run_id = a_call(claim), claim.rollout.run_id
        await store.append_calls([call])
        await store.finish([ending(claim)])
        await store.log_metrics([Metric(run_id=run_id, step=1, name="train/reward_mean", value=0.5)])

    run = agl.load_run(run_id, url)
    assert run.metrics().to_pylist() == [{"step": 1, "train/reward_mean": 0.5}]
    assert [row["id"] for row in run.rollouts(state="succeeded").to_pylist()] == [claim.rollout.id]
    assert run.calls().to_pylist()[0]["sampled_ids"] == list(call.sampled_ids)
    assert claim.rollout.id in str(run.show(claim.rollout.id))
