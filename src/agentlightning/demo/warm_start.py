"""The warm start: a policy that knows the protocol of a demo task and has a demonstrator's bad habits.

`python -m agentlightning.demo.warm_start --task sql --to FOLDER` is what `agl demo` runs first. It builds the tiny model,
lets it imitate scripted demonstrations and writes a transformers folder. Progress goes to standard output, one JSON
object a line; the last one has the demonstrator's success rate. Rewards and agents play no part here.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging as transformers_logging

from agentlightning.demo import tasks, tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.records import JSON
from agentlightning.runtime.children import end_with_parent, keep_files_private

DEMONSTRATIONS = 3000


def main() -> None:
    """Entry point; raises the errors of errors.py as they are."""
    parser = argparse.ArgumentParser(prog="agentlightning.demo.warm_start", description=__doc__)
    parser.add_argument("--task", choices=tasks.NAMES, default="sql")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--threads", type=int, help="as many as there are cores that nobody else uses, if left out")
    parser.add_argument("--head-dim", type=int, help="width of attention heads; vLLM on a CPU takes 32 and more")
    parser.add_argument("--child", action="store_true", help="end when the parent does")
    options = parser.parse_args()
    if options.child:
        end_with_parent()
        keep_files_private()
    transformers_logging.disable_progress_bar()

    def report(facts: JSON) -> None:
        sys.stdout.write(json.dumps({"phase": "warm_start", **facts}) + "\n")
        sys.stdout.flush()

    heads = {} if options.head_dim is None else {"head_dim": options.head_dim}
    report(warm_start(options.task, options.to, seed=options.seed, threads=options.threads, report=report, **heads))


def warm_start(
    name: str,
    folder: Path,
    *,
    seed: int,
    threads: int | None,
    report: Callable[[JSON], None],
    steps: int | None = None,
    count: int = DEMONSTRATIONS,
    **model: int,
) -> JSON:
    """Make the policy of a demo task in `folder`; returns the facts about it. `steps`: the task's own number; model: of
    tiny_model.write."""
    started = time.monotonic()
    task = tasks.load(name)
    steps = task.WARM_START_STEPS if steps is None else steps
    demos, success = tasks.demonstrations(task, count, seed)
    texts = [message["content"] for demo in demos for message in demo]
    parameters = tiny_model.build(folder, texts, seed=seed, special_words=task.SPECIAL_WORDS, **model)
    rows = encode_all(folder, demos)
    imitate(folder, batches(rows, seed), Imitation(steps=steps, threads=threads), report=report)
    return {
        "task": name,
        "seed": seed,
        "demonstrator": round(success, 4),
        "demonstrations": count,
        "parameters": parameters,
        "seconds": round(time.monotonic() - started, 2),
        "folder": str(folder),
    }


if __name__ == "__main__":
    main()
