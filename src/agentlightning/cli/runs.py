"""``agl runs``: the runs of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli import bottlenecks, compare, retention, suggest
from agentlightning.cli.drift import show_drift
from agentlightning.cli.options import RunId, Runs, Store, print_columns, with_store
from agentlightning.cli.quantities import shown_bytes

if TYPE_CHECKING:
    from agentlightning.records import Run, RunSize
    from agentlightning.store.base import LightningStore

app = typer.Typer(help="List, show, compare, export and delete runs.", no_args_is_help=True, rich_markup_mode=None)
app.command("compare")(compare.compare)
app.command("export")(retention.export)
app.command("delete")(retention.delete)
app.command("bottlenecks")(bottlenecks.show_bottlenecks)
app.command("suggest")(suggest.suggest)


@app.command("list")
def list_runs(
    store: Store = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many runs.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Also the runs of agl check.")] = False,
    runs: Runs = Path("runs"),
    sizes: Annotated[bool, typer.Option("--sizes", help="Also how much each holds; reads all of it.")] = False,
    queue: Annotated[
        bool, typer.Option("--queue", help="Only the queued and running work of each running run.")
    ] = False,
) -> None:
    """List runs, newest first. One that says it runs, and whose process on this machine is gone, was killed."""
    if queue:
        _list_queues(store)
        return
    from rich.table import Table

    from agentlightning.analysis.run_settings import tags_of
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.serving import CHECK

    async def work(opened: LightningStore) -> tuple[list[Run], dict[str, RunSize]]:
        found = await opened.runs(limit=limit if everything else None)
        found = [run for run in found if everything or run.name != CHECK][:limit]
        return found, {one.run_id: one for one in await opened.sizes([run.id for run in found])} if sizes else {}

    found, held = with_store(store, work)
    table = Table(box=None)
    for column in ("run", "name", "tags", "state", "step", "reward", "held-out greedy", "created (UTC)"):
        table.add_column(column, no_wrap=column == "run")
    for column in ("rollouts", "calls", "spans", "size") if sizes else ():
        table.add_column(column, justify="right")
    for run in found:
        row = [run.id, run.name, " ".join(tags_of(run)), state_of(run, runs), str(run.summary.get("step", ""))]
        row += [_number(run.summary.get(name)) for name in ("train/reward_mean", "eval/greedy/reward_mean")]
        row.append(_time(run.created_ns))
        if size := held.get(run.id):
            row += [str(size.rollouts), str(size.calls), str(size.spans), shown_bytes(size.bytes)]
        table.add_row(*row)
    screen().print(table if found else "no run yet; start one with: agl demo")


def _list_queues(store: str | None) -> None:
    from agentlightning.trainer.display import screen

    numbers = with_store(store, lambda opened: opened.statistics())
    if not numbers:
        screen().print("no run is running")
        return
    rows = [("run", "queued", "oldest queued", "running", "leases expiring", "workers")]
    for one in numbers:
        oldest = f"{one.oldest_queued_s:.0f} s" if one.queued else "-"
        rows.append((one.run_id, str(one.queued), oldest, str(one.running), str(one.expiring), str(one.workers)))
    print_columns(screen(), rows)


@app.command("show")
def show_run(
    run: RunId,
    drift: Annotated[
        bool, typer.Option("--drift", help="Show which calls do not continue the tokens sampled before, and why.")
    ] = False,
    store: Store = None,
) -> None:
    """Show a run: its settings, rollouts by state, checkpoints, latest metrics and warnings."""
    if drift:
        show_drift(run, store)
        return
    import orjson

    from agentlightning.analysis.compare import amount_text, read_cost
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.monitor.health_checks import active_alarms
    from agentlightning.trainer.monitor.metrics import group_of, in_order

    async def work(opened: LightningStore) -> None:
        found = await find_run(opened, run)
        counts = await opened.count(run)
        checkpoints = await opened.checkpoints(run)
        metrics = await opened.metrics(run)
        cost = await read_cost(opened, run)
        console = screen()
        console.print(f"{found.id}  {found.name}  {found.state}  created {_time(found.created_ns)} UTC")
        console.print_json(orjson.dumps(found.config).decode())
        for (mode, state), number in sorted(counts.items()):
            console.print(f"{mode} rollouts {state}: {number}")
        for checkpoint in checkpoints:
            console.print(f"checkpoint step {checkpoint.step}: {_place(checkpoint.path)}", soft_wrap=True)
        if undone := sorted({metric.step for metric in metrics if metric.abandoned}):
            console.print(f"steps that a crash undid: {', '.join(map(str, undone))}; their metrics are left out")
        latest = {metric.name: metric for metric in metrics if not metric.abandoned}
        group = ""
        for name in in_order(latest):
            if group_of(name) != group:
                group = group_of(name)
                console.print(f"{group}:")
            console.print(f"  {name}: {latest[name].value:.4g} (step {latest[name].step})")
        if cost.amounts:
            told = ", ".join(f"{name} {amount_text(value)}" for name, value in cost.amounts.items())
            console.print(f"cost of its training steps{', about' if cost.estimated else ''}: {told}", soft_wrap=True)
        for name, text in active_alarms(found).items():
            console.print(f"warning {name}: {text}", soft_wrap=True)

    with_store(store, work)


@app.command("tag")
def tag_run(
    run: RunId,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Words; none takes all away.")] = None,
    store: Store = None,
) -> None:
    """Give a run these tags, in place of those that it has, to find it by."""
    from agentlightning.analysis.run_settings import TAGS
    from agentlightning.config.run import MonitorConfig, parse_settings

    checked = parse_settings(MonitorConfig, {"tags": tags or []}, "agl runs tag").tags
    with_store(store, lambda opened: opened.update_run(run, summary={TAGS: list(checked)}))
    typer.echo(f"{run}: {' '.join(checked) or 'no tag'}")


def state_of(run: Run, runs: Path) -> str:
    """The run's state; killed where it says that it runs, was trained in its folder here, and no process holds that.

    A training, or a search for prompts, that was killed or failed is listed with the line that resumes it.
    """
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.prompts.optimization import optimize_line
    from agentlightning.trainer.run_lease import is_elsewhere
    from agentlightning.trainer.serving import is_search, is_training
    from agentlightning.trainer.training import resume_line

    folder = RunFolder(runs, run.id)
    here = (folder.path / "lock").exists() and not is_elsewhere(run, folder)
    state = "killed" if run.state == "running" and here and not folder.is_held else run.state
    if not here or state not in ("killed", "failed") or not (is_training(run) or is_search(run)):
        return state
    return f"{state}; {(optimize_line if is_search(run) else resume_line)(folder.path)}"


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def _place(path: str) -> str:
    """Path or URL of a checkpoint, with a note where the folder is not there.

    >>> _place("s3://bucket/run/step-000010"), _place("/")
    ('s3://bucket/run/step-000010', '/')
    >>> _place("/nowhere/step-000000")
    '/nowhere/step-000000  (not here: deleted by trainer.keep_checkpoints, or on another host)'
    """
    if "://" in path or Path(path).is_dir():
        return path
    return f"{path}  (not here: deleted by trainer.keep_checkpoints, or on another host)"


def _time(nanoseconds: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
