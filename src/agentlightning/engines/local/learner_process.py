"""The process of a learner, or of one of its ranks.

    python -m agentlightning.engines.local.learner_process --model DIR --fd N [options]

The engine drives it over a socket pair with (method, arguments) messages; if the learner has several processes, this one is
rank 0 and starts the others with its own arguments (sharding.py). Refuses to know what a method does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from agentlightning.config.engine import FsdpLearner
from agentlightning.engines import pipe as child_pipe
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.model import settle
from agentlightning.engines.local.sharding import Follow, Ranks, lead
from agentlightning.engines.pipe import Pipe
from agentlightning.engines.setup import LearnerSetup
from agentlightning.errors import AgentLightningError, EngineError, printable
from agentlightning.runtime.children import end_with_parent, keep_files_private
from agentlightning.runtime.log_lines import line_handler
from agentlightning.runtime.watchdog import HangLimits, beat_to_parent

METHODS = (
    *("forward_backward", "forward_backward_preferences", "logprobs", "reference_logprobs", "values", "token_numbers"),
    *("optim_step", "save", "load", "export"),
)

log = logging.getLogger("agentlightning.learner")


def carry_out(learner: Learner, method: str, *arguments: Any) -> Any:
    """Of several ranks, one whose method fails unforeseen is in no collective of the others any more: it ends."""
    if method not in METHODS:
        raise EngineError(f"the learner has no method {method!r}")
    try:
        return getattr(learner, method)(*arguments)
    except AgentLightningError:
        raise
    except Exception as error:
        if learner.ranks.count > 1:
            raise
        log.exception("%s failed", method)
        raise EngineError(f"{method} failed: {type(error).__name__}: {error}") from error


def _join(given: argparse.Namespace, setup: LearnerSetup, pipe: Connection) -> tuple[Pipe, Ranks]:
    """Meet the other ranks, where there are any."""
    learner = setup.config.learner
    ranks = Ranks(given.rank, learner.processes if isinstance(learner, FsdpLearner) else 1)
    if ranks.count == 1:
        return pipe, ranks
    device = ranks.device(settle(setup.config.device, setup.config.dtype).device)
    limits = HangLimits(**json.loads(given.limits))
    if ranks.rank > 0:
        ranks.meet(device, limits, given.port)
        return Follow(pipe), ranks
    same = ["--model", given.model, "--setup", given.setup, "--limits", given.limits]
    return lead(ranks, pipe, device, limits, [f"{__package__}.learner_process", *same]), ranks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentlightning.engines.local.learner_process")
    parser.add_argument("--model", required=True, help="transformers folder")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket pair's end")
    parser.add_argument("--setup", default="{}", help="LearnerSetup as JSON")
    parser.add_argument("--limits", default="{}", help="HangLimits of the other ranks as JSON")
    parser.add_argument("--rank", type=int, default=0, help="number of this process")
    parser.add_argument("--port", type=int, help="where the others meet rank 0")
    given = parser.parse_args(arguments)
    end_with_parent()
    keep_files_private()
    heartbeat = beat_to_parent()
    name = f"learner rank {given.rank}" if given.rank else "learner"
    logging.basicConfig(level=logging.INFO, handlers=[line_handler(f"%(asctime)s {name} %(message)s")])
    engine: Connection = Connection(given.fd)
    pipe: Pipe = engine
    setup = LearnerSetup.from_json(given.setup)
    try:
        pipe, ranks = _join(given, setup, engine)
        learner = Learner(given.model, setup, on_progress=heartbeat.progress, ranks=ranks)
        ranks.gather(None)
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        pipe.send(("error", type(error).__name__, str(error)))
        return error.exit_code
    pipe.send(("ok", settle(setup.config.device, setup.config.dtype).device))
    with contextlib.suppress(ConnectionError):
        child_pipe.serve(partial(carry_out, learner), pipe, heartbeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
