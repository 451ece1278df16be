"""Tasks drawn by learnability against each once an epoch, and against dynamic sampling, at equal compute.

The lookup demo's task and model, over 96 tasks of which two in three cannot be solved (their answer is nobody's), as in data
that nobody has sifted. The cost is rollouts, resampled ones included: every arm has as many. Held out are tasks that can be
solved. What holds for one small model and one kind of task need not hold for another.
"""

from __future__ import annotations

from typing import Any

from claim import HELD_OUT, HELD_OUT_SEED, Cell, Claim, Outcome, train, warm_start, write_rows

from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON

COUNT, HOPELESS = 96, 2 / 3
STEPS, TASKS, GROUP = 48, 8, 8
GOAL = 0.6
CONFIG = """
[model]
path = "{model}"
[agent]
run = "{file}:solve"
workers = 1
[data]
train = "train.jsonl"
val = "val.jsonl"
sampler = "{sampler}"
[algorithm]
group_size = {group}
minibatches = 4
dynamic_sampling = {dynamic}
[trainer]
steps = {steps}
tasks_per_step = {tasks}
learning_rate = 1e-3
final_learning_rate = 1.0
warmup_steps = 3
seed = {seed}
[eval]
every = 4
sampled = false
"""


async def solve(task: JSON, llm: Any) -> float:
    """The lookup agent; a task without an answer earns nothing, whatever is said."""
    earned = await lookup.solve(task, llm)
    return 0.0 if task["hopeless"] else earned


def measure(cell: Cell) -> Outcome:
    steps = 8 if cell.quick else STEPS
    hopeless = round(COUNT * HOPELESS)
    found = rows(lookup, "train", COUNT, cell.seed)
    write_rows(cell.place / "train.jsonl", [row | {"hopeless": n < hopeless} for n, row in enumerate(found)])
    held_out = rows(lookup, "test", HELD_OUT, HELD_OUT_SEED)
    write_rows(cell.place / "val.jsonl", [row | {"hopeless": False} for row in held_out])
    config = cell.place / "train.toml"
    dynamic = cell.arm == "dynamic_sampling"
    known = {
        "model": cell.model,
        "file": __file__,
        "sampler": "learnability" if cell.arm == "learnability" else "uniform",
        "group": GROUP,
        "dynamic": str(dynamic).lower(),
        "steps": steps,
        "tasks": TASKS,
        "seed": cell.seed,
    }
    config.write_text(CONFIG.format(**known))
    _, metrics = train(cell, config, {})
    return Outcome(by_rollouts(metrics, steps * TASKS * GROUP), {"groups_with_signal": with_signal(metrics)})


def by_rollouts(metrics: list[JSON], most: int) -> list[tuple[float, float]]:
    """Held-out success by the rollouts before it, up to as many as the arms without resampling have."""
    spent: dict[int, float] = {0: 0.0}
    for row in metrics:
        if row["kind"] == "step":
            spent[row["step"]] = spent[row["step"] - 1] + row["rollout/count"]
    points = [
        (spent[row["step"]], row["eval/greedy/reward_mean"]) for row in metrics if "eval/greedy/reward_mean" in row
    ]
    return sorted(point for point in points if point[0] <= most)


def with_signal(metrics: list[JSON]) -> float:
    """Mean share of groups whose rewards differ."""
    shares = [row["train/groups_with_signal"] for row in metrics if row["kind"] == "step"]
    return sum(shares) / len(shares)


CLAIMS = {
    "curriculum": Claim(
        arms=("uniform", "learnability", "dynamic_sampling"),
        measure=measure,
        prepare=lambda cell: warm_start(cell, "lookup"),
        goal=GOAL,
        cost="rollouts",
    )
}
