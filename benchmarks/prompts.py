"""Does a search for prompts help, compared with training the weights? Every arm has the same number of rollouts.

    python benchmarks/prompts.py [--seeds 5] [--arms gepa,apo] [--work FOLDER] [--parallel 1] [--quick]

A tiny model imitates a demonstrator that does what its system prompt says, so that sentences of the prompt matter, and that
confuses two relations whatever it says (benchmarks/prompts/instructed.py). The agent starts from a poor prompt. No language
model writes: the optimiser is the scripted one, with a grammar of edits of which four help, and reads what it is sent.

| arm | command |
| --- | --- |
| gepa, apo, random_search | agl optimize |
| weights_only | agl train, under the prompt that it starts from |

`prompts_only` is the gepa arm, which was fixed before any of these seeds was run. Rewards are of held-out tasks that no arm
sees, the same for all arms and seeds, and of the policy and prompt at the end: greedy in the last line. Evaluation counts
for nobody's rollouts. Whatever is finished in --work is not done again.

Last line: {"before", "apo", "gepa", "random_search", "weights_only", "prompts_only", "rollouts", "sampled",
"standard_error", "rollouts_used", "seeds"}: means over seeds, null where an arm was left out; `sampled` at temperature 1;
`rollouts` what each arm may use, `rollouts_used` what it did.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from agentlightning.trainer.checkpoint import RunFolder
from experiments import AGL, REPOSITORY, execute, json_of, write_whole

FOLDER = REPOSITORY / "benchmarks" / "prompts"
SEARCHES = ("apo", "gepa", "random_search")
ARMS = (*SEARCHES, "weights_only")
SEARCH = {"minibatch": 8}
CONTROL = f"{FOLDER}/random_search.py:RandomSearch"
"""The class of the arm random_search."""
GROUP = 8
MODES = ("greedy", "sampled")
Scores = dict[str, float]
"""Held-out reward by mode."""


@dataclass(frozen=True)
class Budget:
    """Rollouts of every arm, and how those that train divide them."""

    rollouts: int = 2048
    tasks_per_step: int = 16

    @property
    def steps(self) -> int:
        """Training steps of the arm that trains."""
        return self.rollouts // (self.tasks_per_step * GROUP)


QUICK = Budget(rollouts=96, tasks_per_step=2)


@dataclass(frozen=True)
class Seed:
    """One seed: its folder with the model and the tasks, and what its commands have in common."""

    number: int
    work: Path
    budget: Budget
    progress: Progress

    def arm(self, name: str) -> dict[str, Any]:
        """Runs an arm, if it is not finished; its prompt, rollouts and, where it trains, the folder of its policy."""
        kept = self.work / f"{name}.result.json"
        if not kept.exists():
            folder = self.work / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            found = self._searched(name) if name in SEARCHES else self._trained(name)
            write_whole(kept, json.dumps(found))
        return dict(json.loads(kept.read_text()))

    def _searched(self, name: str) -> dict[str, Any]:
        settings = self._settings("val") | {
            "algorithm.type": CONTROL if name == "random_search" else name,
            "optimize.max_rollouts": self.budget.rollouts,
        }
        settings |= {f"algorithm.{key}": value for key, value in SEARCH.items()} | self._scripted()
        told = json_of(
            self.work / name, "optimize", self._command("optimize", name, settings, "--json"), *self._shown()
        )
        return {"prompt": told["texts"]["system"], "rollouts": told["rollouts"]}

    def _trained(self, name: str) -> dict[str, Any]:
        steps = self.budget.steps
        settings = self._settings("val") | {
            "eval.tasks": 8 if self.budget == QUICK else 48,
            "eval.sampled": False,
            "trainer.steps": steps,
            "trainer.tasks_per_step": self.budget.tasks_per_step,
            "trainer.learning_rate": 1e-3,
            "trainer.warmup_steps": 2,
            "trainer.checkpoint_every": steps,
        }
        training: dict[str, Any] = {"group_size": GROUP, "minibatches": 4}
        settings |= {f"algorithm.{key}": value for key, value in training.items()}
        execute(self.work / name, "train", self._command("train", name, settings), lambda: None)
        [run] = (self.work / name / "runs").iterdir()
        rows = [row for row in RunFolder(run.parent, run.name).metrics() if row["kind"] == "step"]
        rollouts = sum(row["rollout/count"] for row in rows)
        return {
            "policy": str(run / "checkpoints" / f"step-{steps:06}"),
            "prompt": newest_prompt(self.work / name / "agl.db"),
            "rollouts": int(rollouts),
        }

    def evaluate(self, name: str, policy: str, prompts: dict[str, str]) -> dict[str, Scores]:
        """Held-out rewards of one policy under each prompt, by arm: one command, whose tasks say their prompts."""
        folder = self.work / f"eval-{name}"
        kept = self.work / f"eval-{name}.result.json"
        if not kept.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            tasks = [json.loads(line) for line in (self.work / "heldout.jsonl").read_text().splitlines()]
            asked = [task | {"arm": arm, "prompt": prompt} for arm, prompt in prompts.items() for task in tasks]
            (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in asked))
            settings = self._settings("val") | {"data.val": str(folder / "tasks.jsonl"), "model.path": policy}
            settings["prompts.templates.system"] = "{prompt}"
            json_of(folder, "eval", self._command("eval", folder.name, settings), *self._shown())
            write_whole(kept, json.dumps(rewards(folder / "agl.db")))
        return dict(json.loads(kept.read_text()))

    def _settings(self, val: str) -> dict[str, Any]:
        return {
            "model.path": str(self.work / "model"),
            "data.train": str(self.work / "train.jsonl"),
            "data.val": str(self.work / f"{val}.jsonl"),
            "trainer.seed": self.number,
        }

    def _scripted(self) -> dict[str, Any]:
        return {"optimize.model": "scripted", "optimize.grammar": str(self.work / "grammar.json")}

    def _command(self, verb: str, name: str, settings: dict[str, Any], *options: str) -> list[str]:
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={as_toml(value)}")]
        place = self.work / name
        command = [*AGL, verb, str(FOLDER / "people.toml"), *given, *options]
        return [*command, "--store", f"sqlite:///{place}/agl.db", "--runs", str(place / "runs")]

    def _shown(self) -> tuple[Progress, int]:
        return self.progress, self.number


def as_toml(value: Any) -> str:
    """A setting's value as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def newest_prompt(store: Path) -> str:
    with sqlite3.connect(store) as connection:
        order = "SELECT value FROM resources WHERE kind = 'prompt_template' ORDER BY version DESC LIMIT 1"
        [(value,)] = connection.execute(order).fetchall()
    return str(json.loads(value)["template"])


def rewards(store: Path) -> dict[str, Scores]:
    """The mean reward of each arm by mode; a rollout that failed earned nothing."""
    found: dict[str, dict[str, list[float]]] = {}
    with sqlite3.connect(store) as connection:
        for text, sampling, reward in connection.execute("SELECT task, sampling, reward FROM rollouts"):
            mode = "sampled" if json.loads(sampling)["temperature"] else "greedy"
            found.setdefault(json.loads(text)["arm"], {}).setdefault(mode, []).append(reward or 0.0)
    return {arm: {mode: statistics.fmean(by_mode[mode]) for mode in MODES} for arm, by_mode in found.items()}


def run_seed(seed: Seed, arms: Sequence[str], quick: bool, parallel: int) -> tuple[dict[str, Scores], dict[str, int]]:
    """Held-out rewards and rollouts by arm."""
    seed.work.mkdir(parents=True, exist_ok=True)
    make = [sys.executable, str(FOLDER / "warm_start.py"), "--seed", str(seed.number), "--to", str(seed.work)]
    json_of(seed.work, "warm_start", [*make, *(["--quick"] * quick)], seed.progress, seed.number)
    with ThreadPoolExecutor(parallel) as pool:
        found = dict(zip(arms, pool.map(seed.arm, arms), strict=True))
        searched = [name for name in found if name in SEARCHES]
        prompts = {"before": first_prompt(), **{name: found[name]["prompt"] for name in searched}}
        start = str(seed.work / "model")
        wanted = [("-".join(["prompts", *searched]), start, prompts)]
        wanted += [
            (name, one["policy"], {name: one["prompt"]}) for name, one in found.items() if name == "weights_only"
        ]
        scores: dict[str, Scores] = {}
        for part in pool.map(lambda one: seed.evaluate(*one), wanted):
            scores |= part
    return scores, {name: one["rollouts"] for name, one in found.items()}


def first_prompt() -> str:
    """The prompt that every arm starts from."""
    import tomllib

    return str(tomllib.loads((FOLDER / "people.toml").read_text())["prompts"]["templates"]["system"])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error; 0 for one seed."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def table(seeds: Sequence[int], found: Sequence[dict[str, Scores]], used: Sequence[dict[str, int]]) -> str:
    """Each arm's held-out reward, greedy of every seed and at temperature 1, with the rollouts that it used."""
    head = [
        "held-out reward",
        *(f"seed {number}" for number in seeds),
        "greedy ± se",
        "T = 1 ± se",
        "rollouts",
    ]
    lines = [head, ["---"] * len(head)]
    for arm in found[0]:
        greedy = [scores[arm]["greedy"] for scores in found]
        means = [mean_and_error([scores[arm][mode] for scores in found]) for mode in MODES]
        rollouts = [f"{statistics.fmean(one.get(arm, 0) for one in used):.0f}"]
        lines.append(
            [arm, *(f"{one:.3f}" for one in greedy), *(f"{one:.3f} ± {error:.3f}" for one, error in means), *rollouts]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures(found: Sequence[dict[str, Scores]], used: Sequence[dict[str, int]], rollouts: int) -> dict[str, Any]:
    """The last line."""
    scores = [one | ({"prompts_only": one["gepa"]} if "gepa" in one else {}) for one in found]
    names = ("before", "apo", "gepa", "random_search", "weights_only", "prompts_only")
    over = {mode: {name: mean_and_error([one[name][mode] for one in scores]) for name in scores[0]} for mode in MODES}
    greedy = over["greedy"]
    return {
        **{name: round(greedy[name][0], 4) if name in greedy else None for name in names},
        "rollouts": rollouts,
        "sampled": {name: round(mean, 4) for name, (mean, _) in over["sampled"].items()},
        "standard_error": {name: round(error, 4) for name, (_, error) in greedy.items()},
        "rollouts_used": {name: round(statistics.fmean(one[name] for one in used)) for name in used[0]},
        "seeds": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of the seeds [%(default)s]")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma between them; all: %(default)s")
    parser.add_argument("--work", type=Path, help="where everything is kept [runs/prompts]")
    parser.add_argument("--parallel", type=int, default=1, help="commands of a seed at a time")
    parser.add_argument("--quick", action="store_true", help="whether it runs, not what it finds")
    given = parser.parse_args()
    arms = given.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: expected some of {', '.join(ARMS)}, got {unknown[0]!r}")
    work = (given.work or REPOSITORY / "runs" / f"prompts{'-quick' * given.quick}").resolve()
    budget = QUICK if given.quick else Budget()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found, used = [], []
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        for number in seeds:
            seed = Seed(number, work / f"seed-{number}", budget, progress)
            scores, rollouts = run_seed(seed, arms, given.quick, given.parallel)
            found.append(scores)
            used.append(rollouts)
    print(table(seeds, found, used), flush=True)
    print(json.dumps(figures(found, used, budget.rollouts)))


if __name__ == "__main__":
    main()
