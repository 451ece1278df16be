"""``agl runs rerun``: a run's record, started again as a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import RunId, Runs, Store, with_store
from agentlightning.errors import ConfigError, ConflictError

KINDS = ("code", "data")
"""Kinds of things that may be others than those that a run was started with."""


def rerun(
    run: RunId,
    changed_ok: Annotated[
        list[str] | None,
        typer.Option("--changed-ok", help="Go on although this is another now: code, data. May be repeated."),
    ] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Start a training run again from its record: the same settings, code and tasks, as a new run.

    Refused where code or tasks are not those that the run was last started with.
    """
    from agentlightning.cli.train import run_and_report
    from agentlightning.store.open import store_url
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.data.tasks import load_tasks
    from agentlightning.trainer.fingerprint import Fingerprint, take_fingerprint
    from agentlightning.trainer.run_config import recorded_config
    from agentlightning.trainer.serving import is_training
    from agentlightning.trainer.training import new_run_id

    if unknown := [kind for kind in changed_ok or [] if kind not in KINDS]:
        raise ConfigError(f"--changed-ok: expected {' or '.join(KINDS)}, got {unknown[0]!r:.80}")
    found = with_store(store, lambda opened: find_run(opened, run))
    if not is_training(found):
        raise ConflictError(f"{run}: is no training run, and is not started again")
    config = recorded_config(found, store_url(store))
    data = config.data
    tasks = [] if data.train is None else load_tasks(data.train, data.fields, config.trainer.seed)
    then, now = Fingerprint.of_summary(found.summary), take_fingerprint(config, tasks)
    changed = [kind for kind in KINDS if getattr(then, kind) != getattr(now, kind)]
    if refused := [kind for kind in changed if kind not in (changed_ok or [])]:
        what = " and ".join(refused)
        options = " ".join(f"--changed-ok {kind}" for kind in refused)
        untaken = "" if then.code else " (nobody took them then: it is of an earlier version)"
        raise ConflictError(
            f"{run}: {what} {'is' if len(refused) == 1 else 'are'} not what the run was last started with{untaken}; "
            f"start it all the same with: {options}"
        )
    run_and_report(config, RunFolder(runs, new_run_id()), name=found.name)
