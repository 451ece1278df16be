"""The claims about learning: their figures, that nothing is done twice, their tasks, and a quick run of each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "benchmarks" / "learning")]

import instructed  # noqa: E402
from claim import Cell, Claim, Outcome  # noqa: E402
from credit_tasks import TASKS  # noqa: E402

import learning  # noqa: E402
from agentlightning.demo import lookup, tiny_model  # noqa: E402

MIN_TURNS = {"calculator": 1.5, "rag-2wiki": 1.5, "text_to_sql-generated": 1.2}
"""Of a rollout, after few epochs: the calculator is called, paragraphs are searched, and what fails is rewritten."""
ARMS = {"credit-relay": "uniform,forked_lean,oracle", "forks": "lookup,by_chance"}
"""Of a quick run, where not all are run."""


def outcomes(*curves: list[float], **figures: float) -> dict[str, Outcome]:
    """By seed, curves with an evaluation after every 100 of cost."""
    return {
        str(seed): Outcome([(100 * place, value) for place, value in enumerate(curve)], dict(figures))
        for seed, curve in enumerate(curves)
    }


def claim(**more: Any) -> Claim:
    return Claim(arms=("uniform", "learned", "last"), measure=lambda _: Outcome([]), **more)


def benchmark(*options: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/learning.py", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_a_ratio_is_the_cost_to_the_goal_over_the_baselines_with_the_same_seed() -> None:
    found = {
        "uniform": outcomes(*[[0.0, 0.4, 0.8, 1.0]] * 3),
        "learned": outcomes(*[[0.0, 0.8, 1.0, 1.0]] * 3, rollouts=7.0),
        "last": outcomes(*[[0.0, 0.1, 0.1, 0.1]] * 3),
    }
    figures = learning.summary(claim(goal=0.8), found)
    assert figures["learned"] == {
        "rollouts": 7.0,
        "before": 0.0,
        "after": 1.0,
        "ci": [1.0, 1.0],
        "cost_to_goal": 100.0,
        "reached": 3,
        "ratio": 0.5,
        "ratio_ci": [0.5, 0.5],
    }
    assert "ratio" not in figures["uniform"]
    assert (figures["last"]["reached"], figures["last"]["cost_to_goal"], figures["last"]["ratio"]) == (0, 300, 1.5)
    assert (
        "| learned | 0.000 | 1.000 | 1.000 | 1.000 | 1.000 (1.00 to 1.00) | 0.500 (0.50 to 0.50) |"
        in learning.table(found, figures)
    )


def test_an_arm_that_is_better_by_chance_has_an_interval_beyond_1() -> None:
    found = {
        "uniform": outcomes(*[[0.0, 0.4, 0.8, 1.0]] * 2),
        "learned": outcomes([0.0, 0.8, 1.0, 1.0], [0.0, 0.0, 0.4, 0.8]),
    }
    assert learning.summary(claim(goal=0.8), found)["learned"]["ratio_ci"][1] > 1


def test_an_arm_has_its_own_baseline_and_one_seed_has_no_interval() -> None:
    found = {
        "uniform": outcomes([0.0, 0.2, 0.4, 0.8]),
        "packed": outcomes([0.0, 0.4, 0.8]),
        "tree": outcomes([0.0, 0.8], after=0.7),
    }
    figures = learning.summary(claim(goal=0.8, baselines={"tree": "packed"}), found)["tree"]
    assert (figures["ratio"], figures["ratio_ci"], figures["after"], figures["ci"]) == (0.5, None, 0.7, None)


def test_a_finished_arm_is_not_run_again_and_curves_are_drawn(tmp_path: Path) -> None:
    results, arms = tmp_path / "results.json", {"sync": 0.4, "async": 0.6}
    kept = {
        arm: {str(seed): {"points": [[0, 0.2], [32, end]], "figures": {"train_s": 10.0}} for seed in range(2)}
        for arm, end in arms.items()
    }
    results.write_text(json.dumps({"async": kept}))
    cells = [Cell("async", arm, seed, tmp_path) for seed in range(2) for arm in arms]
    found = learning.run(learning.load("async"), cells, results, workers=1)
    assert learning.summary(learning.load("async"), found) == {
        arm: {"train_s": 10.0, "before": 0.2, "after": end, "ci": [end, end]} for arm, end in arms.items()
    }
    learning.draw(learning.load("async"), found, tmp_path / "curve.png", "async")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_a_claim_lacks_is_refused_with_those_it_has() -> None:
    done = benchmark("--claim", "async", "--arms", "sync,late")
    assert done.returncode == 2
    assert "--arms: expected some of sync, async, got 'late'" in done.stderr


def test_the_kept_results_are_of_claims_and_arms_that_exist() -> None:
    kept = json.loads((REPOSITORY / "benchmarks" / "results" / "credit.json").read_text())
    assert {name: set(arms) <= set(learning.load(name).arms) for name, arms in kept.items()} == dict.fromkeys(
        kept, True
    )


def test_idle_is_the_time_in_which_the_trainer_waits_and_too_few_rollouts_run() -> None:
    from asynchronous import idle

    waits = [(0.0, 4.0), (10.0, 12.0)]
    running = [(1.0, 3.0), (2.0, 5.0), (2.5, 11.0)]
    assert idle(waits, running, full=1) == pytest.approx(1.0 + 1.0)  # before the first begins, after the last has ended
    assert idle(waits, running, full=2) == pytest.approx(2.0 + 2.0)
    assert idle(waits, running, full=3) == pytest.approx(2.5 + 1.0 + 2.0)


# --- the examples -------------------------------------------------------------------------------------------------------


def test_every_example_has_the_files_that_its_claims_run() -> None:
    from example_runs import EXAMPLES

    for example in EXAMPLES.values():
        assert (example.path / example.config).is_file()
        assert {file.name for file in example.path.iterdir()} >= {
            *("agent.py", "data.py", "warm_start.py", "pretrained.toml", "README.md", "curve.png")
        }


@pytest.mark.parametrize("example", ["calculator", "text_to_sql", "rag"])
def test_an_agent_and_what_it_imports_know_nothing_of_training(example: str) -> None:
    seen, pending = set(), ["agent"]
    while pending:
        source = (REPOSITORY / "examples" / example / f"{pending.pop()}.py").read_text()
        assert "agentlightning" not in source
        found = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)) - seen
        seen |= found
        pending += [name for name in found if (REPOSITORY / "examples" / example / f"{name}.py").exists()]
    assert len(seen) > 3


# --- tasks --------------------------------------------------------------------------------------------------------------


class Script:
    """A model that says what a demonstration says, and notes what the agent tells of it."""

    def __init__(self, *said: str) -> None:
        self.said, self.decided = list(said), list[float]()
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **_: Any) -> Any:
        message = SimpleNamespace(content=self.said.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    def earn(self, reward: float) -> None:
        """Step rewards are not looked at."""

    def decide(self, reward: float) -> None:
        self.decided.append(reward)


@pytest.mark.parametrize("name", TASKS)
async def test_an_agent_follows_its_demonstrator_who_mostly_fails_and_sometimes_succeeds(name: str) -> None:
    task, rng, rewards = TASKS[name], Random(0), []
    for _ in range(60):
        row = task.sample(rng, "train")
        demos = task.demonstrate(row, rng)
        model = Script(*(one["content"] for demo in demos for one in demo if one["role"] == "assistant"))
        rewards.append(await task.solve(row, model))
        assert model.said == []
        assert len(model.decided) == task.decisive
        assert not model.decided or model.decided == rewards[-1:]
    assert 0.05 < sum(rewards) / len(rewards) < 0.5


@pytest.mark.slow
def test_calls_continue_each_other_and_a_fork_is_where_its_record_was(tmp_path: Path) -> None:
    from credit_agents import Execution, Words

    task, rng = TASKS["retrieval"], Random(0)
    row = next(row for row in iter(lambda: task.sample(rng, "train"), None) if len(row["queries"]) == 3)
    said = [*(f"<find>{query}</find>" for query in row["queries"]), f"Answer: {row['answer']}"]
    tiny_model.build(tmp_path, [row["question"], *said], special_words=task.special_words)
    words = Words(tmp_path)

    def answer(execution: Execution, text: str) -> None:
        ids = words.encode([{"role": "assistant", "content": text}])[1:-1]  # without its own role and the next one's
        execution.answer(ids, [0.0] * len(ids))

    whole = Execution("1/0", row, task.solve, words)
    for text in said:
        answer(whole, text)
    fork = whole.fork("1/0+0", 2)
    answer(fork, said[2])
    answer(fork, "Answer: nobody")
    record, forked = whole.trajectory(steps=True), fork.trajectory(steps=True)
    assert (record.reward, forked.reward) == (1.0, 0.0)
    assert [one.parent is None for one in record.transitions] == [True, False, False, False]
    assert [one.prompt_ids for one in forked.transitions] == [one.prompt_ids for one in record.transitions[2:]]
    assert forked.replayed == {f"1/0+0/0{place}": f"1/0/0{place}" for place in (0, 1)}
    assert [one.reward for one in record.transitions] == [0.2, 0.2, 0.2, 0.0]


def demonstrated(prompt: str) -> float:
    """The mean reward of the demonstrator of the claim `prompts` under a prompt."""
    rng, total = Random(1), 0.0
    for _ in range(1000):
        task = lookup.sample(rng, "train")
        said = [one["content"] for one in instructed.demonstrate(task, prompt, rng) if one["role"] == "assistant"]
        total += instructed.judge(task, [one[6:-7] for one in said[:-1]], said[-1])["score"]
    return total / 1000


def test_each_good_edit_helps_the_demonstrator_and_idle_ones_do_not() -> None:
    good = f"{instructed.OPENING} {instructed.LOOK_UP} {instructed.GO_ON} {instructed.BARE}"
    best = demonstrated(good)
    assert demonstrated(instructed.SEED_PROMPT) < 0.1
    for sentence in (instructed.LOOK_UP, instructed.GO_ON, instructed.BARE):
        assert demonstrated(good.replace(sentence, "")) < best - 0.08
    for sentence in (instructed.FROM_MEMORY, instructed.SENTENCE):
        assert demonstrated(f"{good} {sentence}") < best - 0.03
    assert demonstrated(f"{good} {' '.join(instructed.DISTRACTORS)}") == best
    assert best < 0.65, "the rest is for weights to learn"


# --- quick runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["async", "credit-relay", "feedback", "forks", "pictures", "prompts", *MIN_TURNS])
def test_a_quick_run_of_every_claim_prints_its_figures(name: str, tmp_path: Path) -> None:
    if name in MIN_TURNS and "AGL_DATA" not in os.environ:
        pytest.skip("AGL_DATA names no data")
    arms = ("--arms", ARMS[name]) if name in ARMS else ()
    done = benchmark("--claim", name, "--quick", "--work", str(tmp_path), *arms, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["arms"]
    assert list(found) == (ARMS[name].split(",") if name in ARMS else list(learning.load(name).arms))
    if name == "forks":
        assert found["lookup"]["replayed_equal"] == 1.0
        assert found["by_chance"].get("caught", 1.0) == 1.0
        return
    assert all(0 <= one["before"] <= 1 and 0 <= one["after"] <= 1 for one in found.values())
    if name == "pictures":
        assert found["trained"]["before"] <= 0.3
        assert found["trained"]["exact_share"] == 1.0
    if name == "async":
        assert all(0 < one["busy_share"] <= 1 and one["train_s"] > 0 for one in found.values())
    if name in MIN_TURNS:
        (metrics,) = tmp_path.glob("*/seed-0/trained/runs/*/metrics.jsonl")
        steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] == "step"]
        assert [row["step"] for row in steps] == [1, 2]
        assert all(row["rollout/forked_calls"] == 0 and row["rollout/failed"] == 0 for row in steps)
        assert statistics.fmean(row["rollout/turns"] for row in steps) > MIN_TURNS[name]
        assert found["trained"]["rollouts"] == sum(row["rollout/count"] for row in steps)


def test_named_rewards_and_data_sets_of_a_greedy_evaluation_have_their_means(tmp_path: Path) -> None:
    from example_runs import parts

    assert asyncio.run(_parts(tmp_path / "agl.db", parts)) == [{"mawps": 0.5, "repaired": 0.5, "svamp": 1.0}, {}]


async def _parts(database: Path, parts: Any) -> list[dict[str, float]]:
    from agentlightning.records import Finish, NewRollout, Reward, WorkerStatus
    from agentlightning.store.open import open_store

    evaluated = [("eval:0:greedy:0", "mawps", 1.0), ("eval:0:greedy:1", "mawps", 0.0)]
    evaluated += [("eval:0:greedy:2", "svamp", 1.0), ("eval:0:sampled:0", "mawps", 1.0), ("a task", "mawps", 1.0)]
    async with open_store(f"sqlite:///{database}") as store:
        await store.create_run("run", {}, "run")
        await store.enqueue(
            [
                NewRollout(
                    run_id="run",
                    task={"set": source, "right": right},
                    group_id=group,
                    step=0,
                    mode="eval" if group.startswith("eval") else "train",
                )
                for group, source, right in evaluated
            ]
        )
        worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
        for claimed in await store.claim(worker, limit=5):
            place = {"run_id": "run", "rollout_id": claimed.rollout.id, "attempt": 1, "source": "return"}
            values = {"repaired": 0.5, "reward": claimed.rollout.task["right"]}  # the last is the rollout's
            rewards = tuple(
                Reward(id=f"{claimed.rollout.id} {name}", name=name, value=value, **place)
                for name, value in values.items()
            )
            await store.finish([Finish(lease=claimed.lease, state="succeeded", rewards=rewards)])
    return [await parts(database, step) for step in (0, 1)]
