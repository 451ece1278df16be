"""Measures the longest row that a learner can train here, in a process of its own: prints a number of tokens, or null.

Two rows of different lengths are trained. A row longer than a micro-batch is recomputed layer by layer and attends without a
table of all pairs, so that memory grows by the token: the rest of the free memory is divided by what a token took.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import ctypes
import sys
import threading
import time
from collections.abc import Callable

import orjson
import psutil
import torch

from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.model import free_memory, settle
from agentlightning.errors import AgentLightningError
from agentlightning.training_types import Loss, TrainingSequence

FIRST, LAST = 256, 8192
"""Tokens of the two rows: the second is as long as `SECONDS` allow."""
SECONDS = 10.0
SHARE = 0.9
"""Share of the free memory that a row may take; allocators fragment the rest."""
ROUNDED = 256


def free_bytes(device: str) -> int | None:
    if device.startswith("cuda"):
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return free_memory() if device == "cpu" else None


def longest_row(
    learner: Learner, device: str, context: int, free: Callable[[str], int | None] = free_bytes
) -> int | None:
    """At most `context`. None where two rows are too short to tell, or the device does not say its memory."""
    _train(learner, 16)  # the optimizer's moments are there from now on
    left, started = free(device), time.perf_counter()
    small = growth(device, lambda: _train(learner, min(FIRST, context)))
    fitting = int(SECONDS / (time.perf_counter() - started) * FIRST)
    second = min(context, LAST, max(2 * FIRST, fitting))
    if second <= FIRST:
        return context
    token = (growth(device, lambda: _train(learner, second)) - small) / (second - FIRST)
    if left is None or token <= 0:
        return None
    overhead = max(0.0, small - token * FIRST)
    fits = int((SHARE * left - overhead) / token) // ROUNDED * ROUNDED
    return min(context, max(second, fits))


def _train(learner: Learner, count: int) -> None:
    """One update, at a rate of 0, by a row of so many tokens."""
    tokens = [2 + place % 50 for place in range(count)]
    numbers = [0.5] * count
    mask = [place > 0 for place in range(count)]
    row = TrainingSequence(
        rollout_id="longest row",
        tokens=tokens,
        mask=mask,
        logprobs=[-1.0] * count,
        advantages=numbers,
        weights=numbers,
        segments=[(1, count)],
    )
    learner.forward_backward([row], Loss())
    learner.optim_step(0.0, 1.0)


def used(device: str) -> int:
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else psutil.Process().memory_info().rss


def growth(device: str, work: Callable[[], object]) -> int:
    """Bytes that are in use at most while it works, beyond those before."""
    if device.startswith("cuda"):
        before = used(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # memory that was freed and not given back would hide what is taken now
        libc.malloc_trim(0)
    most = before = used(device)
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, used(device))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(most, used(device)) - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="transformers folder")
    parser.add_argument("--setup", required=True, help="LearnerSetup as JSON")
    given = parser.parse_args()
    setup = LearnerSetup.from_json(given.setup)
    # Shorter micro-batches than either row: both are recomputed, as a long one would be.
    config = setup.config.model_copy(update={"max_tokens_per_microbatch": 8})
    try:
        learner = Learner(given.model, LearnerSetup(config=config, needs=setup.needs, turns=setup.turns))
        context = learner.model.config.get_text_config().max_position_embeddings
        print(orjson.dumps(longest_row(learner, settle(config.device, config.dtype).device, context)).decode())
    except AgentLightningError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
