"""The examples on real data, as a user would run them: warm start, training on reward, and more of the warm start instead.

    python benchmarks/experiments.py --example text_to_sql|rag|calculator [--slice NAME] [--seeds 3] [--curve FILE.png]

For each seed, with the example's own files and commands:

    python examples/NAME/warm_start.py --seed S --to MODEL
    agl train examples/NAME/train.toml --set model.path=MODEL --set trainer.seed=S
    python examples/NAME/warm_start.py --seed S --to CONTROL --control
    agl eval examples/NAME/train.toml --set model.path=CONTROL

`before` and `after` are the greedy evaluations that the run recorded at step 0 and at its last step (never at the best
one), the control's is that of ``agl eval``: the same agent on the same held-out rows, three times. Everything is kept in
--work, and what is finished there is not done again, so a benchmark that was stopped goes on; an unfinished run is resumed.
Where held-out rows name their data set (`set`) or a reward function gives named rewards, the table has their means, too.

Last line: {"example", "framework", "slice", "before", "after", "more_sft_control", "rollouts", "wall_s", "cpu_s"}: means
over seeds, `rollouts` those of one seed's training, `wall_s` and `cpu_s` (of every process) of all seeds together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.trainer.checkpoint import RunFolder

REPOSITORY = Path(__file__).resolve().parents[1]
AGL = (sys.executable, "-m", "agentlightning")
POLL_S = 0.5
TAIL = 3000
"""Characters of a failed command's output that are shown."""


@dataclass(frozen=True)
class Slice:
    """A part of a real data set."""

    says: str
    config: str = "train.toml"
    options: tuple[str, ...] = ()
    """What warm_start.py is given besides."""


@dataclass(frozen=True)
class Example:
    framework: str
    slices: dict[str, Slice]
    """The first is the default."""


EXAMPLES = {
    "calculator": Example(
        "AutoGen",
        {
            "templates": Slice("ASDiv-A and MAWPS, questions of unseen templates"),
            "all": Slice("ASDiv-A, MAWPS, SVAMP, GSM8K of at most three steps", "all.toml", ("--slice", "all")),
        },
    ),
    "text_to_sql": Example(
        "LangGraph",
        {
            "spider": Slice("Spider, single-table questions, unseen databases", "spider.toml", ("--slice", "spider")),
            "joins": Slice("Spider, two tables joined by a key, unseen databases", "joins.toml", ("--slice", "joins")),
            "generated": Slice("generated databases of the demo, unseen databases"),
        },
    ),
    "rag": Example(
        "OpenAI Agents SDK",
        {
            "2wiki": Slice("2Wiki dev questions, retrieval"),
            "musique": Slice("MuSiQue dev questions, extractive answers", "musique.toml", ("--slice", "musique")),
        },
    ),
}


@dataclass(frozen=True)
class Seed:
    """The outcome of one seed: held-out success, greedy, and its curve."""

    before: float
    after: float
    control: float
    rollouts: int
    labelled: int
    held_out: int
    wall_s: float
    cpu_s: float
    curve: list[tuple[int, float]]
    """(step, held-out success)."""
    training: list[tuple[int, float]]
    """(step, mean training reward at temperature 1)."""
    parts: dict[str, tuple[float, float, float]]
    """Means before, of the control and after: of each data set, and of each named reward."""


@dataclass(frozen=True)
class Plan:
    """The settings of one seed's run that differ between examples, and between a whole run and a quick one."""

    folder: Path
    config: Path
    options: tuple[str, ...]
    epochs: tuple[str, ...] = ()
    control: tuple[str, ...] = ("--control",)
    settings: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        given = dict(setting.split("=", 1) for setting in self.settings[1::2])
        return int(given.get("trainer.steps") or tomllib.loads(self.config.read_text())["trainer"]["steps"])


def plan_of(example: str, part: Slice, quick: bool) -> Plan:
    folder = REPOSITORY / "examples" / example
    plan = Plan(folder=folder, config=folder / part.config, options=part.options)
    if not quick:
        return plan
    settings = {"trainer.steps": 2, "trainer.tasks_per_step": 4, "eval.tasks": 16, "eval.sampled": "false"}
    given = tuple(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
    # Six epochs, after which the agents use their tools; the control, which only has to run, takes one.
    return replace(plan, epochs=("--epochs", "6"), control=("--epochs", "1"), settings=given)


def run_seed(plan: Plan, seed: int, work: Path, progress: Progress) -> Seed:
    """All four commands, those that are not finished in `work`; their figures, read from what they left."""
    warm = [sys.executable, str(plan.folder / "warm_start.py"), "--seed", str(seed), *plan.options]
    model, control = work / "model", work / "control"
    made = json_of(work, "warm_start", [*warm, "--to", str(model), *plan.epochs], progress, seed)
    trained = train(plan, seed, work, model, progress)
    json_of(work, "control", [*warm, "--to", str(control), *plan.control], progress, seed)
    evaluation = [*AGL, "eval", str(plan.config), "--set", f"model.path={control}", *plan.settings]
    evaluation += ["--store", f"sqlite:///{work}/control.db", "--runs", str(work / "control-runs")]
    controlled = json_of(work, "control_eval", evaluation, progress, seed)
    greedy = {row["step"]: row["eval/greedy/reward_mean"] for row in trained if "eval/greedy/reward_mean" in row}
    steps = [row for row in trained if row["kind"] == "step"]
    before, control_parts, after = (
        asyncio.run(parts(database, step)) if database.exists() else {}
        for database, step in ((work / "agl.db", 0), (work / "control.db", 0), (work / "agl.db", plan.steps))
    )
    return Seed(
        before=greedy[0],
        after=greedy[plan.steps],
        control=controlled["greedy"],
        rollouts=int(sum(row["rollout/count"] for row in steps)),
        labelled=made["labelled"],
        held_out=made["held_out"],
        wall_s=sum(float(file.read_text()) for file in work.glob("*.wall")),
        cpu_s=sum(float(file.read_text()) for file in work.glob("*.cpu")),
        curve=sorted(greedy.items()),
        training=[(row["step"], row["train/reward_mean"]) for row in steps],
        parts={name: (before[name], control_parts[name], after[name]) for name in before},
    )


async def parts(database: Path, step: int) -> dict[str, float]:
    """Means over a step's greedy evaluation: the reward of the rows of each `set`, and each named reward."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    async with open_store(f"sqlite:///{database}") as store:
        found = await store.rollouts(RolloutQuery(mode="eval", step=step))
        rollouts = {one.id: one for one in found if one.group_id.startswith(f"eval:{step}:greedy:")}
        for rollout in rollouts.values():
            if "set" in rollout.task:
                values[f"{rollout.task['set']} ({{}})"].append(rollout.reward or 0.0)
        for reward in await store.rewards(list(rollouts)):
            if reward.call_id is None and reward.name != "reward":
                values[reward.name].append(reward.value)
    return {name.format(len(each)): statistics.fmean(each) for name, each in sorted(values.items())}


def train(plan: Plan, seed: int, work: Path, model: Path, progress: Progress) -> list[dict[str, Any]]:
    """The rows of the run's metrics, after its last step; an unfinished run is resumed where it has a checkpoint."""
    runs, finished = work / "runs", work / "train.json"
    if finished.exists():
        return RunFolder(runs, json.loads(finished.read_text())["run"]).metrics()
    command = [*AGL, "train", "--store", f"sqlite:///{work}/agl.db", "--runs", str(runs)]
    found = [RunFolder(runs, folder.name) for folder in runs.glob("*")]
    if started := next((folder for folder in found if folder.has_checkpoint()), None):
        command += ["--resume", started.run_id]
    else:
        shutil.rmtree(runs, ignore_errors=True)
        for left in work.glob("agl.db*"):
            left.unlink()
        command += [str(plan.config), "--set", f"model.path={model}", "--set", f"trainer.seed={seed}", *plan.settings]
    task = progress.add_task(f"seed {seed}: training", total=plan.steps)

    def advance() -> None:
        for folder in runs.glob("*"):
            steps = (row["step"] for row in RunFolder(runs, folder.name).metrics() if row["kind"] == "step")
            progress.update(task, completed=max(steps, default=0))

    execute(work, "train", command, advance)
    advance()
    (run,) = runs.iterdir()
    rows = RunFolder(runs, run.name).metrics()
    if not any(row["step"] == plan.steps and "eval/greedy/reward_mean" in row for row in rows):
        sys.exit(f"{run}: was stopped before its last step; the same command goes on with it")
    write_whole(finished, json.dumps({"run": run.name}))
    return rows


def json_of(work: Path, name: str, command: Sequence[str], progress: Progress, seed: int) -> dict[str, Any]:
    """The last line that the command prints, as JSON: of this time, or of the time when it was finished in `work`."""
    kept = work / f"{name}.json"
    if not kept.exists():
        task = progress.add_task(f"seed {seed}: {name.replace('_', ' ')}", total=None)
        output = execute(work, name, command, lambda: None)
        progress.update(task, total=1, completed=1)
        write_whole(kept, output.splitlines()[-1])
    return dict(json.loads(kept.read_text()))


def execute(work: Path, name: str, command: Sequence[str], meanwhile: Callable[[], None]) -> str:
    """Returns the command's output; exits where it fails. Its time is added to that of earlier tries."""
    began, used = time.monotonic(), cpu_of_children()
    out, log = work / f"{name}.out", work / f"{name}.log"
    with out.open("w") as stdout, log.open("w") as stderr:
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=REPOSITORY)
        try:
            while child.poll() is None:
                time.sleep(POLL_S)
                meanwhile()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            add(work / f"{name}.wall", time.monotonic() - began)
            add(work / f"{name}.cpu", cpu_of_children() - used)
    if child.returncode:
        sys.exit(f"{(out.read_text() + log.read_text())[-TAIL:]}\n{' '.join(command)} failed; see {work}")
    return out.read_text()


def cpu_of_children() -> float:
    """Seconds of the CPU that ended children and theirs have used, as far as somebody waited for them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def add(path: Path, seconds: float) -> None:
    earlier = float(path.read_text()) if path.exists() else 0.0
    write_whole(path, f"{earlier + seconds:.1f}")


def write_whole(path: Path, text: str) -> None:
    """All or nothing: what exists in `work` is finished."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for one seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(seeds: Sequence[Seed]) -> str:
    """The README's table: each seed, the mean and the standard deviation over seeds."""
    lines: list[tuple[str, list[float], str]] = [
        ("before", [seed.before for seed in seeds], ".3f"),
        ("control: more of the warm start", [seed.control for seed in seeds], ".3f"),
        ("after training on reward", [seed.after for seed in seeds], ".3f"),
        ("gain", [seed.after - seed.before for seed in seeds], "+.3f"),
        ("wall s", [seed.wall_s for seed in seeds], ".0f"),
        ("CPU s", [seed.cpu_s for seed in seeds], ".0f"),
    ]
    lines += [
        (f"{name}: {when}", [seed.parts[name][place] for seed in seeds], ".3f")
        for name in seeds[0].parts
        for place, when in enumerate(("before", "control", "after"))
    ]
    names = [f"seed {seed}" for seed in range(len(seeds))]
    rows = [["held-out, greedy", *names, "mean ± sd"], ["---"] * (len(names) + 2)]
    for says, values, form in lines:
        whole = f"{statistics.mean(values):{form}} ± {spread(values):{form.lstrip('+')}}"
        rows.append([says, *(f"{value:{form}}" for value in values), whole])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(seeds: Sequence[Seed], title: str, to: Path) -> None:
    """Held-out success of each seed and its mean by step, the controls' mean, and the mean training reward."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in seeds[0].training]
    rewards = [statistics.mean(values) for values in zip(*([r for _, r in s.training] for s in seeds), strict=True)]
    axes.plot(steps, rewards, color="#9aa5b1", linewidth=1, label="training reward (T = 1)")
    for seed in seeds:
        axes.plot(*zip(*seed.curve, strict=True), color="#1f6feb", alpha=0.35, linewidth=1, marker=".")
    places = [step for step, _ in seeds[0].curve]
    means = [statistics.mean(values) for values in zip(*([v for _, v in s.curve] for s in seeds), strict=True)]
    axes.plot(places, means, color="#1f6feb", linewidth=2.2, marker="o", label="held-out, greedy")
    control = statistics.mean(seed.control for seed in seeds)
    axes.axhline(control, color="#d97706", linestyle="--", label="more of the warm start instead")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(to, format="png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=sorted(EXAMPLES), required=True)
    parser.add_argument("--slice", help="which data; the first is the default: " + names_of_slices())
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 [3]")
    parser.add_argument("--work", type=Path, help="where everything is kept [runs/experiments/EXAMPLE-SLICE]")
    parser.add_argument("--curve", type=Path, help="draw the curves into this PNG")
    parser.add_argument(
        "--quick", action="store_true", help="two steps on few rows: whether it runs, not what it learns"
    )
    given = parser.parse_args()
    example = EXAMPLES[given.example]
    name = given.slice or next(iter(example.slices))
    if name not in example.slices:
        parser.error(f"--slice: expected one of {', '.join(example.slices)} for {given.example}")
    part = example.slices[name]
    work = given.work or REPOSITORY / "runs" / "experiments" / f"{given.example}-{name}{'-quick' * given.quick}"
    plan = plan_of(given.example, part, given.quick)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    seeds = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        for seed in range(given.seeds):
            folder = (work / f"seed-{seed}").resolve()
            folder.mkdir(parents=True, exist_ok=True)
            seeds.append(run_seed(plan, seed, folder, progress))
    print(table(seeds), flush=True)
    if given.curve:
        draw(seeds, f"{example.framework}: {part.says}", given.curve)
    figures = {
        "example": given.example,
        "framework": example.framework,
        "slice": f"{part.says}: {seeds[0].held_out} held out, {seeds[0].labelled} labelled",
        "before": round(statistics.mean(seed.before for seed in seeds), 4),
        "after": round(statistics.mean(seed.after for seed in seeds), 4),
        "more_sft_control": round(statistics.mean(seed.control for seed in seeds), 4),
        "rollouts": round(statistics.mean(seed.rollouts for seed in seeds)),
        "wall_s": round(sum(seed.wall_s for seed in seeds), 1),
        "cpu_s": round(sum(seed.cpu_s for seed in seeds), 1),
    }
    print(json.dumps(figures))


def names_of_slices() -> str:
    return "; ".join(f"{name}: {', '.join(example.slices)}" for name, example in EXAMPLES.items())


if __name__ == "__main__":
    main()
