"""Baselines on Spider's held-out questions: simple rules, no training, no agents.

    python examples/text_to_sql/rules.py

The nearest neighbour writes the query of the labelled question that has most words in common (in short names), which is
what a model does that has learned its labels by heart. The last figure is the best that short names allow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import data
from agent import with_real_names
from data import Problem
from database import Database, same_answer
from warm_start import labelled_problems

SEEDS = 3


def main() -> None:
    try:
        held_out, training = data.spider_problems("dev"), data.spider_problems("train")
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    labelled = [labelled_problems(training, seed) for seed in range(SEEDS)]
    report = {
        "held_out": len(held_out),
        "labelled": len(labelled[0]),
        "nearest_labelled": [nearest_neighbour(held_out, known) for known in labelled],
        "nearest_of_all_training": nearest_neighbour(held_out, [problem for problem in training if problem.program]),
        "gold_in_short_names": round(sum(problem.program is not None for problem in held_out) / len(held_out), 4),
    }
    sys.stdout.write(json.dumps(report) + "\n")


def nearest_neighbour(problems: Sequence[Problem], known: Sequence[Problem]) -> float:
    """Share of `problems` that the program of the most similar known one answers, by the Jaccard index of their words."""
    words = [frozenset(problem.row["question"].split()) for problem in known]
    right = 0
    for problem in problems:
        own = frozenset(problem.row["question"].split())
        best = max(range(len(known)), key=lambda index: len(own & words[index]) / len(own | words[index]))
        right += answers(problem, known[best].program or "")
    return round(right / len(problems), 4)


def answers(problem: Problem, program: str) -> bool:
    """Tells whether a program in short names gives the gold rows of a problem."""
    row = problem.row
    with Database(row["database"]) as database:
        found = database.run(with_real_names(program, row["names"]))
        return not found.error and same_answer(found.rows, database.run(row["gold"]).rows, row["ordered"])


if __name__ == "__main__":
    main()
