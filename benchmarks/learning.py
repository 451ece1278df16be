"""Does it learn, and what helps? Every claim about learning, measured with several seeds against a baseline or a control.

    python benchmarks/learning.py --claim NAME [--seeds 3] [--arms A,B] [--workers 1] [--quick]
        [--work FOLDER] [--results FILE] [--curve FILE.png]

    calculator, calculator-all, text_to_sql-spider, text_to_sql-joins, text_to_sql-generated, rag-2wiki, rag-musique
                      the examples: training on reward against more of the warm start
    calculator-smollm2, text_to_sql-smollm2, rag-smollm2
                      the same with a pretrained model, against a random reward, too; experiments.py runs them
    pictures          the picture game: a model with sight learns, and the share of its calls that are exact
    async             asynchronous against synchronous training, with rollouts that last 0.2 to 2 seconds
    curriculum        tasks drawn by learnability against uniform draws and dynamic sampling, at equal rollouts
    feedback          a served model learns from its users' feedback, or from a coin flip
    prompts           searches for prompts against training the weights, with the same number of rollouts
    forks             forked rollouts repeat their record, save tokens, and an agent that acts by chance is caught
    environments-gymnasium, environments-textarena, environments-reasoning-gym
                      environments by name: a tiny model that imitated a bad player, against a random reward
    credit-retrieval, credit-relay, credit-corridor, credit-sql
                      every credit rule at equal compute

A finished arm of a seed is kept in --results and not run again; whatever is finished of others is kept in --work.

Last line: {"claim", "seeds", "arms": {ARM: {"before", "after", "ci", …}}}. before, after: held-out success at the first
and the last evaluation, means over seeds; ci: the 95% t interval of `after`. With a goal: cost_to_goal, the median over
seeds (one that never reaches it counts with all its cost), reached, the number of seeds that do, and ratio and
ratio_ci, the cost over the baseline's with the same seed: geometric mean and 95% interval. Further figures are means
over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "learning"))

from claim import REPOSITORY, Cell, Claim, Outcome, Points  # noqa: E402

EXAMPLES = (
    *("calculator", "calculator-all", "text_to_sql-spider", "text_to_sql-joins", "text_to_sql-generated"),
    *("rag-2wiki", "rag-musique", "pictures", "calculator-smollm2", "text_to_sql-smollm2", "rag-smollm2"),
)
MODULES = {
    "async": "asynchronous",
    **{f"environments-{kind}": "environments" for kind in ("gymnasium", "textarena", "reasoning-gym")},
    "curriculum": "curriculum",
    "feedback": "feedback",
    "forks": "forks",
    "prompts": "prompts",
    **dict.fromkeys(EXAMPLES, "example_runs"),
    **{f"credit-{task}": "credit" for task in ("corridor", "relay", "retrieval", "sql")},
}
"""By claim, the module of learning/ that has it."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 0.975 quantile, for 1, 2, … degrees of freedom."""
Arms = Mapping[str, Mapping[str, Outcome]]
"""By arm and seed."""


def load(name: str) -> Claim:
    found: Claim = import_module(MODULES[name]).CLAIMS[name]
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", choices=sorted(MODULES), required=True)
    parser.add_argument("--seeds", type=int, help="how many, from 0 [3; credit rules: 5]")
    parser.add_argument("--arms", help="some of the claim's, commas between them [all]")
    parser.add_argument("--workers", type=int, default=1, help="arms at a time [1]")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not what it learns")
    parser.add_argument("--work", type=Path, help="folder that keeps models and runs [runs/learning]")
    parser.add_argument("--results", type=Path, help="file that keeps finished arms [results.json in --work]")
    parser.add_argument("--curve", type=Path, help="draw the curves into this PNG")
    given = parser.parse_args(words)
    claim = load(given.claim)
    arms = given.arms.split(",") if given.arms else list(claim.arms)
    if unknown := [arm for arm in arms if arm not in claim.arms]:
        parser.error(f"--arms: expected some of {', '.join(claim.arms)}, got {unknown[0]!r}")
    work = (given.work or REPOSITORY / "runs" / f"learning{'-quick' * given.quick}").resolve()
    path = given.results or work / "results.json"
    seeds = 1 if given.quick and given.seeds is None else given.seeds or claim.seeds
    cells = [
        Cell(given.claim, arm, seed, work / given.claim / f"seed-{seed}", given.quick)
        for seed in range(seeds)
        for arm in arms
    ]
    results = run(claim, cells, path, given.workers)
    found = {arm: {str(seed): results[arm][str(seed)] for seed in range(seeds)} for arm in arms}
    figures = summary(claim, found)
    print(table(found, figures), flush=True)
    if given.curve:
        draw(claim, found, given.curve, given.claim)
    print(json.dumps({"claim": given.claim, "seeds": seeds, "arms": figures}))


def run(claim: Claim, cells: Sequence[Cell], path: Path, workers: int) -> dict[str, dict[str, Outcome]]:
    """Measures the cells that `path` does not have, seed after seed, and writes it after each; returns the claim's."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    own = kept.setdefault(cells[0].claim, {})
    missing = [cell for cell in cells if str(cell.seed) not in own.get(cell.arm, {})]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for seed in sorted({cell.seed for cell in missing}):
            of_seed = [cell for cell in missing if cell.seed == seed]
            pool.submit(prepare, of_seed[0]).result()
            for cell, outcome in zip(of_seed, pool.map(measure, of_seed), strict=True):
                own.setdefault(cell.arm, {})[str(seed)] = asdict(outcome)
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.tmp")
                temporary.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
                temporary.replace(path)
                success = " ".join(f"{value:.2f}" for _, value in outcome.points)
                print(f"seed {seed} {cell.arm}: {success} {outcome.figures}", flush=True)
    return {arm: {seed: Outcome(**one) for seed, one in by_seed.items()} for arm, by_seed in own.items()}


def prepare(cell: Cell) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    load(cell.claim).prepare(cell)


def measure(cell: Cell) -> Outcome:
    """One arm with one seed, with the wall and CPU seconds that it took."""
    began, used = time.monotonic(), cpu_s()
    try:
        outcome = load(cell.claim).measure(cell)
    except Exception:  # not every exception can be sent to another process
        raise RuntimeError(f"{cell.claim} {cell.arm}, seed {cell.seed}:\n{traceback.format_exc()}") from None
    took = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(cpu_s() - used, 1)}
    return Outcome(outcome.points, outcome.figures | took)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# --- figures ------------------------------------------------------------------------------------------------------------


def cost_to(points: Points, goal: float) -> float | None:
    """The cost at which the curve first reaches `goal`, linearly between evaluations; None where it never does.

    >>> cost_to([(0, 0.2), (100, 0.6), (200, 1.0)], 0.8)
    150.0
    """
    if points[0][1] >= goal:
        return 0.0
    for (cost, low), (later, high) in pairwise(points):
        if low < goal <= high:
            return cost + (goal - low) / (high - low) * (later - cost)
    return None


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = T_95[min(len(values), 10) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def rounded(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else [round(one, 3) for one in bounds]


def after(outcome: Outcome) -> float | None:
    return outcome.figures.get("after", outcome.points[-1][1] if outcome.points else None)


def summary(claim: Claim, found: Arms) -> dict[str, dict[str, Any]]:
    """The figures of each arm."""
    figures: dict[str, dict[str, Any]] = {}
    for arm, by_seed in found.items():
        names = dict.fromkeys(name for one in by_seed.values() for name in one.figures)
        own = figures[arm] = {
            name: round(statistics.fmean(one.figures[name] for one in by_seed.values() if name in one.figures), 4)
            for name in names
        }
        if all(one.points for one in by_seed.values()):
            ends = [value for one in by_seed.values() if (value := after(one)) is not None]
            own["before"] = round(statistics.fmean(one.points[0][1] for one in by_seed.values()), 4)
            own |= {"after": round(statistics.fmean(ends), 4), "ci": rounded(interval(ends))}
            if claim.goal is not None:
                own |= to_goal(claim.goal, by_seed, found.get(claim.baselines.get(arm, claim.arms[0]), {}))
    return figures


def to_goal(goal: float, by_seed: Mapping[str, Outcome], baseline: Mapping[str, Outcome]) -> dict[str, Any]:
    """Cost to the goal, and its ratio to the baseline's; a seed that never reaches it counts with all its cost, over at most
    as much of the baseline's: it is worse than that ratio says."""
    costs = {seed: cost_to(one.points, goal) for seed, one in by_seed.items()}
    spent = {seed: one.points[-1][0] if (cost := costs[seed]) is None else cost for seed, one in by_seed.items()}
    figures: dict[str, Any] = {
        "cost_to_goal": round(statistics.median(spent.values()), 1),
        "reached": sum(cost is not None for cost in costs.values()),
    }
    ratios = []
    for seed in spent.keys() & baseline.keys():
        needed = cost_to(baseline[seed].points, goal)
        base = baseline[seed].points[-1][0] if needed is None else needed
        base = base if costs[seed] is not None else min(base, spent[seed])
        ratios.append(math.log(max(1.0, spent[seed]) / max(1.0, base)))
    if ratios and baseline is not by_seed:
        bounds = interval(ratios)
        figures["ratio"] = round(math.exp(statistics.fmean(ratios)), 3)
        figures["ratio_ci"] = rounded(None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1])))
    return figures


def table(found: Arms, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row an arm: the success of each seed at the end, before, after, and the cost to the goal over the baseline's."""
    seeds = list(next(iter(found.values())))
    lines = [
        ["arm", "before", *(f"seed {seed}" for seed in seeds), "after (95%)", "cost to the goal over the baseline's"]
    ]
    lines.append(["---"] * len(lines[0]))
    for arm, own in figures.items():
        ends = [after(found[arm][seed]) for seed in seeds]
        bounds = [
            f" ({own[name][0]:.2f} to {own[name][1]:.2f})" if own.get(name) else "" for name in ("ci", "ratio_ci")
        ]
        whole = [f"{own[name]:.3f}" if name in own else "" for name in ("before", "after", "ratio")]
        shown = ["" if value is None else f"{value:.3f}" for value in ends]
        lines.append([arm, whole[0], *shown, whole[1] + bounds[0], whole[2] + bounds[1]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(claim: Claim, found: Arms, to: Path, title: str) -> None:
    """Held-out success by cost: each seed thin, the mean of each arm thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (arm, by_seed) in enumerate(found.items()):
        curves = [one.points for one in by_seed.values() if one.points]
        for points in curves:
            axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.3, linewidth=1)
        means = [
            [statistics.fmean(values) for values in zip(*place, strict=True)] for place in zip(*curves, strict=False)
        ]
        axes.plot(*zip(*means, strict=True), color=f"C{number}", linewidth=2.2, marker="o", label=arm)
    axes.set(title=title, xlabel=claim.cost, ylabel="held-out success")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(to, format="png", dpi=120)


if __name__ == "__main__":
    main()
