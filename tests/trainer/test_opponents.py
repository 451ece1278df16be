"""Opponents: policies that agents meet and that are never trained, frozen or as another policy was at a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from loop_doubles import GROUP, STEPS, TASKS, RememberingEngine, agents, killed_and_resumed, loop

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config.engine import PolicyConfig
from agentlightning.config.run import Config, parse_config
from agentlightning.engines.base import PolicyEngines
from agentlightning.errors import ConfigError
from agentlightning.records import Checkpoint, Resource, VersionSpan
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.loop import RLLoop
from agentlightning.trainer.policies import Opponents, opponent_configs, policy_configs, with_models
from agentlightning.trainer.processes import Processes
from agentlightning.trainer.scheduler import PublishedVersions, Staleness
from agentlightning.training_types import Trajectory
from build import transition

LEAST = {"model": {"path": "m"}, "agent": {"run": "agent.py:play"}, "data": {"train": "tasks.jsonl"}}


def configured(policies: Any, **tables: Any) -> Config:
    return parse_config(LEAST | {"policies": policies} | tables)


def test_an_opponent_is_sampled_as_its_policy_is_and_has_no_settings_of_learning() -> None:
    config = configured(
        {
            "player": {"model": "p", "engine": {"max_num_seqs": 16}},
            "old": {"snapshot_of": "player", "window": 2, "engine": {"device": "cpu"}},
            "first": {"model": "f", "frozen": True},
        },
        engine={"lora_rank": 4, "dtype": "bfloat16", "listen": "127.0.0.1:9000"},
        model={"path": "p"},
    )
    assert list(policy_configs(config)) == ["player"]
    old, first = opponent_configs(config).values()
    assert (old.model.path, first.model.path) == ("p", "f")
    assert (old.engine.max_num_seqs, old.engine.device, old.engine.dtype) == (16, "cpu", "bfloat16")
    assert (old.engine.lora_rank, old.engine.listen, first.engine.lora_rank) == (None, None, None)


def test_an_engine_that_samples_only_what_it_trains_is_refused_for_an_opponent(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "agent.py").write_text("def play(task, llm):\n    return 1.0\n")
    (tmp_path / "trains.py").write_text(
        "from agentlightning.engines.base import Support\n\n\nclass Trains:\n"
        "    support = Support(engine='trains')\n\n    def __init__(self, setup):\n        pass\n"
    )
    config = configured(
        {"player": {}, "it": {"frozen": True}},
        agent={"run": f"{tmp_path}/agent.py:play"},
        model={"path": str(tmp_path / "m")},
        engine={"name": f"{tmp_path}/trains.py:Trains"},
    )
    with pytest.raises(
        ConfigError, match=r"policies\.it: the engine '.*trains\.py:Trains' samples only what it trains"
    ):
        Processes(config, RunFolder(tmp_path, "run"))


class Sampling(RememberingEngine):
    """An engine that samples alone: the number of updates behind the weights of each version that it served."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, int] = {}

    async def publish(self, version: int, policy: str = "default") -> None:
        self.weights[version] = len(self.updates)

    async def forward_backward(self, *_: Any, **__: Any) -> dict[str, float]:
        raise AssertionError("an opponent is never trained")


def play(
    store: Any, engine: Any, folder: Path, run: str = "run", own: PolicyConfig | None = None, **trainer: Any
) -> RLLoop:
    made = loop(store, engine, folder, run, algorithm=LightningRL(group_size=GROUP, minibatches=1), **trainer)
    made.opponents = Opponents(
        settings={"old": own or PolicyConfig(snapshot_of="default")},
        values={"old": {"model": "old"}},
        trained=["default"],
        seed=0,
        folder=made.folder,
        store=store,
        engine=engine,
    )
    return made


class Both(PolicyEngines):
    def __init__(self) -> None:
        self.player, self.old = RememberingEngine(), Sampling()
        super().__init__(cast(Any, {"default": self.player, "old": self.old}))


async def test_a_snapshot_is_the_policy_as_it_was_at_the_latest_checkpoint_before_the_step(
    store: LightningStore, tmp_path: Path
) -> None:
    both = Both()
    async with agents(store):
        await play(store, both, tmp_path, steps=5, checkpoint_every=2).run(resume=False)
    rows = [row for row in RunFolder(tmp_path, "run").metrics() if row["kind"] == "step"]
    assert [row["policies/old/policy/snapshot_step"] for row in rows] == [0, 0, 2, 2, 4]
    published = await store.resources("run", "old", latest=False)
    assert [(one.version, one.value["snapshot_step"], one.step) for one in published] == [
        (1, 0, 1),
        (2, 2, 3),
        (3, 4, 5),
    ]
    assert both.old.weights == {2: 2, 3: 4}
    assert len(both.player.updates) == 5


async def test_a_frozen_policy_is_published_once_and_keeps_its_weights(store: LightningStore, tmp_path: Path) -> None:
    both = Both()
    async with agents(store):
        await play(store, both, tmp_path, own=PolicyConfig(frozen=True)).run(resume=False)
    assert [one.value for one in await store.resources("run", "old", latest=False)] == [{"model": "old"}]
    assert both.old.weights == {}


async def test_each_step_draws_one_of_the_latest_checkpoints_in_the_window(
    store: LightningStore, tmp_path: Path
) -> None:
    for step in range(6):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        if step != 4:  # of another host
            (path / "learner.pt").write_text(f"[{[*'u' * step]}, []]".replace("'", '"'))
        await store.put_checkpoint(Checkpoint(run_id="run", step=step, path=str(path), version=step + 1))
    both = Both()
    made = play(store, both, tmp_path, own=PolicyConfig(snapshot_of="default", window=2))
    assert made.opponents is not None
    drawn = set()
    for step in range(6, 30):
        await made.opponents.serve(step)
        drawn.add(made.opponents.metrics()["policies/old/policy/snapshot_step"])
    assert drawn == {3.0, 5.0}
    assert {*both.old.weights.values()} == {3, 5}
    before = len(await store.resources("run", "old", latest=False))
    await made.opponents.serve(1)  # no checkpoint is earlier: it goes on
    assert len(await store.resources("run", "old", latest=False)) == before


@pytest.mark.parametrize("every", [83, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long])])
async def test_a_run_with_an_opponent_killed_at_any_verb_resumes_to_the_state_of_one_that_was_not(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    whole = Both()
    async with agents(store):
        await play(store, whole, tmp_path / "whole").run(resume=False)
    runs = killed_and_resumed(
        store,
        every,
        lambda *made: play(*made[:2], tmp_path, made[2]),
        lambda run: agents(store, run=run),
        Both,
    )
    async for run, resumed in runs:
        assert resumed.player.updates == whole.player.updates, run
        assert len(await store.rollouts(RolloutQuery(run_id=run, mode="train"))) == STEPS * TASKS * GROUP
        newest = (await store.resources(run, "old"))[0]
        assert newest.value["snapshot_step"] in (2, 3)  # 3 where it was killed after its last checkpoint
        assert resumed.old.weights[newest.version] == newest.value["snapshot_step"]


def test_versions_of_opponents_make_no_rollout_stale() -> None:
    versions = PublishedVersions()
    published = Resource(run_id="run", name="default", kind="policy", value={})
    versions.record(replace(published, version=version, step=version - 1) for version in (1, 2, 3, 4))
    calls = [
        transition(policy, sampled_ids=[2], versions=[VersionSpan(version=version, start=0, end=1)], policy=policy)
        for policy, version in (("default", 4), ("old", 1))
    ]
    trajectory = Trajectory(rollout_id="r", group_id="g", reward=0.0, transitions=calls)
    staleness = Staleness(versions=versions, step=4, bound=0, policies=("default",))
    assert staleness.of(trajectory) == 0
    assert staleness.sort([[trajectory]])[2]["mixed_versions"] == 0.0


def test_only_what_is_trained_gets_a_checkpoints_weights() -> None:
    table = {name: LEAST[name] for name in ("agent", "data")}  # the run's model may be left out
    alone = parse_config(table | {"policies": {"player": {"model": "p"}, "old": {"snapshot_of": "player"}}})
    assert opponent_configs(alone)["old"].model.path == "p"
    config = configured({"player": {}, "old": {"snapshot_of": "player"}, "first": {"frozen": True}})
    found = with_models(config, {"": Path("c")})
    assert [one.model.path for one in policy_configs(found).values()] == ["c"]
    assert {alias: one.model.path for alias, one in opponent_configs(found).items()} == {"old": "c", "first": "m"}


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"frozen": True, "snapshot_of": "player"}, r"policies\.it: frozen conflicts with snapshot_of"),
        ({"frozen": True, "learning_rate": 0.1}, r"policies\.it\.learning_rate: has no effect with frozen"),
        ({"frozen": True, "window": 2}, r"policies\.it\.window: has no effect with frozen"),
        (
            {"snapshot_of": "player", "algorithm": {"kl": 0.1}},
            r"policies\.it\.algorithm: has no effect with snapshot_of",
        ),
        ({"snapshot_of": "player", "model": "x"}, r"policies\.it\.model: has no effect with snapshot_of"),
        ({"snapshot_of": "it"}, r"policies\.it\.snapshot_of: expected a policy that is trained \(player\), got 'it'"),
        (
            {"snapshot_of": "player", "window": 3},
            r"policies\.it\.window: expected at most trainer\.keep_checkpoints, 2",
        ),
        ({"window": 2}, r"policies\.it\.window: has no effect without snapshot_of"),
        (
            {"snapshot_of": "player", "engine": {"lora_rank": 4}},
            r"policies\.it\.engine\.lora_rank: has no effect on a policy",
        ),
    ],
)
def test_settings_of_an_opponent_that_would_do_nothing_are_errors(own: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        opponent_configs(configured({"player": {}, "it": own}))


def test_a_run_trains_at_least_one_of_its_policies() -> None:
    with pytest.raises(ConfigError, match=r"policies: expected at least one that is trained"):
        configured({"it": {"frozen": True}})
