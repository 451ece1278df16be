"""A newcomer's own task on two cores: types what docs/own-task.md says, and nothing else.

    python benchmarks/own_task.py [--seeds 3]

Each seed gets a folder with the page's files and runs its commands, with the page's seed 0 replaced by its own. Success is
greedy, on held-out tasks, as the run recorded it before its first and after its last step.

Last line: {"demonstrator", "before", "after", "wall_s", "cpu_s"}: the demonstrator's success, the highest `before`, the
lowest `after` and the longest time of all seeds. On a busy machine cpu_s says more than wall_s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentlightning.trainer.checkpoint import RunFolder

PAGE = Path(__file__).resolve().parents[1] / "docs" / "own-task.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_seed(seed: int, folder: Path) -> dict[str, float]:
    """Writes the page's files, runs its commands in order, and returns what they came to."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("AGL_STORE", None)
    began, used = time.monotonic(), children_cpu()
    printed = ""
    for language, body in FENCE.findall(PAGE.read_text()):
        if language == "bash":
            typed = body.replace("--seed 0", f"--seed {seed}").replace("trainer.seed=0", f"trainer.seed={seed}")
            printed += subprocess.run(
                ["bash", "-e", "-c", typed], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        else:
            (folder / body.split("\n", 1)[0].removeprefix("# ")).write_text(body)
    spent = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(children_cpu() - used, 1)}
    (demonstrator,) = re.findall(r'"demonstrator": ([0-9.]+)', printed)
    runs = [RunFolder(folder / "runs", path.name).metrics() for path in (folder / "runs").iterdir() if path.is_dir()]
    (rows,) = (rows for rows in runs if any(row["kind"] == "step" for row in rows))
    greedy = [row["eval/greedy/reward_mean"] for row in rows if "eval/greedy/reward_mean" in row]
    return {"demonstrator": float(demonstrator), "before": greedy[0], "after": greedy[-1], **spent}


def children_cpu() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = []
    for seed in range(parser.parse_args().seeds):
        with tempfile.TemporaryDirectory() as folder:
            seeds.append(run_seed(seed, Path(folder)))
        print(json.dumps({"seed": seed, **seeds[-1]}), flush=True)
    worst = {"demonstrator": max, "before": max, "after": min, "wall_s": max, "cpu_s": max}
    print(json.dumps({name: choose(each[name] for each in seeds) for name, choose in worst.items()}))


if __name__ == "__main__":
    main()
