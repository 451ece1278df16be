"""The credit suite: its figures, its tasks, its forks, and a quick run of it all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

import credit_figures  # noqa: E402
import credit_suite  # noqa: E402
from credit_tasks import TASKS  # noqa: E402


def cell(*success: float, beyond: Sequence[float] = (), correlation: float | None = None) -> dict[str, Any]:
    points = [[100 * place, 10 * place, value] for place, value in enumerate((*success, *beyond))]
    own, further = points[: len(success)], points[len(success) :]
    return {"points": own, "beyond": further, "steps": 1, "correlation": correlation}


class Script:
    """A model that says what a demonstration says, and notes what the agent tells of it."""

    def __init__(self, *said: str) -> None:
        self.said, self.earned, self.decided = list(said), 0.0, list[float]()
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=self))

    async def create(self, **_: Any) -> Any:
        message = SimpleNamespace(content=self.said.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    def earn(self, reward: float) -> None:
        self.earned += reward

    def decide(self, reward: float) -> None:
        self.decided.append(reward)


def test_a_rule_that_needs_half_the_compute_with_every_seed_pays() -> None:
    cells = {
        "relay": {
            "uniform": {str(seed): cell(0.0, 0.4, 0.8, 1.0) for seed in range(3)},
            "learned": {str(seed): cell(0.0, 0.8, 1.0, 1.0) for seed in range(3)},
            "last": {str(seed): cell(0.0, 0.1, 0.1, 0.1) for seed in range(3)},
        }
    }
    found = credit_figures.summary(cells)
    learned = found["learned"]["relay"]
    assert (learned["ratio"], learned["compute_to_0.8"], learned["rollouts_to_0.8"]) == (0.5, 100, 10)
    assert credit_figures.pays(learned)
    assert found["last"]["relay"]["reached"] == 0
    assert not credit_figures.pays(found["last"]["relay"])
    assert "| relay | 3 | `learned` (0.50) | `learned` (0.50)" in credit_figures.verdict(found, ["relay"])


def test_a_rule_that_is_better_by_chance_alone_does_not_pay() -> None:
    curves = [(0.0, 0.8, 1.0, 1.0), (0.0, 0.0, 0.4, 0.8)]
    cells = {
        "relay": {
            "uniform": {str(seed): cell(0.0, 0.4, 0.8, 1.0) for seed in range(2)},
            "learned": {str(seed): cell(*curve) for seed, curve in enumerate(curves)},
        }
    }
    figures = credit_figures.summary(cells)["learned"]["relay"]
    assert figures["ratio_ci"][1] > 1
    assert not credit_figures.pays(figures)


def test_what_a_baseline_needs_beyond_its_budget_counts_for_rules_that_reach_the_goal_alone() -> None:
    cells = {
        "relay": {
            "uniform": {"0": cell(0.0, 0.2, 0.4, beyond=[0.6, 0.8])},
            "learned": {"0": cell(0.0, 0.4, 0.8)},
            "last": {"0": cell(0.0, 0.1, 0.1)},
        }
    }
    found = {rule: credit_figures.figures_of(cells, "relay", rule) for rule in cells["relay"]}
    assert [found[rule].get("ratio") for rule in cells["relay"]] == [None, 0.5, 1.0]
    assert (found["uniform"]["compute_to_0.8"], found["uniform"]["reached"]) == (400, 0)
    assert found["uniform"]["final"] == 0.2  # within the budget


def test_trees_are_compared_with_rows_that_are_computed_alike_and_packing_is_no_rule() -> None:
    curves = {
        "uniform": (0.0, 0.2, 0.4, 0.6, 0.8),
        "packed": (0.0, 0.4, 0.8, 0.8, 0.8),
        "tree": (0.0, 0.8, 0.8, 0.8, 0.8),
    }
    cells = {"sql": {rule: {str(seed): cell(*curve) for seed in range(2)} for rule, curve in curves.items()}}
    found = credit_figures.summary(cells)
    assert (found["packed"]["sql"]["ratio"], found["tree"]["sql"]["ratio"]) == (0.5, 0.5)
    assert credit_figures.verdict(found, ["sql"]).endswith("| sql | 2 | `tree` (0.50) | `tree` (0.50) |")


def test_correlations_are_means_over_the_seeds_that_have_one() -> None:
    cells = {"relay": {"last": {"0": cell(0.0, correlation=0.2), "1": cell(0.0, correlation=0.4), "2": cell(0.0)}}}
    found = credit_figures.summary(cells)["rank_correlation_with_true_credit"]
    assert found == {"last": {"relay": 0.3}}


def test_cells_of_a_seed_come_before_those_of_the_next_and_rules_only_where_they_make_sense() -> None:
    wanted = credit_suite.jobs(list(TASKS), list(credit_suite.CONTESTANTS), 2, "work")
    assert [one.seed for one in wanted] == sorted(one.seed for one in wanted)
    assert {one.task for one in wanted if one.rule == "oracle"} == {"relay", "corridor"}
    assert {one.task for one in wanted if one.rule == "decisive_key"} == {"relay", "corridor"}


def test_a_table_of_the_page_is_replaced_between_its_comments() -> None:
    page = "a <!-- begin x -->old<!-- end x --> b"
    assert credit_suite.between(page, "x", "new") == "a <!-- begin x -->\n\nnew\n\n<!-- end x --> b"


@pytest.mark.parametrize("name", TASKS)
async def test_an_agent_follows_its_demonstrator_who_mostly_fails_and_sometimes_succeeds(name: str) -> None:
    task, rng, rewards = TASKS[name], Random(0), []
    for _ in range(60):
        row = task.sample(rng, "train")
        said = [
            message["content"]
            for conversation in task.demonstrate(row, rng)
            for message in conversation
            if message["role"] == "assistant"
        ]
        model = Script(*said)
        rewards.append(await task.solve(row, model))
        assert model.said == []
        assert len(model.decided) == task.decisive
        assert not model.decided or model.decided == rewards[-1:]
    assert 0.05 < sum(rewards) / len(rewards) < 0.5


@pytest.mark.slow
def test_calls_continue_each_other_and_a_fork_is_where_its_record_was(tmp_path: Path) -> None:
    from agentlightning.demo import tiny_model
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


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run_prints_every_figure_and_its_forks_replay_the_record(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/credit_suite.py", "--quick", "--workers", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"uniform", "forked_lean", "oracle", "rank_correlation_with_true_credit"}
    figures = found["forked_lean"]["relay"]
    assert figures.keys() >= {"rollouts_to_0.8", "compute_to_0.8", "final", "ci", "ratio"}
    assert 0 <= figures["final"] <= 1
    assert found["rank_correlation_with_true_credit"]["oracle"]["relay"] == 1.0
