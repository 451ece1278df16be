"""What is read from a recorded run, and what is refused."""

import json
from pathlib import Path

import pytest
from record_doubles import GROUP, SOURCE, TASKS, dataset, record, recorded_with

from agentlightning.algorithms.offline import DPO, SFT, Distill, OfflineAlgorithm
from agentlightning.errors import ConfigError, DataError, NotFoundError
from agentlightning.records import NewRollout
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "run")
    made.make()
    return made


def tokenizer(path: Path, **vocabulary: int) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return path


async def test_every_successful_training_rollout_is_looked_at_and_no_other(
    store: LightningStore, folder: RunFolder
) -> None:
    ids = await record(store, tasks=200)
    await record(store, mode="eval", tasks=3)
    await store.enqueue([NewRollout(run_id=SOURCE, task={"n": n}, group_id=f"not finished {n}") for n in range(3)])
    notes: list[str] = []
    found = await dataset(store, SFT(), folder, notes).examples()
    assert [example.wanted for example in found] == ids
    assert notes == []


async def test_rows_that_are_too_long_are_left_out_and_counted(store: LightningStore, folder: RunFolder) -> None:
    await record(store)
    notes: list[str] = []
    short = dataset(store, SFT(), folder, notes)
    short.longest = 3
    with pytest.raises(DataError, match="no finished training rollout that sft can learn from"):
        await short.examples()
    assert notes[-1] == "48 recorded rollouts cannot be learned from: 48 × a row has more than 3 tokens"


async def test_a_run_that_does_not_exist_is_named(store: LightningStore, folder: RunFolder) -> None:
    with pytest.raises(NotFoundError, match=r"data\.from_run: source: no such run"):
        await dataset(store, SFT(), folder).examples()


async def test_ids_of_another_tokenizer_are_refused(store: LightningStore, folder: RunFolder, tmp_path: Path) -> None:
    await record(store)
    await recorded_with(store, tokenizer(tmp_path / "theirs", a=1, b=0))
    tokenizer(folder.path, a=0, b=1)
    with pytest.raises(ConfigError, match=r"source was recorded with another tokenizer .* 'distill'"):
        await dataset(store, SFT(), folder).examples()


@pytest.mark.parametrize(
    ("algorithm", "call"),
    [
        (SFT(), {"finish_reason": "abandoned"}),
        (Distill(models=["other"]), {}),
    ],
)
async def test_a_record_without_a_call_to_learn_from_is_an_error(
    store: LightningStore, folder: RunFolder, algorithm: OfflineAlgorithm, call: dict[str, str]
) -> None:
    await record(store, calls=[call])
    (folder.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "eos_token": "x"}))
    (folder.path / "tokenizer.json").write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}}
        )
    )
    with pytest.raises(DataError, match=f"no finished training rollout that {algorithm.name} can learn from"):
        await dataset(store, algorithm, folder).examples()


async def test_calls_of_other_agents_are_context(store: LightningStore, folder: RunFolder) -> None:
    ids = await record(store, calls=[{"agent": "writer"}, {"agent": "reader", "sampled_ids": [8, 9]}])
    found = await dataset(store, SFT(agents=["reader"]), folder).read(ids[:1])
    assert [transition.sampled_ids for transition in found[ids[0]].transitions] == [[8, 9]]
    both = await dataset(store, SFT(), folder).read(ids[:1])
    assert len(both[ids[0]].transitions) == 2


async def test_a_record_that_was_pruned_meanwhile_is_an_error_that_says_so(
    store: LightningStore, folder: RunFolder
) -> None:
    ids = await record(store)
    data = dataset(store, SFT(), folder)
    assert list(await data.read(ids[:3])) == ids[:3]
    await store.drop_records(ids[:1])
    with pytest.raises(DataError, match=f"rollout {ids[0]} can no longer be learned from"):
        await data.read(ids[:3])
    await store.delete_runs([SOURCE])
    with pytest.raises(DataError, match="it was deleted from the store"):
        await data.read(ids[1:3])


async def test_pairs_are_of_one_task_and_the_better_is_wanted(store: LightningStore, folder: RunFolder) -> None:
    ids = await record(store)
    found = await dataset(store, DPO(), folder).examples()
    assert len(found) == TASKS * GROUP // 2
    place = {name: (number // GROUP, number % GROUP % 2) for number, name in enumerate(ids)}
    for example in found:
        assert place[str(example.wanted)][0] == place[str(example.unwanted)][0]
        assert (place[str(example.wanted)][1], place[str(example.unwanted)][1]) == (1, 0)


@pytest.mark.parametrize(
    ("gone", "told"),
    [(False, []), (True, ["source: cannot check that it was recorded with the tokenizer of this model"])],
)
async def test_the_same_tokenizer_in_another_folder_is_taken_and_one_that_is_gone_is_told(
    store: LightningStore, folder: RunFolder, tmp_path: Path, gone: bool, told: list[str]
) -> None:
    await record(store)
    await recorded_with(store, tmp_path / "gone" if gone else tokenizer(tmp_path / "theirs", a=0, b=1))
    tokenizer(folder.path, a=0, b=1)
    notes: list[str] = []
    assert await dataset(store, SFT(), folder, notes).examples()
    assert notes == told


async def test_a_record_without_a_call_of_the_agents_is_an_error(store: LightningStore, folder: RunFolder) -> None:
    await record(store, calls=[{"agent": "writer"}])
    notes: list[str] = []
    with pytest.raises(DataError, match="no finished training rollout"):
        await dataset(store, DPO(agents=["reader"]), folder, notes).examples()
    assert notes == ["48 recorded rollouts cannot be learned from: 48 × no call is of reader"]
