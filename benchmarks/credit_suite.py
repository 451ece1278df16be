"""Which credit rule earns its cost? Five agents of a tiny language model, every rule, equal compute.

    python benchmarks/credit_suite.py [--seeds 5] [--tasks relay,…] [--rules uniform,…] [--work FOLDER] [--workers 2]
    python benchmarks/credit_suite.py --quick
    python benchmarks/credit_suite.py --draw

Tasks are in `credit_tasks.py`, rules in `credit_rules.py`. A cell is a task, a rule and a seed. Every rule of a task has
the same budget of compute, of a seed the same warm-started model, tasks and noise of sampling, and else the same settings.
Compute = tokens sampled + tokens of prompts read + 3 × tokens trained + tokens that only pass forward (`credit_cell.py`),
those of forks included, so that a rule that forks makes fewer updates. Held-out success is at temperature 1, of 200 tasks
that training never sees, at ten equal fractions of the budget, and costs nothing. `uniform` and `packed`, with which the
others are compared, go on where they have not reached 0.8 by then, up to twice the budget. The rule `judge`
needs a language model that judges: it is left out.

Each finished cell is a file of --work: a run that was ended goes on with the cells that are missing, seed after seed. Who
changes a task or a rule removes its cells. Two commands for different --tasks may share --work.
--draw runs none, but writes what there is to benchmarks/results/credit_suite.json, docs/credit.png and the tables of
docs/credit.md.

Last line: {RULE: {TASK: {"rollouts_to_0.8", "compute_to_0.8", "reached", "seeds", "final", "ci", "ratio", "ratio_ci"}},
"rank_correlation_with_true_credit": {RULE: {TASK: ρ}}}. To 0.8: medians over seeds, of which one that never does counts
with all that it spent. reached: within the budget. final, ci: the mean of the budget's last three evaluations and its 95%
interval. ratio, ratio_ci: the compute to 0.8 over uniform's with the same seed (of `tree` over packed's, whose rows are
computed alike), geometric mean and 95% interval; of a seed that did not reach it, the budget over at most as much of the
baseline's. ρ: Spearman's, of the advantages of calls with what they should be, where one call is known to decide.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_figures import correlation_table, draw, summary, table, verdict
from credit_rules import CONTESTANTS
from credit_tasks import TASKS

if TYPE_CHECKING:
    from credit_cell import Point

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "credit_suite.json"
PAGE, PICTURE = REPOSITORY / "docs" / "credit.md", REPOSITORY / "docs" / "credit.png"
SEEDS = 5
QUICK_BUDGET, QUICK_HELD_OUT = 30_000.0, 20


@dataclass(frozen=True)
class Job:
    """One cell to run."""

    task: str
    rule: str
    seed: int
    work: str
    quick: bool = False

    @property
    def path(self) -> Path:
        return Path(self.work) / "cells" / self.task / self.rule / f"{self.seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many, from 0 [{SEEDS}]")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"some of {', '.join(TASKS)} [all]")
    parser.add_argument("--rules", default=",".join(CONTESTANTS), help=f"some of {', '.join(CONTESTANTS)} [all]")
    parser.add_argument(
        "--work",
        type=Path,
        default=REPOSITORY / "runs" / "credit_suite",
        help="cells and warm-started models are kept here [runs/credit_suite]",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each [2]")
    parser.add_argument("--quick", action="store_true", help="relay, three rules, one seed, next to no budget")
    parser.add_argument("--draw", action="store_true", help="run nothing; write results, picture and tables")
    options = parser.parse_args()
    tasks, rules = (
        _names("--tasks", options.tasks, TASKS, parser),
        _names("--rules", options.rules, CONTESTANTS, parser),
    )
    if options.draw:
        draw_page(options.work)
    elif options.quick:
        with tempfile.TemporaryDirectory() as temporary:
            run(jobs(["relay"], ["uniform", "forked_lean", "oracle"], 1, temporary, quick=True), options.workers)
            report(cells_of(Path(temporary)))
    else:
        run(jobs(tasks, rules, options.seeds, str(options.work)), options.workers)
        report(write_results(options.work))


def _names(option: str, given: str, known: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{option}: expected some of {', '.join(known)}, got {name!r}")
    return names


def jobs(tasks: Sequence[str], rules: Sequence[str], seeds: int, work: str, *, quick: bool = False) -> list[Job]:
    """The cells, those of a seed together: whenever a run ends, as many seeds as possible are whole."""
    return [
        Job(task, rule, seed, work, quick)
        for seed in range(seeds)
        for task in tasks
        for rule in rules
        if (TASKS[task].key or not CONTESTANTS[rule].needs_key)
        and (TASKS[task].decisive or not CONTESTANTS[rule].needs_truth)
        and (TASKS[task].special_words or not CONTESTANTS[rule].air)
    ]


def run(wanted: Sequence[Job], workers: int) -> None:
    """Runs the cells that no file has yet, seed after seed."""
    missing = [one for one in wanted if not one.path.exists()]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} cells are finished", flush=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for seed, cells in groupby(missing, key=lambda one: one.seed):
            of_seed = list(cells)
            # Before the cells, so that no two workers make the same one.
            list(pool.map(make_model, {one.task: one for one in of_seed}.values()))
            for line in pool.map(run_job, of_seed):
                print(f"seed {seed} {line}", flush=True)


def make_model(job: Job) -> Path:
    """The warm-started model of a task and seed, made unless it is there."""
    from credit_cell import warm_start

    folder = Path(job.work) / "models" / f"{job.task}-{job.seed}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            warm_start(TASKS[job.task], job.seed, Path(temporary) / "model")
            (Path(temporary) / "model").rename(folder)  # whole, or not at all
    return folder


def run_job(job: Job) -> str:
    """Runs a cell and writes its file, whole or not at all; returns a line about it."""
    from credit_cell import run_cell

    model = make_model(job)
    bounds: dict[str, Any] = {"budget": QUICK_BUDGET, "held_out": QUICK_HELD_OUT} if job.quick else {}
    cell = run_cell(job.task, job.rule, job.seed, model, **bounds)
    found = {
        "points": _points(cell.points),
        "beyond": _points(cell.beyond),
        "steps": cell.steps,
        "correlation": None if cell.correlation is None else round(cell.correlation, 4),
        "cpu_s": round(cell.cpu_s, 1),
    }
    job.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(job.path, json.dumps(found))
    return f"{job.task} {job.rule}: " + " ".join(f"{one.success:.2f}" for one in (*cell.points, *cell.beyond))


def _points(points: Sequence[Point]) -> list[list[float]]:
    return [[one.compute, one.rollouts, round(one.success, 4)] for one in points]


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def cells_of(work: Path) -> dict[str, Any]:
    """The finished cells: by task, rule and seed."""
    cells: dict[str, Any] = {}
    for task in TASKS:
        for rule in CONTESTANTS:
            for path in sorted((work / "cells" / task / rule).glob("[0-9]*.json"), key=lambda one: int(one.stem)):
                cells.setdefault(task, {}).setdefault(rule, {})[path.stem] = json.loads(path.read_text())
    return cells


def write_results(work: Path) -> dict[str, Any]:
    """Writes the finished cells to the repository, and returns them; those written before where there is none here."""
    cells = cells_of(work)
    if not cells:
        return dict(json.loads(RESULTS.read_text())["cells"])
    RESULTS.parent.mkdir(exist_ok=True)
    write_whole(RESULTS, json.dumps({"cells": cells, "figures": summary(cells)}, separators=(",", ":")) + "\n")
    return cells


def report(cells: dict[str, Any]) -> None:
    found = summary(cells)
    print(table(found, list(cells)), correlation_table(found), verdict(found, list(cells)), sep="\n\n")
    print(json.dumps(found))


def draw_page(work: Path) -> None:
    cells = write_results(work)
    found, tasks = summary(cells), list(cells)
    draw(cells, found, PICTURE)
    page = PAGE.read_text(encoding="utf-8")
    parts = {
        "verdict": verdict(found, tasks),
        "ratios": table(found, tasks),
        "correlations": correlation_table(found),
    }
    for name, text in parts.items():
        page = between(page, name, text)
    write_whole(PAGE, page)


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between the comments `begin NAME` and `end NAME`.

    >>> between("<!-- begin a -->old<!-- end a -->", "a", "new")
    '<!-- begin a -->\\n\\nnew\\n\\n<!-- end a -->'
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in page or end not in page:
        sys.exit(f"{PAGE.name}: expected the comments {begin} and {end}")
    before, after = page[: page.index(begin)], page[page.index(end) :]
    return f"{before}{begin}\n\n{text}\n\n{after}"


if __name__ == "__main__":
    main()
