"""Several policies in one run: their settings, what each learns from, and that they are killed and resumed as one."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import pytest
from loop_doubles import (
    EVERY,
    GROUP,
    STEPS,
    TASKS,
    Countdown,
    Crashing,
    Noting,
    RememberingEngine,
    killed_and_resumed,
    loop,
    reward_of,
    working,
)

import build
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config.file import load_config
from agentlightning.config.run import Config, parse_config
from agentlightning.engines.base import Engine, PolicyEngines
from agentlightning.errors import ConfigError, LearnerLostError, NoCallsError
from agentlightning.records import Claim, Finish
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RunFolder, policies_in
from agentlightning.trainer.checkpoint_files import last_checkpoint
from agentlightning.trainer.loop import RLLoop
from agentlightning.trainer.policies import ScheduledAlgorithm, TrainedPolicy, check_groups, policy_configs, with_models
from agentlightning.trainer.progress import Silent

LEAST = {"model": {"path": "m"}, "agent": {"run": "agent.py:solve"}, "data": {"train": "tasks.jsonl"}}


def configured(**tables: Any) -> Config:
    return parse_config(LEAST | tables)


def test_a_policys_settings_replace_those_of_the_run_one_by_one() -> None:
    found = policy_configs(
        configured(
            algorithm={"group_size": 4, "entropy": 0.1},
            engine={"optimizer": {"weight_decay": 0.5}, "max_num_seqs": 8},
            policies={
                "white": {"model": "w", "learning_rate": 0.5, "algorithm": {"entropy": 0.2}},
                "black": {"engine": {"max_num_seqs": 16}},
            },
        )
    )
    white, black = found["white"], found["black"]
    assert (white.model.path, black.model.path) == ("w", "m")
    assert (white.trainer.learning_rate, black.trainer.learning_rate) == (0.5, None)
    assert white.algorithm == {"group_size": 4, "entropy": 0.2}
    assert black.algorithm == {"group_size": 4, "entropy": 0.1}
    assert (white.engine.max_num_seqs, black.engine.max_num_seqs) == (8, 16)
    assert black.engine.optimizer.weight_decay == 0.5


@pytest.mark.parametrize(
    ("policies", "sentence"),
    [
        ({"white": {"engine": {"rowz": 1}}}, r"policies\.white: engine\.rowz: no such setting"),
        ({"white": {"learning_rat": 1}}, r"policies\.white\.learning_rat: no such setting"),
        ({"a/b": {}}, r"policies\.a/b: expected a name of letters"),
        ({"white": {}, "judge": {}}, "would take the calls of the policy 'judge'"),
        ({"white": {"learning_rate": 0}}, r"policies\.white\.learning_rate"),
    ],
)
def test_a_wrong_setting_of_a_policy_is_named_with_the_policy(policies: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        policy_configs(configured(policies=policies, external={"e": {"url": "https://host/v1", "models": ["ju*"]}}))


def test_policies_learn_from_the_same_rollouts_and_so_have_groups_of_one_size() -> None:
    with pytest.raises(ConfigError, match=r"policies\.black\.algorithm\.group_size: expected 4 as for 'white'.*got 8"):
        check_groups({"white": LightningRL(group_size=4), "black": LightningRL(group_size=8)})
    with pytest.raises(ConfigError, match=r"policies\.black\.algorithm\.rollouts: expected what 'white' has"):
        check_groups({"white": LightningRL(rollouts="tree"), "black": LightningRL()})


def test_a_checkpoints_models_take_the_place_of_those_that_training_began_with() -> None:
    one = with_models(configured(), {"": Path("c")})
    assert one.model.path == "c"
    several = configured(policies={"white": {}, "black": {}})
    found = policy_configs(with_models(several, {"white": Path("c/white"), "black": Path("c/black")}))
    assert [each.model.path for each in found.values()] == ["c/white", "c/black"]


TOKENS = {"white": [3, 4], "black": [5, 6]}
NAMES = tuple(TOKENS)


async def answer(store: LightningStore, claim: Claim, names: tuple[str, ...], policy: str | None = None) -> None:
    """One call to each of these policies, or by agents of these names to `policy`."""
    rollout = claim.rollout
    for number, name in enumerate(names):
        call = build.call(
            claim,
            f"{rollout.id}-{number}",
            suffix_ids=[1, number],
            sampled_ids=[*TOKENS[name], 10 + rollout.replica],
            policy=policy or name,
            model=name,
            agent=name,
            messages=[],
        )
        await store.append_calls([call])
    told = [("reward", reward_of(claim), "return"), *((name, float(name == "black"), "emitted") for name in names)]
    rewards = tuple(
        build.reward(claim, value, f"{rollout.id}-{name}", name=name, source=source) for name, value, source in told
    )
    await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=rewards)])


def agents(
    store: LightningStore, run: str = "run", names: tuple[str, ...] = NAMES, policy: str | None = None
) -> AbstractAsyncContextManager[None]:
    return working(store, run, lambda claim, _: answer(store, claim, names, policy))


class Game(PolicyEngines):
    """Engines of both policies, whose updates can be compared."""

    def __init__(self, kind: type[RememberingEngine] = RememberingEngine) -> None:
        self.each = {name: kind() for name in NAMES}
        super().__init__(cast(dict[str, Engine], self.each))

    @property
    def updates(self) -> dict[str, list[str]]:
        return {name: engine.updates for name, engine in self.each.items()}


def game(
    store: Any,
    engine: Any,
    folder: Path,
    run: str = "run",
    progress: Silent | None = None,
    **algorithms: LightningRL,
) -> RLLoop:
    made = loop(store, engine, folder, run)
    made.progress = made.metric_logger.progress = progress or Silent()
    policies = {}
    for name, rate in (("white", 0.01), ("black", 0.02)):
        own = made.config.model_copy(update={"trainer": made.config.trainer.model_copy(update={"learning_rate": rate})})
        algorithm = algorithms.get(name) or LightningRL(group_size=GROUP, minibatches=1)
        policies[name] = TrainedPolicy(config=own, algorithm=algorithm, value={"model": name})
    return dataclasses.replace(made, policies=policies)


class Watching(RememberingEngine):
    """Remembers which tokens were trained; those above 9 tell replicas apart."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: set[int] = set()

    async def forward_backward(self, sequences: Any, loss: Any, policy: str = "default") -> dict[str, float]:
        for row in sequences:
            trained = {token for token, own in zip(row.tokens, row.mask, strict=True) if own}
            self.trained |= {token for token in trained if token < 10}
        return await super().forward_backward(sequences, loss)


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, {3, 4, 5, 6}), (("white",), {3, 4}), (("black", "red"), {5, 6})]
)
async def test_only_the_calls_of_the_agents_that_are_named_are_learned_from(
    store: LightningStore, tmp_path: Path, chosen: tuple[str, ...] | None, expected: set[int]
) -> None:
    engine = Watching()
    algorithm = LightningRL(group_size=GROUP, minibatches=1, agents=chosen)
    async with agents(store, policy="default"):
        await loop(store, engine, tmp_path, algorithm=algorithm).run(resume=False)
    assert engine.trained == expected


async def test_each_policy_learns_from_its_own_calls_at_its_own_rate_and_is_in_every_version_and_checkpoint(
    store: LightningStore, tmp_path: Path
) -> None:
    both = Game(Watching)
    async with agents(store):
        await game(store, both, tmp_path).run(resume=False)
    watched = cast(dict[str, Watching], both.each)
    assert {name: engine.trained for name, engine in watched.items()} == {
        name: set(tokens) for name, tokens in TOKENS.items()
    }
    rates = {name: [float(update.split()[1]) for update in updates] for name, updates in both.updates.items()}
    assert rates["white"][0] == 0.01
    assert rates["black"] == pytest.approx([2 * rate for rate in rates["white"]])
    white, black = both.each.values()
    assert white.served == black.served == sorted(set(white.served))
    resources = {one.name: one for one in await store.resources("run")}
    assert {name: (resources[name].version, resources[name].value["model"]) for name in NAMES} == {
        name: (white.served[-1], name) for name in NAMES
    }
    checkpoint = await last_checkpoint(store, RunFolder(tmp_path, "run"))
    assert checkpoint is not None
    folder = Path(checkpoint.path)
    assert policies_in(folder) == {"black": folder / "black", "white": folder / "white"}
    assert RunFolder(tmp_path, "run").has_checkpoint()


async def test_policies_of_different_algorithms_have_outcomes_and_metrics_of_their_own(
    store: LightningStore, tmp_path: Path
) -> None:
    # black's own reward is always 1: nothing to compare, so nothing is learned by it
    black = LightningRL(group_size=GROUP, minibatches=1, reward_weights={"black": 1.0})
    both = Game()
    async with agents(store):
        await game(store, both, tmp_path, black=black).run(resume=False)
    assert both.updates["white"]
    assert both.updates["black"] == []
    rows = [row for row in RunFolder(tmp_path, "run").metrics() if row["kind"] == "step"]
    for row in rows:
        assert row["policies/black/train/zero_variance"] == 1.0
        assert row["policies/black/train/reward_mean"] == 1.0
        assert row["policies/white/train/reward_mean"] == row["train/reward_mean"]
        assert row["policies/white/train/zero_variance"] < 1.0
        assert (
            row["train/tokens_sampled"]
            == row["policies/white/train/tokens_sampled"] + row["policies/black/train/tokens_sampled"]
        )
        assert row["rollout/turns"] == 2.0
    consumed = {one.outcome for step in await store.steps("run") for one in step.consumed}
    assert "trained" in consumed  # by white


async def test_a_policy_with_rewards_of_its_own_is_evaluated_by_them(store: LightningStore, tmp_path: Path) -> None:
    own = {
        name: LightningRL(group_size=GROUP, minibatches=1, reward_weights={name: weight})
        for name, weight in (("white", 1.0), ("black", 0.5))
    }
    async with agents(store):
        await game(store, Game(), tmp_path, **own).run(resume=False)
    rows = [row for row in RunFolder(tmp_path, "run").metrics() if row["kind"] == "eval/greedy"]
    assert {
        (row["policies/white/eval/greedy/reward_mean"], row["policies/black/eval/greedy/reward_mean"]) for row in rows
    } == {(0.0, 0.5)}
    assert all(row["eval/greedy/reward_mean"] in (0.0, 1.0) for row in rows)


@EVERY
async def test_a_run_of_two_policies_killed_at_any_verb_resumes_to_the_state_of_one_that_was_not(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    whole = Game()
    async with agents(store):
        await game(store, whole, tmp_path / "whole").run(resume=False)
    assert whole.updates["white"] != whole.updates["black"]
    runs = killed_and_resumed(
        store, every, lambda *made: game(*made[:2], tmp_path, made[2]), lambda run: agents(store, run), Game
    )
    async for run, again in runs:
        assert again.updates == whole.updates, run
        trained = await store.rollouts(RolloutQuery(run_id=run, mode="train"))
        assert len(trained) == STEPS * TASKS * GROUP, "a rollout was sampled again"
        consumed = [one.rollout_id for step in await store.steps(run) for one in step.consumed]
        assert sorted(consumed) == [rollout.id for rollout in trained]


@pytest.mark.parametrize("ticks", [3, 20])
async def test_a_lost_learner_takes_all_policies_back_to_the_checkpoint(
    store: LightningStore, tmp_path: Path, ticks: int
) -> None:
    whole = Game()
    async with agents(store):
        await game(store, whole, tmp_path / "whole").run(resume=False)
    await store.create_run("test", {}, "again")
    both, countdown = Game(), Countdown(ticks, LearnerLostError)
    lossy = PolicyEngines({"white": Crashing(both.each["white"], countdown), "black": both.each["black"]})  # type: ignore[dict-item]
    async with agents(store, "again"):
        assert await game(store, lossy, tmp_path, "again").run(resume=False) == STEPS
    assert countdown.left <= 0
    assert both.updates == whole.updates


async def test_a_policy_that_nobody_calls_is_told_of_and_the_others_learn(
    store: LightningStore, tmp_path: Path
) -> None:
    both, progress = Game(), Noting()
    async with agents(store, names=("white",)):
        await game(store, both, tmp_path, progress=progress).run(resume=False)
    assert both.updates["white"]
    assert both.updates["black"] == []
    told = [note for note in progress.notes if "no call of this step is learned from by policy 'black'" in note]
    assert len(told) == STEPS
    assert told[0].endswith("agents and models of its calls: white")


async def test_agents_that_nobody_is_stop_the_run_with_the_names_that_there_are(
    store: LightningStore, tmp_path: Path
) -> None:
    own = {name: LightningRL(group_size=GROUP, minibatches=1, agents=("writer",)) for name in NAMES}
    async with agents(store):
        with pytest.raises(
            NoCallsError, match=r"with agents = \['writer'\].*agents and models of its calls: black, white"
        ):
            await game(store, Game(), tmp_path, **own).run(resume=False)


def test_the_runs_model_may_be_left_out_and_is_an_error_where_no_policy_uses_it() -> None:
    both = {"white": {"model": "w"}, "black": {"model": "b"}}
    found = policy_configs(parse_config({name: LEAST[name] for name in ("agent", "data")} | {"policies": both}))
    assert [one.model.path for one in found.values()] == ["w", "b"]
    with pytest.raises(ConfigError, match=r"model\.path: has no effect"):
        configured(policies=both)
    read_again = parse_config(parse_config(LEAST | {"model": {}, "policies": both}).model_dump(mode="json"))
    assert policy_configs(read_again) == found


def test_paths_of_policies_and_predicates_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "which.py").write_text("")
    (tmp_path / "w").mkdir()
    (tmp_path / "run.toml").write_text(
        '[agent]\nrun = "a.py:f"\n[data]\ntrain = "t"\n[algorithm]\nagents = ["writer", "which.py:short"]\n'
        '[policies.white]\nmodel = "w"\nalgorithm = { agents = ["which.py:long"] }\n'
    )
    read = load_config(tmp_path / "run.toml")
    assert read.algorithm["agents"] == ["writer", f"{tmp_path}/which.py:short"]
    assert read.policies["white"].algorithm["agents"] == [f"{tmp_path}/which.py:long"]
    assert read.policies["white"].model == f"{tmp_path}/w"


async def test_each_policy_has_a_schedule_of_its_own_and_says_so(store: LightningStore, tmp_path: Path) -> None:
    progress = Noting()
    made = game(store, Game(), tmp_path, progress=progress)
    black = made.policies["black"]
    parts = [
        ScheduledAlgorithm(from_step=first, config=black.config, algorithm=algorithm)
        for first, algorithm in ((1, black.algorithm), (2, dataclasses.replace(black.algorithm, advantage="rloo")))
    ]
    made = dataclasses.replace(
        made, policies=dict(made.policies) | {"black": dataclasses.replace(black, schedule=parts)}
    )
    async with agents(store):
        await made.run(resume=False)
    rows = [row for row in RunFolder(tmp_path, "run").metrics() if row["kind"] == "step"]
    assert [row["policies/black/train/schedule_entry"] for row in rows] == [0.0, 1.0, 1.0]
    assert not any("policies/white/train/schedule_entry" in row or "train/schedule_entry" in row for row in rows)
    assert [note for note in progress.notes if "schedule" in note] == [
        "step 2: from here on by policies.black.algorithm.schedule[1]"
    ]
