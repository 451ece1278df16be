"""A stored run as tables, and a rollout to read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.analysis.stored_run import RolloutFilters
from agentlightning.errors import NotFoundError


def test_metrics_have_a_row_for_each_step_and_a_column_for_each_name(store_url: str) -> None:
    frame = agl.load_run("tour", store_url).metrics().to_pandas()
    assert list(frame.columns) == ["step", "train/reward_mean", "policy/entropy"]
    assert frame["train/reward_mean"].round(1).tolist() == [0.6, 0.7, 0.8]
    assert frame["policy/entropy"].isna().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 7),
        ({"step": 2}, 2),
        ({"mode": "train", "state": "succeeded"}, 6),
        ({"mode": "eval"}, 1),
        ({"state": "failed"}, 0),
    ],
)
def test_rollouts_are_those_that_every_filter_fits(store_url: str, filters: RolloutFilters, count: int) -> None:
    run = agl.load_run("tour", store_url)
    assert run.rollouts(**filters).num_rows == count
    assert run.calls(**filters).num_rows == 2 * count
    assert run.rewards(**filters).num_rows == 2 * count


def test_tables_have_the_fields_of_their_records(store_url: str) -> None:
    run = agl.load_run("tour", store_url)
    rollout = run.rollouts(step=1).to_pylist()[0]
    assert (rollout["reward"], rollout["task"], rollout["state"]) == (1.0, '{"n":0}', "succeeded")
    call = run.calls(step=1).to_pylist()[1]
    assert (call["parent_id"], call["sampled_ids"], call["logprobs"]) == (f"{rollout['id']}-0", [3], [-0.5])
    assert run.rewards(step=1).to_pandas().groupby("name")["value"].mean().round(3).to_dict() == {
        "reward": 0.55,
        "style": 0.275,
    }


def test_a_rollout_is_shown_call_by_call_as_text_and_in_a_notebook(store_url: str) -> None:
    run = agl.load_run("tour", store_url)
    view = run.show(run.rollouts(step=1).to_pylist()[0]["id"])
    for said in ("capital of Norway?", "Let me think", "<b>Oslo</b>", "reward style 0.5", "final reward 1.0"):
        assert said in str(view)
    assert "decoding: grammar choice, forced 1, logit_bias of 1\n" in str(view)
    assert view._repr_html_().startswith("<pre")
    assert "&lt;b&gt;Oslo&lt;/b&gt;" in view._repr_html_()


async def test_a_notebook_whose_event_loop_runs_reads_beside_a_server(store_url: str) -> None:
    def work() -> tuple[int, int]:
        with agl.AgentLightningServer(store_url) as server:
            return agl.load_run("tour", server.url).rollouts().num_rows, agl.load_run(
                "tour", store_url
            ).calls().num_rows

    assert agl.load_run("tour", store_url).info.name == "tour"
    assert await asyncio.to_thread(work) == (7, 14)


def test_what_is_not_there_is_named(store_url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none: no such run"):
        agl.load_run("none", store_url)
    with pytest.raises(NotFoundError, match=r"new\.db: there is no store yet"):
        agl.load_run("tour", f"sqlite:///{tmp_path / 'new.db'}")
    with pytest.raises(NotFoundError, match="x: no such rollout of run tour"):
        agl.load_run("tour", store_url).show("x")
